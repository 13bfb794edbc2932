"""Values of a search: candidates, ranked plans and the result."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    forecast: Forecast
    costs: PlanCosts

    @property
    def reason(self) -> str:
        """The two largest losses of speed-up."""
        breakdown = explain_speedup(self.costs)
        losses = sorted((loss for loss in breakdown.parts if loss.seconds > 0), key=lambda loss: -loss.seconds)[:2]
        shares = [(loss.name, loss.seconds / breakdown.step_s) for loss in losses]
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
