"""Verification of a search: run its best plans on this machine and compare with their forecasts.

the best three ─► run, each verified against the baseline ─► measured vs. forecast, regret of choosing the first
error above 10 % ─► the machine is recalibrated for the next forecast
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stagewright.engine.jobs.compare import run_plan
from stagewright.errors import RunError, UsageError
from stagewright.machine.machine import default_devices, num_gpus
from stagewright.planner.calibration.calibrate import load_calibration
from stagewright.planner.search.result import RankedPlan
from stagewright.simulator.forecast import Forecast
from stagewright.spec.activation_checkpointing import describe_recompute

NUM_VERIFIED = 3
_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedPlan:
    """A plan that was run, with forecast and measurement."""

    place: int
    """Rank in the search, from 1."""
    mesh: str
    microbatches: int
    schedule: str
    recompute: str
    shard: bool
    fsdp_shards: int | None
    fsdp_gather: str
    zero: int
    forecast_s: float
    """Predicted step time."""
    measured_s: float
    """Measured step time."""
    forecast_memory_bytes: int
    """Predicted peak memory of any worker."""
    measured_memory_bytes: int
    equal: bool
    """Whether the parity check against the single-device baseline passed."""
    run: str
    """Run folder."""

    @property
    def error(self) -> float:
        """Relative error of the forecast."""
        return self.forecast_s / self.measured_s - 1

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedPlans:
    """The verified plans of a search."""

    plans: tuple[VerifiedPlan, ...]
    """The plans that ran, in the order of their forecasts."""
    left_out: tuple[str, ...]
    """Plans that can't run here, with the reason."""
    regret: float
    """Relative slowdown of the first plan against the fastest one that ran; 0: it is the fastest."""
    recalibrated: bool
    """Whether the machine was recalibrated because of forecast errors."""

    def to_dict(self) -> dict[str, Any]:
        plans = [plan.to_dict() for plan in self.plans]
        return {**asdict(self), "plans": plans, "left_out": list(self.left_out)}


def verify(
    ranked: Sequence[RankedPlan],
    root: str | Path,
    *,
    count: int = NUM_VERIFIED,
    cache: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> VerifiedPlans:
    """Run the first `count` plans on this machine, as far as they can run."""
    report = progress or (lambda text: None)
    verified: list[VerifiedPlan] = []
    left_out: list[str] = []
    for place, candidate in enumerate(ranked[:count], start=1):
        plan, forecast = candidate.plan, candidate.forecast
        assert isinstance(forecast, Forecast), "plans from formulas are for other hardware"
        try:
            if 0 < num_gpus() < plan.mesh.num_workers:
                raise UsageError(f"{plan.mesh.num_workers} workers, but torch sees {num_gpus()} GPUs here")
            devices = default_devices(plan.mesh.num_workers)
            report(f"running plan {place}: {plan.mesh}, {plan.microbatches} micro-batches …")
            result = run_plan(replace(plan, devices=devices), root)
        except (UsageError, RunError) as error:
            left_out.append(f"plan {place}, {plan.mesh}: {str(error).splitlines()[0]}")
            continue
        verified.append(
            VerifiedPlan(
                place=place,
                mesh=str(plan.mesh),
                microbatches=plan.microbatches,
                schedule=plan.schedule,
                recompute=describe_recompute(plan),
                shard=plan.shard,
                fsdp_shards=plan.fsdp_shards,
                fsdp_gather=plan.fsdp_gather,
                zero=plan.zero,
                forecast_s=forecast.step_s,
                measured_s=result.latency_s,
                forecast_memory_bytes=max(worker.memory.counted_bytes for worker in forecast.workers),
                measured_memory_bytes=result.max_memory_bytes,
                equal=bool(result.equal),
                run=str(result.run),
            )
        )
    if not verified:
        raise UsageError(f"none of the best plans can run on this machine: {left_out[0]}")
    regret = verified[0].measured_s / min(plan.measured_s for plan in verified) - 1
    recalibrate = abs(statistics.median(plan.error for plan in verified)) > _TOLERANCE
    if recalibrate:
        report(f"forecast error above {_TOLERANCE:.0%}: recalibrating this machine …")
        load_calibration(cache, fresh=True)
    return VerifiedPlans(plans=tuple(verified), left_out=tuple(left_out), regret=regret, recalibrated=recalibrate)
