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

from stagewright.engine.jobs.measure import merge_results
from stagewright.engine.launch.launcher import launch
from stagewright.engine.parallel.resolve import resolve_plan
from stagewright.engine.worker.watchdog import HANG_S
from stagewright.errors import RunError, UsageError
from stagewright.runs.result import RunResult
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
) -> RunResult:
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
) -> list[RunResult]:
    """Run each plan; rows with ``speedup`` over the serial one among them (only where equal to serial).

    In several rounds plans take turns, so that a slow phase of the machine hits all of them: see ``median_rows``.
    """
    found = [[_run_row(plan, root, progress, hang_s) for plan in plans] for _ in range(rounds)]
    serial = next((at for at, plan in enumerate(plans) if plan.mesh.num_workers == 1), None)
    rows = median_rows(found, serial)
    for row in [*(row for one in found for row in median_rows([one], serial)), *rows]:
        _save_row(row)
    return rows


def median_rows(rounds: Sequence[Sequence[RunResult]], serial: int | None) -> list[RunResult]:
    """For each plan, take the run of median throughput; its speed-up is the median over rounds.

    Each round's speed-up is over the single-device baseline of the same round.
    """
    rows = []
    for index in range(len(rounds[0])):
        runs = [results[index] for results in rounds]
        failed = next((run for run in runs if run.error is not None), None)
        if failed is not None:
            rows.append(failed)
            continue
        median = sorted(runs, key=lambda run: run.samples_per_s)[len(runs) // 2]
        equal = all(run.equal for run in runs)
        ratios = [
            results[index].samples_per_s / results[serial].samples_per_s
            for results in rounds
            if serial is not None and results[serial].error is None
        ]
        speedup = statistics.median(ratios) if ratios and equal else None
        rows.append(
            replace(
                median,
                equal=equal,
                is_compared=True,
                speedup=speedup,
                share_of_bound=None if speedup is None else speedup / median.bound,
                speedups=None if len(rounds) == 1 else tuple(ratios) if equal else (),
            )
        )
    return rows


def _save_row(row: RunResult) -> None:
    """Write the row to the run folder, whose result was saved before the speed-up was known."""
    if row.run is not None:
        folder = RunFolder(Path(row.run))
        saved = folder.result()
        folder.finish("done", replace(row, ended=None if saved is None else saved.ended))


def _run_row(plan: Plan, root: str | Path, progress: Callable[[Plan, str], None] | None, hang_s: float) -> RunResult:
    """Run a plan; the result says why where it was refused or failed."""
    try:
        return run_plan(plan, root, progress=partial(progress, plan) if progress is not None else None, hang_s=hang_s)
    except (UsageError, RunError) as error:
        return RunResult.of_failure(plan, error)
