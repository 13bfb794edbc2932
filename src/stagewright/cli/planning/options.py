"""Options that the planning verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.screen import note
from stagewright.quantity import format_age, parse_rate, parse_s

if TYPE_CHECKING:
    from stagewright.api.forecast import Measuring, WhatIf
    from stagewright.profiler.profile import Profile

_IF = "What if"
_WHERE = "Where"

ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="A cluster file. \\[default: this machine]", rich_help_panel=_WHERE),
]
Rescale = Annotated[
    bool,
    typer.Option(
        "--rescale",
        help="Multiply times of another kind of device by the cluster's speeds.",
        rich_help_panel=_WHERE,
    ),
]
Innermost = Annotated[
    str,
    typer.Option(help="Axis with neighboring ranks: pipeline (the engine's) or tensor.", rich_help_panel=_WHERE),
]
FreeCommunication = Annotated[
    bool, typer.Option("--free-communication", help="Links and collectives cost nothing.", rich_help_panel=_IF)
]
Bandwidth = Annotated[str | None, typer.Option(help="Bandwidth of every link, like 10Gbit/s.", rich_help_panel=_IF)]
Latency = Annotated[str | None, typer.Option(help="Latency of every link, like 1us.", rich_help_panel=_IF)]
Devices = Annotated[int | None, typer.Option(min=1, help="This many devices, all alike.", rich_help_panel=_IF)]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="Measure the model again instead of using the cached profile.",
        rich_help_panel="How it is measured",
    ),
]
InfiniteDevices = Annotated[
    bool,
    typer.Option("--infinite-devices", help="One device a unit (pipeline) or a sample (data).", rich_help_panel=_IF),
]
PerfectBalance = Annotated[
    bool, typer.Option("--perfect-balance", help="Every stage takes the mean of all stages.", rich_help_panel=_IF)
]


def measuring_from(
    *, rescale: bool, innermost: str, cache: str | None, no_cache: bool, repeats: int, fresh: bool
) -> Measuring:
    """Return how to measure, from the options."""
    from stagewright.api.forecast import Measuring

    return Measuring(
        repeats=repeats,
        fresh=fresh,
        cache=False if no_cache else cache or True,
        rescale=rescale,
        innermost=innermost,  # type: ignore[arg-type]  # checked where it is used
    )


def what_if_from(
    *,
    free_communication: bool,
    bandwidth: str | None,
    latency: str | None,
    devices: int | None,
    infinite_devices: bool,
    perfect_balance: bool,
) -> WhatIf:
    """Return the what-if changes, from the options."""
    from stagewright.api.forecast import WhatIf

    return WhatIf(
        free_communication=free_communication,
        perfect_balance=perfect_balance,
        bandwidth=parse_rate(bandwidth) if bandwidth is not None else None,
        latency_s=parse_s(latency) if latency is not None else None,
        devices=devices,
        infinite_devices=infinite_devices,
    )


def note_profile(profile: Profile) -> None:
    """Say where the times come from and how old they are."""
    where = f"micro-batches of {profile.batch_size} on {profile.device}"
    if profile.source == "cache":
        note(f"from a profile of {where}, measured {format_age(profile.age_s)} ago; --fresh measures again")
    else:
        note(f"from a profile of {where}; times: {profile.source}")
