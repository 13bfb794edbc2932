"""A step's timeline for the terminal: one row per worker, one column per slice of time.

0  0123····0·1·2·3      the last digit of the micro-batch, forward plain, backward bold;
1   0 0 1 1 2 2 3 3     + collective, o optimizer, c codec, · idle
"""

from __future__ import annotations

import bisect

from rich.text import Text

from stagewright.quantity import format_s
from stagewright.report.palette import stage_color
from stagewright.report.timeline import Bar, Timeline

_LEGEND = "    digits: micro-batch, forward plain, backward filled; + collective, o optimizer, c codec, · idle"


def timeline_text(timeline: Timeline, width: int = 100) -> list[Text]:
    """Draw the lines; none if the step is too long to draw."""
    if not timeline.bars:
        return []
    end = max(timeline.step_s, max(bar.end_s for bar in timeline.bars))
    columns = max(20, width - 6)
    lines = []
    for lane in range(len(timeline.lanes)):
        hidden = ("send", "receive", "data") if timeline.is_measured else ("send", "receive")
        bars = [bar for bar in timeline.bars if bar.lane == lane and bar.stream not in hidden]
        bars.sort(key=lambda bar: bar.start_s)
        starts = [bar.start_s for bar in bars]
        longest_s = max((bar.end_s - bar.start_s for bar in bars), default=0.0)
        line = Text(f"{timeline.lanes[lane].removeprefix('worker '):>3} ")
        for column in range(columns):
            moment = (column + 0.5) * end / columns
            near = bars[bisect.bisect_left(starts, moment - longest_s) : bisect.bisect_right(starts, moment)]
            line.append_text(_draw_cell(near, moment))
        lines.append(line)
    lines.append(Text(f"    0{format_s(end):>{columns - 1}}", style="dim"))
    lines.append(Text(_LEGEND))
    return lines


def _draw_cell(bars: list[Bar], moment: float) -> Text:
    active = [bar for bar in bars if bar.start_s <= moment < bar.end_s]
    if any(bar.stream == "wait" for bar in active):
        return Text("·", style="dim")
    has_exposed_collective = any(bar.stream == "tensor" for bar in active)
    computing = next((bar for bar in reversed(active) if bar.stream == "compute"), None)
    if computing is not None and not has_exposed_collective:
        if computing.name in ("optimizer", "codec"):
            return Text(computing.name[0], style="dim")
        style = stage_color(computing.stage) + ("" if computing.name in ("F", "L") else " bold reverse")
        return Text(str(max(0, computing.microbatch) % 10), style=style)
    return Text("+") if active else Text("·", style="dim")
