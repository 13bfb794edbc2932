"""Options that `forecast` and `explain` share, and how a plan file becomes what a forecast needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.screen import note, progress
from stagewright.quantity import format_age, parse_rate, parse_s

if TYPE_CHECKING:
    from stagewright.planner.forecast import Prepared
    from stagewright.profiler.profile import Profile
    from stagewright.spec.plan import Plan

_IF = "What if"
_WHERE = "Where"

ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="Another cluster than this machine.", rich_help_panel=_WHERE),
]
Rescale = Annotated[
    bool,
    typer.Option(
        "--rescale",
        help="Use times of another kind of device, multiplied by the cluster's speeds.",
        rich_help_panel=_WHERE,
    ),
]
Innermost = Annotated[
    str,
    typer.Option(help="Axis of neighbours in rank: pipeline (the engine's) or tensor.", rich_help_panel=_WHERE),
]
FreeCommunication = Annotated[
    bool, typer.Option("--free-communication", help="Links and collectives cost nothing.", rich_help_panel=_IF)
]
Bandwidth = Annotated[str | None, typer.Option(help="Of every link, like 10Gbit/s.", rich_help_panel=_IF)]
Latency = Annotated[str | None, typer.Option(help="Of every link, like 1us.", rich_help_panel=_IF)]
Devices = Annotated[
    int | None,
    typer.Option(min=1, help="As many devices, all alike.", rich_help_panel=_IF),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="Measure the model again and keep that, instead of taking what is kept.",
        rich_help_panel="How it is measured",
    ),
]
InfiniteDevices = Annotated[
    bool,
    typer.Option(
        "--infinite-devices", help="As many as there are units (pipeline) or samples (data).", rich_help_panel=_IF
    ),
]
PerfectBalance = Annotated[
    bool, typer.Option("--perfect-balance", help="Every stage takes the mean of all.", rich_help_panel=_IF)
]


def prepared_from(
    plan: Plan,
    *,
    cluster: Path | None,
    rescale: bool,
    innermost: str,
    cache: str | None,
    no_cache: bool,
    repeats: int,
    fresh: bool = False,
    every_schedule: bool = False,
) -> Prepared:
    """Measure what is missing and bring it together; refuses wrong files before anything is measured.

    `every_schedule`: backwards in two halves are measured too, for others than the plan's own schedule.
    """
    from stagewright.cluster.file import read_cluster
    from stagewright.errors import UnknownName
    from stagewright.machine.machine import default_devices
    from stagewright.planner.calibration.calibrate import load_calibration
    from stagewright.planner.costs.measure import MeasuredModel, chunk_sizes, measure_model
    from stagewright.planner.costs.source import source_around
    from stagewright.planner.forecast import check_kind, prepare
    from stagewright.spec.plan import AXES

    if innermost not in AXES:
        raise UnknownName("axis", innermost, AXES)
    chosen = read_cluster(cluster) if cluster is not None else None
    if chosen is not None and chosen.num_devices < plan.mesh.num_workers:
        from stagewright.simulator.topology import Topology

        Topology(mesh=plan.mesh, cluster=chosen)  # says so
    if chosen is not None:
        check_kind(plan.devices[0] if plan.devices else default_devices(1)[0], chosen, rescale)
    calibration = load_calibration(cache, progress=note)

    def measure(other: Plan, size: int | None) -> MeasuredModel:
        layers = f" as one of {other.mesh.tensor}" if other.mesh.tensor > 1 else ""
        with progress(f"measuring {other.model.name}, micro-batches of {max(chunk_sizes(other))}{layers}") as report:
            return measure_model(
                other,
                size=size,
                cache=False if no_cache else cache or True,
                repeats=repeats,
                fresh=fresh,
                progress=report,
            )

    measured = measure(plan, max(chunk_sizes(plan)) if every_schedule else None)
    if chosen is None:
        chosen = calibration.cluster(plan.mesh.num_workers)
    return prepare(
        plan,
        measured,
        chosen,
        calibration.terms_on(chosen),
        innermost=innermost,
        rescale=rescale,
        source=source_around(plan, measured, measure, repeats=repeats),
    )


def note_profile(profile: Profile) -> None:
    """Say where the times are from, how old they are, and how to have others."""
    where = f"micro-batches of {profile.batch_size} on {profile.device}"
    if profile.source == "cache":
        note(f"from a profile of {where}, measured {format_age(profile.age_s)} ago; --fresh measures again")
    else:
        note(f"from a profile of {where}; times: {profile.source}")


def what_if(
    prepared: Prepared,
    *,
    free_communication: bool,
    bandwidth: str | None,
    latency: str | None,
    devices: int | None,
    infinite_devices: bool,
    perfect_balance: bool,
) -> Prepared:
    """The same with what was asked changed."""
    from stagewright.planner.resize import resized
    from stagewright.simulator.what_if import perfectly_balanced, with_links, without_communication

    if devices is not None or infinite_devices:
        prepared = resized(prepared, devices)
    if bandwidth is not None or latency is not None:
        cluster = with_links(
            prepared.cluster,
            parse_rate(bandwidth) if bandwidth is not None else None,
            parse_s(latency) if latency is not None else None,
        )
        prepared = prepared.changed(cluster=cluster)
    costs = prepared.costs
    if free_communication:
        costs = without_communication(costs)
    if perfect_balance:
        costs = perfectly_balanced(costs)
    return replace(prepared, costs=costs)
