"""Draw docs/pictures/schedules/ from the actions that the engine executes: `python docs/make_schedule_pictures.py`.

Schedules are simulated by docs/make_schedules_page.py (ideal workers, free links) and drawn by the figure that draws
forecasts and traces. All pictures have the same scale.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from stagewright.report.figures.file import write_figure
from stagewright.report.figures.timeline import timeline_figure
from stagewright.report.palette import INK
from stagewright.report.timeline import Bar, Timeline
from stagewright.schedules.rules import SCHEDULES

FOLDER = Path(__file__).with_name("pictures") / "schedules"
NUM_WORKERS, NUM_MICROBATCHES = 4, 8
MAX_TICKS = 66  # of GPipe and 1F1B
_simulate: Any = runpy.run_path(str(Path(__file__).with_name("make_schedules_page.py")))["simulate"]


def picture(schedule: str) -> Figure:
    """Draw the timeline of a schedule."""
    simulated = _simulate(schedule, NUM_WORKERS, NUM_MICROBATCHES)
    assert simulated.ticks <= MAX_TICKS
    timeline = Timeline(
        title=schedule,
        caption=f"{NUM_WORKERS} workers, {NUM_MICROBATCHES} micro-batches: {simulated.ticks} ticks, bubble "
        f"{simulated.bubble:.0%}",
        step_s=MAX_TICKS,
        lanes=tuple(_lane(worker, spans) for worker, spans in enumerate(simulated.spans)),
        bars=tuple(
            Bar(
                lane=worker,
                stream="compute",
                name=action.kind.value,
                stage=action.stage,
                microbatch=action.microbatch,
                start_s=start,
                end_s=end,
            )
            for worker, spans in enumerate(simulated.spans)
            for action, start, end in spans
        ),
    )
    figure = timeline_figure(timeline)
    (axes,) = figure.axes
    axes.set_xlabel("time in ticks", color=INK)
    axes.set_xticks(range(0, MAX_TICKS + 1, 6))
    return figure


def _lane(worker: int, spans: Any) -> str:
    stages = sorted({action.stage for action, _, _ in spans})
    return f"worker {worker}\nstage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def draw_all(folder: Path) -> list[Path]:
    """Write one file per schedule."""
    folder.mkdir(parents=True, exist_ok=True)
    return [write_figure(picture(schedule), folder / f"{schedule}.svg") for schedule in SCHEDULES]


if __name__ == "__main__":
    draw_all(FOLDER)
