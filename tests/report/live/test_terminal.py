"""The same as the page, in the terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from stagewright.engine.worker.faults import Doing, Fault
from stagewright.report.live.changes import ActivitySeen, Change, FaultSeen, MetricsLine, PlanRead, ResultRead
from stagewright.report.live.fold import fold
from stagewright.report.live.snapshot import snapshot
from stagewright.report.live.state import LiveState
from stagewright.report.live.terminal import live_line, live_view, sparkline
from stagewright.runs.result import RunResult
from stagewright.spec.plan import Mesh, ModelSpec, Plan


def shown(plan: Plan, *changes: Change, now_s: float = 0.0) -> dict[str, Any]:
    state = fold(LiveState(name="my-run"), PlanRead(name="my-run", plan=plan))
    for change in changes:
        state = fold(state, change)
    return snapshot(state, now_s)


def drawn(view: dict[str, Any], width: int = 110) -> str:
    console = Console(width=width, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(live_view(view, width - 2))
    console.file.close()
    return console.export_text()


def changes() -> list[Change]:
    values = {"kind": "step", "loss": 0.5, "samples": 8, "seconds": 0.5, "waited_s": 0.1, "memory_bytes": 3 * 2**20}
    begin: list[Change] = [MetricsLine(rank=0, values={"kind": "begin", "step": 0, "total": 8, "batches": 4})]
    lines = [MetricsLine(rank=rank, values={**values, "step": step, "epoch": 1}) for step in (1, 2) for rank in (0, 1)]
    seen = ActivitySeen(
        rank=1, doing=Doing(count=2, step=2, stage=1, microbatch=3, action="receive activation"), at_s=0.0
    )
    return [*begin, *lines, seen]


def test_everything_is_there(plan: Plan) -> None:
    text = drawn(shown(plan, *changes()))
    for words in (
        "my-run",
        "running",
        "digits-vit on digits, pipeline=2, 1f1b, batch 8 in 4 micro-batches",
        "step 2 of 8",
        "epoch 1 of 2",
        "loss 0.5",
        "16 samples/s",
        "bubble 20%",
        "process memory 3.00 MiB",
        "3.00 s left",
        "receive activation, micro-batch 3",
        "on another host",
        "cpu:1",
    ):
        assert words in text


def test_a_broken_run(plan: Plan) -> None:
    fault = Fault(worker=1, kind="raised", message="ValueError: [b]no[/b]", doing=Doing(step=2, action="forward"))
    view = shown(plan, *changes(), FaultSeen(fault=fault), now_s=1.0)
    text = drawn(view)
    assert "failed" in text
    assert "worker 1 failed: ValueError: [b]no[/b]" in text, "text of others is not markup"
    assert "at: step 2, forward" in text
    assert "my-run: failed" in live_line(view)


def test_names_are_not_markup() -> None:
    plan = Plan(model=ModelSpec(name="[red]x:y"), batch=2, mesh=Mesh(data=2), devices=("cpu:[/]", "cpu:1"))
    text = drawn(shown(plan))
    assert "[red]x:y" in text
    assert "cpu:[/]" in text


def test_waiting_and_ended(plan: Plan) -> None:
    assert "waiting for the run" in drawn(snapshot(LiveState(name="runs"), 0.0))
    assert live_line(snapshot(LiveState(name="runs"), 0.0)) == "runs: waiting for the run"
    text = drawn(shown(plan, *changes(), ResultRead(result=RunResult.from_dict({"status": "done"}))))
    assert "finished" in text
    assert "left" not in text
    assert "ended" in text


def test_a_mesh_has_replicas(plan: Plan) -> None:
    text = drawn(shown(replace(plan, mesh=Mesh(data=2, pipeline=2), devices=())))
    assert "replica" in text
    assert "stage" in text


def test_sparkline() -> None:
    assert sparkline([0.0, 1.0], 10) == "▁█"
    assert sparkline([1.0, 1.0, 1.0], 10) == "▁▁▁"
    assert sparkline(list(range(100)), 8) == "▁▂▃▄▅▆▇█"
