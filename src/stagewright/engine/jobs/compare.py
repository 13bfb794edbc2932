"""Run the same batch of the same model under several plans and compare the results.

Speed-ups are relative to the single-device baseline. A plan that fails the parity check, is rejected or fails has a row
too, with the reason and without a speed-up.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from stagewright.engine.jobs.measure import merge_results
from stagewright.engine.launch.launcher import launch
from stagewright.engine.launch.termination import sigterm_raises
from stagewright.engine.parallel.resolve import resolve_plan
from stagewright.engine.worker.watchdog import HANG_S
from stagewright.errors import RunError, StagewrightError, UsageError
from stagewright.runs.baseline import fastest_variant
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.spec.unequal_devices import MEASURED

Progress = Callable[[str], None]


def run_plan(plan: Plan, root: str | Path, *, progress: Progress | None = None, hang_s: float = HANG_S) -> RunResult:
    """Resolve and run one plan in a new run folder; return the merged result."""
    report = progress or (lambda text: None)
    report("resolving")
    plan = resolve_plan(plan)
    folder = RunFolder.create(root, plan)
    report("running")
    try:
        launch(plan, folder, hang_s=hang_s)
        result = merge_results(folder.plan() if plan.speeds == MEASURED else plan, folder)
    except BaseException as error:
        with suppress(StagewrightError):  # the folder may be gone or the disk full: the fault is reported
            folder.finish_with_error(error)
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
    """Run each plan; return its row, with ``speedup`` over the single-device plan if it passes the parity check.

    Several rounds are interleaved, so that a slow phase of the machine affects all plans: see ``median_rows``.
    """
    with sigterm_raises("the comparison"):
        results = [[_run_row(plan, root, progress, hang_s) for plan in plans] for _ in range(rounds)]
    serial = _baseline_index(plans, results)
    rows = median_rows(results, serial)
    for row in [*(row for one_round in results for row in median_rows([one_round], serial)), *rows]:
        _save_row(row)
    return rows


def _baseline_index(plans: Sequence[Plan], rounds: Sequence[Sequence[RunResult]]) -> int | None:
    """Return the fastest single-device plan, over all rounds; None if none has run."""
    return fastest_variant(
        {
            index: [results[index].latency_s for results in rounds if results[index].is_timed]
            for index, plan in enumerate(plans)
            if plan.mesh.num_workers == 1
        }
    )


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
    """Run a plan; if it is rejected or fails, the result holds the reason."""
    try:
        return run_plan(plan, root, progress=partial(progress, plan) if progress is not None else None, hang_s=hang_s)
    except (UsageError, RunError) as error:
        return RunResult.of_failure(plan, error)
