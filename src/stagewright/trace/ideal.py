"""Ideal systems of a recorded step: the same measured work, with obstacles removed one after the other.

    measured step ≥ free communication ≥ perfect balance ≥ any number of devices

    free communication    the recorded actions in their order, without messages, collectives, waits and gaps: the
                          busiest worker, in a pipeline the longest path of its schedule
    perfect balance       the mean of the workers' compute, but no less than the largest unit, which can't be split
    any number of devices data: one sample per device, with the optimizer step that every replica repeats
                          tensor: the work that a worker does not share with the others
                          pipeline: the largest unit

All of them are computed from the step's own events, so a measured step can't be faster: where it is, the trace is
wrong.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from stagewright.errors import RunError
from stagewright.trace.breakdown import breakdown, schedule_idle
from stagewright.trace.events import Trace

_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class IdealStep:
    """How long a recorded step would take at least."""

    step_s: float
    """As recorded, of the slowest worker."""
    free_s: float
    """With free communication."""
    balanced_s: float
    """And with perfect balance, without a pipeline bubble."""
    endless_s: float
    """And on any number of devices; 0: no bound."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ideal_step(
    trace: Trace, step: int, *, batch: int, largest_unit: float = 0.0, baseline_s: float | None = None
) -> IdealStep:
    """Compute the ideal systems of a step.

    Args:
        trace: The recorded events.
        step: Which step.
        batch: Samples in it; data parallel can use as many devices.
        largest_unit: Share of the model's compute that its largest unit takes.
        baseline_s: The same batch on one device, for the work that tensor parallel workers repeat.
    """
    shares, idle = breakdown(trace, step), schedule_idle(trace, step)
    compute = [share.compute_s for share in shares]
    count, mean_s, unit_s = len(shares), sum(compute) / len(shares), largest_unit * sum(compute)
    step_s = max(share.step_s for share in shares)
    free_s = max(share.compute_s + idle.get(share.worker, 0.0) for share in shares)
    if trace.mesh.pipeline > 1:
        balanced_s = max(mean_s, unit_s)
        endless_s = unit_s
    elif trace.mesh.tensor > 1:
        balanced_s = mean_s
        repeated_s = (count * mean_s - baseline_s) / (count - 1) if baseline_s is not None else 0.0
        endless_s = max(0.0, min(mean_s, repeated_s))
    else:
        balanced_s = mean_s
        optimizer_s = sum(share.optimizer_s for share in shares) / count
        endless_s = optimizer_s + (mean_s - optimizer_s) * min(1.0, count / batch)
    balanced_s = min(free_s, balanced_s)  # the largest unit's share was measured elsewhere
    endless_s = min(endless_s, balanced_s)
    ideal = IdealStep(step_s=step_s, free_s=free_s, balanced_s=balanced_s, endless_s=endless_s)
    check_ideal(ideal, trace.run)
    return ideal


def check_ideal(ideal: IdealStep, run: str) -> None:
    """Raise RunError if the recorded step is faster than its ideal: its trace or this computation is wrong."""
    ordered = (ideal.step_s, ideal.free_s, ideal.balanced_s, ideal.endless_s)
    for longer, shorter in itertools.pairwise(ordered):
        if shorter > longer * (1 + _ROUNDING):
            raise RunError(
                f"defect: {run} took {ideal.step_s:.4g} s, less than its ideal of {shorter:.4g} s that is computed "
                "from the same events; report it with the run folder"
            )
