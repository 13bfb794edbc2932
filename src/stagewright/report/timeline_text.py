"""A step's timeline for a terminal: one row a worker, one column a slice of time.

0  0123····0·1·2·3      a digit is the micro-batch's last one, forward plain, backward bold;
1   0 0 1 1 2 2 3 3     + a collective, o the optimiser, c a codec, · idle
"""

from __future__ import annotations

import bisect

from rich.text import Text

from stagewright.quantity import format_s
from stagewright.report.palette import stage_color
from stagewright.report.timeline import Bar, Timeline

__all__ = ["timeline_text"]

_LEGEND = "    digits: the micro-batch, forward plain, backward filled; + collective, o optimiser, c codec, · idle"


def timeline_text(timeline: Timeline, width: int = 100) -> list[Text]:
    """The lines; empty where the step is too long to be drawn."""
    if not timeline.bars:
        return []
    end = max(timeline.step_s, max(one.end_s for one in timeline.bars))
    columns = max(20, width - 6)
    lines = []
    for lane in range(len(timeline.lanes)):
        own = [one for one in timeline.bars if one.lane == lane and one.stream not in ("send", "receive")]
        own.sort(key=lambda one: one.start_s)
        starts = [one.start_s for one in own]
        longest = max((one.end_s - one.start_s for one in own), default=0.0)
        line = Text(f"{timeline.lanes[lane].removeprefix('worker '):>3} ")
        for column in range(columns):
            moment = (column + 0.5) * end / columns
            near = own[bisect.bisect_left(starts, moment - longest) : bisect.bisect_right(starts, moment)]
            line.append_text(_cell(near, moment))
        lines.append(line)
    lines.append(Text(f"    0{format_s(end):>{columns - 1}}", style="dim"))
    lines.append(Text(_LEGEND))
    return lines


def _cell(bars: list[Bar], moment: float) -> Text:
    here = [one for one in bars if one.start_s <= moment < one.end_s]
    waited = any(one.stream == "tensor" for one in here)
    computing = next((one for one in reversed(here) if one.stream == "compute"), None)
    if computing is not None and not waited:
        if computing.name in ("optimizer", "codec"):
            return Text(computing.name[0], style="dim")
        style = stage_color(computing.stage) + ("" if computing.name in ("F", "L") else " bold reverse")
        return Text(str(computing.microbatch % 10), style=style)
    return Text("+") if here else Text("·", style="dim")
