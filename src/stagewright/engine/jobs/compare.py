"""Run the same batch of the same model under several plans and line the results up.

Serial comes first: its throughput is what the others are compared with. A plan that is not equal to serial, that was
refused or that failed has a row too, with the reason and without a speed-up.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.engine.jobs.measure import merge_results
from stagewright.engine.launch.launcher import launch
from stagewright.engine.parallel.resolve import resolve_plan
from stagewright.engine.worker.watchdog import HANG_S
from stagewright.errors import RunError, UsageError
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, Plan

__all__ = ["compare", "median_rows", "run_plan", "strategy_plans"]

Progress = Callable[[str], None]


def strategy_plans(base: Plan, strategies: Sequence[str], num_devices: int, microbatches: int) -> list[Plan]:
    """One plan a strategy: a name (serial, data, tensor, pipeline) or a mesh such as ``data=2,pipeline=2``."""
    plans = []
    for text in strategies:
        simple = text in ("data", "tensor", "pipeline")
        mesh = Mesh.parse("serial" if text == "serial" else f"{text}={num_devices}" if simple else text)
        if mesh.num_workers > num_devices:
            raise UsageError(
                f"strategy {text!r} needs {mesh.num_workers} workers, but there are {num_devices} devices; "
                f"use --devices {mesh.num_workers}"
            )
        pipelined = mesh.pipeline > 1
        plans.append(
            replace(
                base,
                mesh=mesh,
                devices=base.devices[: mesh.num_workers],
                microbatches=microbatches if pipelined else 1,
                schedule=base.schedule if pipelined else "1f1b",
                stages=base.stages if pipelined else None,
                cuts=base.cuts if pipelined else (),
                placement=base.placement if pipelined else "auto",
                shard=base.shard and mesh.data > 1,
                codec=base.codec if pipelined else "none",
                codec_backward=base.codec_backward if pipelined else None,
            )
        )
    return plans


def run_plan(
    plan: Plan, root: str | Path, *, progress: Progress | None = None, hang_s: float = HANG_S
) -> dict[str, Any]:
    """Resolve and run one plan in a new run folder; its merged result."""
    tell = progress or (lambda text: None)
    tell("resolving")
    plan = resolve_plan(plan)
    folder = RunFolder.create(root, plan)
    tell("running")
    try:
        launch(plan, folder, hang_s=hang_s)
        result = merge_results(plan, folder)
    except KeyboardInterrupt:
        folder.finish("interrupted")
        raise
    except BaseException as error:
        folder.give_up(error)
        raise
    folder.finish("done", result)
    return result


def compare(
    plans: Sequence[Plan],
    root: str | Path,
    *,
    rounds: int = 1,
    progress: Callable[[Plan, str], None] | None = None,
    hang_s: float = HANG_S,
) -> list[dict[str, Any]]:
    """Run each plan; rows with ``speedup`` over the serial one among them (only where equal to serial).

    In several rounds plans take turns, so that a slow phase of the machine hits all of them: see ``median_rows``.
    """
    found = [[_row(plan, root, progress, hang_s) for plan in plans] for _ in range(rounds)]
    serial = next((at for at, plan in enumerate(plans) if plan.mesh.num_workers == 1), None)
    rows = median_rows(found, serial)
    for row in [*(row for one in found for row in median_rows([one], serial)), *rows]:
        _keep(row)
    return rows


def median_rows(rounds: Sequence[Sequence[dict[str, Any]]], serial: int | None) -> list[dict[str, Any]]:
    """For each plan, the run of median throughput; its speed-up is the median over rounds, each over its own serial."""
    rows = []
    for at in range(len(rounds[0])):
        failed = next((one[at] for one in rounds if "error" in one[at]), None)
        if failed is not None:
            rows.append(failed)
            continue
        runs = [one[at] for one in rounds]
        row = dict(sorted(runs, key=lambda one: float(one["samples_per_s"]))[len(runs) // 2])
        row["equal"] = all(one["equal"] for one in runs)
        ratios = [
            one[at]["samples_per_s"] / one[serial]["samples_per_s"]
            for one in rounds
            if serial is not None and "error" not in one[serial]
        ]
        row["speedup"] = statistics.median(ratios) if ratios and row["equal"] else None
        row["share_of_bound"] = row["speedup"] / row["bound"] if row["speedup"] is not None else None
        if len(rounds) > 1:
            row["speedups"] = ratios if row["equal"] else []
        rows.append(row)
    return rows


def _keep(row: dict[str, Any]) -> None:
    """Write the row over the run's own result, which was there before its speed-up was known."""
    if "run" in row:
        folder = RunFolder(Path(row["run"]))
        folder.finish("done", {**(folder.result() or {}), **row})


def _row(plan: Plan, root: str | Path, progress: Callable[[Plan, str], None] | None, hang_s: float) -> dict[str, Any]:
    """What one run of a plan gave, or why it gave nothing."""
    try:
        return run_plan(plan, root, progress=partial(progress, plan) if progress is not None else None, hang_s=hang_s)
    except (UsageError, RunError) as error:
        return {
            "strategy": plan.mesh.strategy,
            "shard": plan.shard,
            "workers": plan.mesh.num_workers,
            "batch": plan.batch,
            "microbatches": plan.microbatches,
            "schedule": plan.schedule if plan.mesh.pipeline > 1 else None,
            "refused": isinstance(error, UsageError),
            "error": str(error),
            "equal": None,
            "speedup": None,
        }
