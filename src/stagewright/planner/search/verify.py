"""Prove a search's forecasts by running its best plans on this machine.

the best three ─► run, each proven equal to serial ─► measured beside forecast, regret of having taken the first
off by more than a tenth ─► the machine's calibration is measured again, for the next forecast
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stagewright.engine.jobs.compare import run_plan
from stagewright.errors import RunError, UsageError
from stagewright.machine.machine import default_devices
from stagewright.planner.calibration.calibrate import load_calibration
from stagewright.planner.search.search import RankedPlan

__all__ = ["NUM_VERIFIED", "VerifiedPlans", "VerifiedPlan", "verify"]

NUM_VERIFIED = 3  # plans that are run
_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedPlan:
    """A plan that was run."""

    place: int
    """Its place among the best, from 1."""
    mesh: str
    """What tells it from the others: its mesh as text, and the rest."""
    microbatches: int
    schedule: str
    recompute: str
    shard: bool
    forecast_s: float
    """A step, predicted and measured."""
    measured_s: float
    forecast_memory_bytes: int
    """The peak memory of its workers, predicted and measured."""
    measured_memory_bytes: int
    equal: bool
    """Whether it was equal to serial."""
    run: str
    """Its run folder."""

    @property
    def error(self) -> float:
        """Forecast over measured, less 1."""
        return self.forecast_s / self.measured_s - 1

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedPlans:
    """What running came to."""

    plans: tuple[VerifiedPlan, ...]
    """The plans that were run, in the order of their forecasts."""
    left_out: tuple[str, ...]
    """Plans that could not be run here, and why."""
    regret: float
    """How much longer the first takes than the quickest of those that were run; 0: it was the quickest."""
    recalibrated: bool
    """Whether the machine was measured again because forecasts were off."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "plans": [one.to_dict() for one in self.plans],
            "left_out": list(self.left_out),
            "regret": self.regret,
            "recalibrated": self.recalibrated,
        }


def verify(
    ranked: Sequence[RankedPlan],
    root: str | Path,
    *,
    count: int = NUM_VERIFIED,
    cache: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> VerifiedPlans:
    """Run the first few plans where they fit on this machine."""
    tell = progress or (lambda text: None)
    found: list[VerifiedPlan] = []
    left_out: list[str] = []
    for place, one in enumerate(ranked[:count], start=1):
        plan = one.plan
        try:
            devices = default_devices(plan.mesh.num_workers)
            tell(f"running plan {place}: {plan.mesh}, {plan.microbatches} micro-batches …")
            result = run_plan(replace(plan, devices=devices), root)
        except (UsageError, RunError) as error:
            left_out.append(f"plan {place}, {plan.mesh}: {str(error).splitlines()[0]}")
            continue
        found.append(
            VerifiedPlan(
                place=place,
                mesh=str(plan.mesh),
                microbatches=plan.microbatches,
                schedule=plan.schedule,
                recompute=str(plan.recompute),
                shard=plan.shard,
                forecast_s=one.forecast.step_s,
                measured_s=result.latency_s,
                forecast_memory_bytes=max(worker.memory.counted_bytes for worker in one.forecast.workers),
                measured_memory_bytes=result.max_memory_bytes,
                equal=bool(result.equal),
                run=str(result.run),
            )
        )
    if not found:
        raise UsageError(f"none of the best plans can be run on this machine: {left_out[0]}")
    regret = found[0].measured_s / min(one.measured_s for one in found) - 1
    off = abs(statistics.median(one.error for one in found)) > _TOLERANCE
    if off:
        tell("forecasts were off by more than a tenth: measuring this machine again …")
        load_calibration(cache, fresh=True)
    return VerifiedPlans(plans=tuple(found), left_out=tuple(left_out), regret=regret, recalibrated=off)
