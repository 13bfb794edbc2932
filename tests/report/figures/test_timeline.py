"""The drawn step: every kind of bar, wide enough for its number."""

from __future__ import annotations

from pathlib import Path

from stagewright.report.figures.timeline import draw_timeline
from stagewright.report.timeline import Bar, MemoryLine, Timeline

NAMES = ("F", "B", "I", "W", "R", "L", "codec", "optimizer")


def test_every_kind_of_bar(tmp_path: Path) -> None:
    """Wide bars carry the number of their micro-batch, on whatever colour they have."""
    bars = [
        Bar(lane=0, stream="compute", name=name, stage=0, microbatch=at + 41, start_s=float(at), end_s=at + 1.0)
        for at, name in enumerate(NAMES)
    ]
    bars += [
        Bar(lane=1, stream=stream, name="message", stage=stage, microbatch=0, start_s=float(at), end_s=at + 2.0)
        for at, (stream, stage) in enumerate([("send", 1), ("receive", 1), ("tensor", 1), ("data", -1)])
    ]
    line = MemoryLine(label="worker 0", stage=0, times_s=(0.0, 4.0), held_bytes=(1 << 20, 3 << 20), limit_bytes=None)
    step = Timeline(
        title="a step", caption="", step_s=8.0, lanes=("worker 0", "worker 1"), bars=tuple(bars), memory=(line,)
    )
    drawn = draw_timeline(step, tmp_path / "step.svg", beside=step).read_text()
    numbered = [name for name in NAMES if f">{NAMES.index(name) + 41}<" in drawn]
    assert numbered == [name for name in NAMES if name not in ("L", "R")]
