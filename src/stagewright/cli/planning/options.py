"""Options that the planning verbs share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stagewright.cli.options import CacheDir, Fresh, Repeats, choice, panel
from stagewright.cli.screen import note
from stagewright.errors import UsageError
from stagewright.quantity import format_age, parse_rate, parse_s
from stagewright.spec.plan import AXES

if TYPE_CHECKING:
    from stagewright.analytic.forecast import AnalyticForecast
    from stagewright.api.forecast import Measuring, WhatIf
    from stagewright.profiler.profile import Profile

_what_if_option = panel("What if")
_where_option = panel("Where")

analytic_option = panel("Analytic")

ClusterFile = Annotated[
    Path | None,
    _where_option(
        "--cluster",
        metavar="FILE|NAME",
        help="A cluster file, or a name like 8xh100 or 32x8xa100. \\[default: this machine]",
    ),
]
ANALYTIC_HELP = "Use formulas and the hardware's data sheet; no model is built or measured."
Analytic = Annotated[bool, analytic_option("--analytic", help=ANALYTIC_HELP)]
Rescale = Annotated[
    bool, _where_option("--rescale", help="Multiply times of another kind of device by the cluster's speeds.")
]
Innermost = Annotated[str, choice("axis", AXES, _where_option, help="Axis with neighboring ranks.")]
FreeCommunication = Annotated[bool, _what_if_option("--free-communication", help="Links and collectives cost nothing.")]
Bandwidth = Annotated[str | None, _what_if_option(help="Bandwidth of every link, like 10Gbit/s.")]
Latency = Annotated[str | None, _what_if_option(help="Latency of every link, like 50us.")]
Devices = Annotated[int | None, _what_if_option(min=1, help="How many devices; all alike.")]
InfiniteDevices = Annotated[
    bool, _what_if_option("--infinite-devices", help="One device a unit (pipeline) or a sample (data).")
]
PerfectBalance = Annotated[bool, _what_if_option("--perfect-balance", help="Every stage takes the mean of all stages.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastOptions:
    """The options of a verb that forecasts a plan."""

    free_communication: FreeCommunication = False
    bandwidth: Bandwidth = None
    latency: Latency = None
    devices: Devices = None
    infinite_devices: InfiniteDevices = False
    perfect_balance: PerfectBalance = False
    rescale: Rescale = False
    innermost: Innermost = "pipeline"
    repeats: Repeats = 5
    fresh: Fresh = False
    cache_dir: CacheDir = None

    def measuring(self) -> Measuring:
        """Return how to measure the model."""
        from stagewright.api.forecast import Measuring

        return Measuring(
            repeats=self.repeats,
            fresh=self.fresh,
            cache=self.cache_dir or True,
            rescale=self.rescale,
            innermost=self.innermost,  # type: ignore[arg-type]  # checked where it is used
        )

    def what_if(self) -> WhatIf:
        """Return what to change in the forecast."""
        from stagewright.api.forecast import WhatIf

        return WhatIf(
            free_communication=self.free_communication,
            perfect_balance=self.perfect_balance,
            bandwidth=parse_rate(self.bandwidth) if self.bandwidth is not None else None,
            latency_s=parse_s(self.latency) if self.latency is not None else None,
            devices=self.devices,
            infinite_devices=self.infinite_devices,
        )


# What a forecast from formulas does not know. How often to measure does not matter where nothing is measured.
_MEASURED = {
    field.name: field.default
    for field in fields(ForecastOptions)
    if field.name not in ("innermost", "repeats", "fresh", "cache_dir")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticOptions:
    """The options of an analytic forecast."""

    analytic: Analytic = False
    layout: Annotated[
        str | None,
        analytic_option(
            metavar="TEXT", help="Instead of PLAN: like tp=8,pp=8,vp=3,mbs=1,m=64,sp,zero=1,recompute=selective."
        ),
    ] = None
    model: Annotated[
        str | None,
        analytic_option(metavar="MODEL", help="Model; with --layout, like gpt3-175b, or a folder with config.json."),
    ] = None
    sequence_length: Annotated[int | None, analytic_option(min=1, help="Tokens per sample.")] = None
    efficiency: Annotated[
        float | None, analytic_option(help="Share of the peak that matrix products reach. \\[default: the device's]")
    ] = None

    def forecast(self, plan: Path | None, cluster: Path | None, innermost: str) -> AnalyticForecast:
        """Forecast a plan's file or a layout from formulas."""
        from stagewright.api.analytic import forecast_analytic

        target = plan if self.layout is None else self.layout
        if target is None or (plan is not None and self.layout is not None):
            raise UsageError("give either a plan's file or --layout with --model")
        return forecast_analytic(target, cluster, self.model, self.sequence_length, innermost, self.efficiency)

    def refuse_measuring(self, options: ForecastOptions, **files: Path | None) -> None:
        """Raise UsageError for options that change or draw a forecast from measurements."""
        given = [f"--{name}" for name, path in files.items() if path is not None]
        for name, standard in _MEASURED.items():
            if getattr(options, name) != standard:
                given.append(f"--{name}")
        if given:
            word = given[0].replace("_", "-")
            raise UsageError(
                f"{word} belongs to a forecast from measurements: leave out {word}, or --analytic; a formula's what-if "
                "is another --layout or --cluster"
            )

    def refuse_layout(self) -> None:
        """Raise UsageError for a layout without --analytic."""
        if self.layout is not None or self.model is not None:
            raise UsageError("--layout and --model belong to analytic forecasts: add --analytic")

    def require_plan(self, plan: Path | None) -> Path:
        """Return the plan of a measured forecast; layouts belong to analytic ones."""
        self.refuse_layout()
        if plan is None:
            raise UsageError("give the plan's file, like plan.toml; `stagewright plan MODEL` writes one")
        return plan


def note_profile(profile: Profile) -> None:
    """Say where the times come from and how old they are."""
    where = f"micro-batches of {profile.batch_size} on {profile.device}"
    if profile.source == "cache":
        note(f"from a profile of {where}, measured {format_age(profile.age_s)} ago; --fresh measures again")
    else:
        note(f"from a profile of {where}; times: {profile.source}")
