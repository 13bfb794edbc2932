"""Measurement, progress and output of `stagewright fabric run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stagewright.cli.screen import note, print_table, progress, screen

if TYPE_CHECKING:
    from stagewright.fabric.ranks.coordinator import Measurements, RankLocation, Settings
    from stagewright.fabric.traffic.workload import Workload

_FLOOR_TRIALS = 30


def measure(
    workload: Workload, locations: list[RankLocation], settings: Settings, report: Callable[[int, int], None] | None
) -> Measurements:
    """Run a workload on its ranks."""
    from stagewright.fabric.ranks.coordinator import Coordinator

    with Coordinator(workload, locations, settings) as coordinator:
        return coordinator.run(report)


def measure_floor(workload: Workload, settings: Settings) -> Measurements:
    """Measure the same messages without a network: the floor that this host sets."""
    from stagewright.fabric.ranks.coordinator import RankLocation

    short = replace(workload, trials=min(workload.trials, _FLOOR_TRIALS), delays_s=(), time_limit_s=60.0)
    local = replace(settings, probe=False, steps=False, token=b"")
    return measure(short, [RankLocation(name="local")] * workload.num_ranks, local, None)


@contextmanager
def show_progress(workload: Workload) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar of the trials."""
    with progress(f"{workload.name} on {workload.num_ranks} ranks") as report:
        yield lambda done, total: report(done, total, "trials")


def print_result(data: dict[str, Any], *, nccl: bool, pairs: bool) -> None:
    """Print the table, the pairs and the remarks of a result."""
    from stagewright.report.tables.fabric import fabric_remarks, fabric_table, nccl_lines, pair_table

    console = screen()
    if nccl:
        for line in nccl_lines(data):
            print(line)
    else:
        title = f"{data['workload']}: {data['ranks']} ranks, {data['engine']}" + (
            ", overlapped" if data["overlap"] else ""
        )
        print_table(fabric_table(data, title))
    if pairs and data["pairs"]:
        print_table(pair_table(data["pairs"], data["ranks"]))
    for line in fabric_remarks(data):
        console.print(line, markup=False, soft_wrap=True)
    note(f"raw trials: {data['folder']}")
