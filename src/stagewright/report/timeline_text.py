"""A step's timeline for a terminal: one row a worker, one column a slice of time.

0  0123····0·1·2·3      a digit is the micro-batch's last one, forward plain, backward bold;
1   0 0 1 1 2 2 3 3     + a collective, o the optimiser, · idle
"""

from __future__ import annotations

from rich.text import Text

from stagewright.forecast.value import Forecast, Segment
from stagewright.quantity import format_s
from stagewright.report.palette import stage_color

__all__ = ["timeline_text"]


def timeline_text(forecast: Forecast, width: int = 100) -> list[Text]:
    """The lines; empty where the step is too long to be drawn."""
    if not forecast.segments:
        return []
    end = max(forecast.step_s, max(one.end_s for one in forecast.segments))
    columns = max(20, width - 6)
    lines = []
    for worker in forecast.workers:
        own = [
            one for one in forecast.segments if one.worker == worker.worker and one.stream not in ("send", "receive")
        ]
        line = Text(f"{worker.worker:>3} ")
        for column in range(columns):
            moment = (column + 0.5) * end / columns
            line.append_text(_cell(own, moment))
        lines.append(line)
    lines.append(Text(f"    0{format_s(end):>{columns - 1}}", style="dim"))
    lines.append(Text("    digits: the micro-batch, forward plain, backward filled; + collective, o optimiser, · idle"))
    return lines


def _cell(segments: list[Segment], moment: float) -> Text:
    here = [one for one in segments if one.start_s <= moment < one.end_s]
    computing = next((one for one in here if one.stream == "compute"), None)
    if computing is not None:
        if computing.name == "optimizer":
            return Text("o", style="dim")
        style = stage_color(computing.stage) + ("" if computing.name == "F" else " bold reverse")
        return Text(str(computing.microbatch % 10), style=style)
    return Text("+") if here else Text("·", style="dim")
