"""Values of a search: candidates, ranked plans and the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stagewright.analytic.forecast import AnalyticForecast
from stagewright.quantity import format_bytes
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.forecast import Forecast
from stagewright.simulator.what_if import explain_speedup
from stagewright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan with a lower bound on its step time."""

    plan: Plan
    """The plan, with its cuts."""
    costs: PlanCosts
    bound_s: float
    """Lower bound on the step time."""
    codec: str = "none"
    """Codec between its stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A candidate with its forecast."""

    plan: Plan
    codec: str
    forecast: Forecast | AnalyticForecast
    """Simulated from measurements, or by formulas."""
    costs: PlanCosts | None = None
    """What the forecast was simulated from; None: formulas."""
    price_per_step: float | None = None
    """Cost of a step; None: the cluster states no price."""

    @property
    def reason(self) -> str:
        """The two largest losses of speed-up."""
        if isinstance(self.forecast, AnalyticForecast):
            parts = {name: seconds for name, seconds in self.forecast.parts.items() if name != "compute"}
        elif self.costs is not None:
            parts = {loss.name: loss.seconds for loss in explain_speedup(self.costs).parts}
        else:
            return "–"
        losses = sorted(parts.items(), key=lambda loss: -loss[1])[:2]
        shares = [(name, seconds / self.forecast.step_s) for name, seconds in losses]
        return ", ".join(f"{name} {share:.0%}" for name, share in shares if share > 0.01) or "–"


@dataclass(slots=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    best: list[RankedPlan] = field(default_factory=list)
    """The best plans, fastest first."""
    serial: RankedPlan | None = None
    """The single-device baseline: the fastest plan that fits, or else the fastest."""
    is_serial_interpolated: bool = False
    """Whether the baseline is extrapolated from smaller micro-batches, because measuring it would take too long."""
    data_parallel: RankedPlan | None = None
    """Data parallelism over all devices, whether it fits or not; None if the batch is too small."""
    num_plans: int = 0
    """Plans considered."""
    num_exact: int = 0
    """Plans simulated exactly."""
    num_unfit: int = 0
    """Plans that do not fit in memory."""
    with_codec: RankedPlan | None = None
    """The fastest plan with a codec, if it is faster than the best without."""
    losers: dict[str, str] = field(default_factory=dict)
    """For each strategy that is not among the best, the reason."""
    seconds: float = 0.0
    """Duration of the search."""


def explain_losers(best: Sequence[RankedPlan], unfit: Mapping[str, str], min_s: Mapping[str, float]) -> dict[str, str]:
    """Return, for each strategy that is not among the best, the reason."""
    ranked = {plan.plan.mesh.strategy for plan in best}
    best_s = best[0].forecast.step_s
    slower = {name: f"at best {seconds / best_s:.2f} × the time of the best" for name, seconds in min_s.items()}
    return {strategy: reason for strategy, reason in {**unfit, **slower}.items() if strategy not in ranked}


def explain_no_fit(base: Plan, data_parallel: RankedPlan | None, unfit: Mapping[str, str], num_devices: int) -> str:
    """Return why no plan is possible, and what to change."""
    reasons = "; ".join(f"{strategy} {reason}" for strategy, reason in unfit.items())
    if not reasons and data_parallel is None:
        return (
            f"a batch of {base.batch} is too small for every mesh of {num_devices} devices: use --batch {num_devices} "
            "or more, or fewer devices"
        )
    return (
        f"no plan for a batch of {base.batch} fits on {num_devices} devices ({reasons}): use a smaller batch or more "
        "memory"
    )


def memory_needed(forecast: Forecast | AnalyticForecast) -> str:
    """Return the peak memory of the worker that exceeds its device most."""
    if isinstance(forecast, AnalyticForecast):
        needed, limit = forecast.peak_memory_bytes, forecast.memory_limit_bytes
    else:
        worst = max(forecast.workers, key=lambda worker: worker.memory.peak_bytes - (worker.memory_limit_bytes or 0))
        needed, limit = worst.memory.peak_bytes, worst.memory_limit_bytes
    return memory_text(needed, limit)


def memory_text(needed: int, limit: int | None) -> str:
    """Return needed and available memory."""
    return f"{format_bytes(needed)} of {format_bytes(limit or 0)}"
