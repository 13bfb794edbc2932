"""Run folders made by hand: a step in which every number is known.

worker 0   F0 F1 ·· B0 ·· B1 o       forward 1 s, backward 2 s, optimiser 0.5 s, messages 0.25 s on their way
worker 1   ·· F0 B0 F1 B1 o
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stagewright.runs import RunFolder
from stagewright.spec import ModelSpec, Plan
from stagewright.spec.plan import Mesh

BEGIN = 100.0
"""What worker 0's clock says when the step begins; worker 1's is 7 s behind it."""


def row(kind: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    """One event, seconds after the step began."""
    streams = {"send": "send", "receive": "receive"}
    empty = dict.fromkeys(("stage", "microbatch", "bytes", "peer", "note"))
    times = {"start_s": BEGIN + start, "end_s": BEGIN + end}
    return {"step": 0, "kind": kind, "stream": streams.get(kind, "compute"), **empty, **times, **more}


def pipeline_rows() -> list[list[dict[str, Any]]]:
    """Two workers, two micro-batches, GPipe at the front and 1F1B behind; all numbers are exact in binary."""
    zero, one = {"stage": 0, "peer": 1}, {"stage": 1, "peer": 0}
    first = [
        row("step", 0, 12),
        row("forward", 0, 1, stage=0, microbatch=0),
        row("send", 1, 1.125, microbatch=0, bytes=100, note="activation", **zero),
        row("forward", 1.125, 2.125, stage=0, microbatch=1),
        row("send", 2.125, 2.25, microbatch=1, bytes=100, note="activation", **zero),
        row("receive", 2.25, 4.75, microbatch=0, bytes=100, note="gradient", **zero),
        row("backward", 4.75, 6.75, stage=0, microbatch=0),
        row("receive", 6.75, 8, microbatch=1, bytes=100, note="gradient", **zero),
        row("backward", 8, 10, stage=0, microbatch=1),
        row("optimizer", 10, 10.5),
        row("collective", 10.5, 11.5, note="loss"),
    ]
    second = [
        row("step", 0.5, 12),
        row("receive", 0.5, 1.25, microbatch=0, bytes=100, note="activation", **one),
        row("forward", 1.25, 2.25, stage=1, microbatch=0),
        row("backward", 2.25, 4.25, stage=1, microbatch=0),
        row("send", 4.25, 4.5, microbatch=0, bytes=100, note="gradient", **one),
        row("receive", 4.5, 4.5, microbatch=1, bytes=100, note="activation", **one),
        row("forward", 4.5, 5.5, stage=1, microbatch=1),
        row("backward", 5.5, 7.5, stage=1, microbatch=1),
        row("send", 7.5, 7.75, microbatch=1, bytes=100, note="gradient", **one),
        row("optimizer", 7.75, 8.25),
        row("collective", 8.25, 11.5, note="loss"),
    ]
    return [first, second]


def write_run(
    root: Path, mesh: str, workers: list[list[dict[str, Any]]], offsets: tuple[float, ...] = (), **about: Any
) -> RunFolder:
    """A run folder with these events; a worker's own clock differs from worker 0's by its offset."""
    plan = Plan(model=ModelSpec(name="mlp-mnist"), batch=8, mesh=Mesh.parse(mesh), **about)
    folder = RunFolder.create(root, plan, environment={})
    for rank, rows in enumerate(workers):
        offset = offsets[rank] if offsets else 0.0
        shifted = [{**one, "start_s": one["start_s"] - offset, "end_s": one["end_s"] - offset} for one in rows]
        folder.worker(rank).write_events(shifted)
        clock = {"host": f"host{rank}", "offset_s": offset, "error_s": 1e-4 * rank, "wall_s": 0.0}
        (folder.worker(rank).path / "clock.json").write_text(json.dumps(clock))
    folder.finish("done", {})
    return folder


def pipeline_run(root: Path) -> RunFolder:
    """The step that is drawn above, with clocks 7 s apart."""
    return write_run(root, "pipeline=2", pipeline_rows(), (0.0, 7.0), microbatches=2, cuts=("fc1",))
