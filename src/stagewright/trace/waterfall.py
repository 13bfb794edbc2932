"""Where a recorded step goes and what to change, from its breakdown: for jobs that have no plan to simulate.

    step = compute + exposed communication + bubble + wait + data loading + … + idle      mean over the ranks

The parts are those of ``breakdown``, with its collectives and overheads one by one. The rank that the others wait for
is the one that is busy longest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stagewright.quantity import format_s
from stagewright.trace.breakdown import WorkerShare, breakdown
from stagewright.trace.events import Trace

_MIN_SHARE = 0.05  # of the step: below it a part is not worth a change
_MIN_SKEW = 0.05  # of the step by which one rank is busy longer than the mean
_TITLES = {
    "compute": "compute",
    "transfer": "exposed P2P",
    "bubble": "pipeline bubble",
    "wait": "wait for a late rank",
    "copy": "host–device copies",
    "data-loading": "data loading",
    "checkpoint": "checkpointing",
    "garbage-collection": "garbage collection",
    "launch": "host launch",
    "idle": "idle",
}
_CHANGES = {
    "compute": "compute dominates: lower precision, torch.compile, or more devices",
    "transfer": "cut where fewer bytes cross, send asynchronously, or keep neighboring stages on one host",
    "bubble": "more micro-batches, or an interleaved or zero-bubble schedule",
    "wait": "balance the ranks: the others wait for the slowest one",
    "copy": "pin_memory=True in the DataLoader and .to(device, non_blocking=True)",
    "data-loading": "more DataLoader workers (num_workers), prefetch_factor and persistent_workers=True",
    "checkpoint": "save asynchronously (torch.distributed.checkpoint.async_save) or less often",
    "garbage-collection": "gc.disable() and collect on all ranks at the same step, or gc.freeze() after set-up",
    "launch": "torch.compile or CUDA graphs, or a larger batch: the host does not keep the device busy",
    "idle": "remove .item(), print of tensors and synchronizations from the step, or use a larger batch",
    "data": "overlap the gradient all-reduce with backward, accumulate gradients, or raise the batch per rank",
    "tensor": "keep tensor parallelism inside one host, or use fewer tensor-parallel ranks",
    "expert": "overlap dispatch and combine with another micro-batch, or keep experts on fewer hosts",
    "context": "fewer context-parallel ranks, or overlap ring attention",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallRow:
    """One part of the step."""

    name: str
    seconds: float
    """Mean over the ranks."""
    share: float
    """Of the mean step."""
    change: str
    """What would reduce it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplanation:
    """Where a step goes, on average and by rank."""

    source: str
    mesh: str
    step: int
    num_steps: int
    step_s: float
    """Mean over the ranks."""
    rows: tuple[WaterfallRow, ...]
    """They add up to the step; compute first, then the largest."""
    workers: tuple[WorkerShare, ...]
    slowest: int | None
    """The rank that is busy clearly longer than the mean, if any."""
    slowest_s: float
    """By how much, in seconds of a step."""

    @property
    def advice(self) -> str:
        """What to change first, as a sentence."""
        losses = [row for row in self.rows if row.name != "compute" and row.share >= _MIN_SHARE]
        if not losses:
            return f"Best change: {_CHANGES['compute']}"
        largest = losses[0]
        sentence = f"Best change: {largest.change} ({largest.name} takes {largest.share:.0%} of the step)"
        if largest.name == _TITLES["wait"] and self.slowest is not None:
            sentence += f"; rank {self.slowest} is busy {format_s(self.slowest_s)} longer than the mean"
        return sentence

    def to_dict(self) -> dict[str, Any]:
        names = ("source", "mesh", "step", "num_steps", "step_s", "slowest", "slowest_s")
        return {
            **{name: getattr(self, name) for name in names},
            "rows": [asdict(row) for row in self.rows],
            "workers": [share.to_dict() for share in self.workers],
            "advice": self.advice,
        }


def explain_trace(trace: Trace, step: int | None = None) -> StepExplanation:
    """Explain one recorded step, by default the median one."""
    number = trace.median_step if step is None else step
    shares = breakdown(trace, number)
    count = len(shares)
    step_s = sum(share.step_s for share in shares) / count
    seconds: dict[tuple[str, str], float] = {}
    for share in shares:
        parts = share.parts()
        for part, name, value in share.details:
            key = (_collective_title(name), name) if part == "collective" else (_TITLES[name], name)
            seconds[key] = seconds.get(key, 0.0) + value / count
            parts[part] -= value
        for part, value in parts.items():
            key = (_TITLES.get(part, part), part)
            seconds[key] = seconds.get(key, 0.0) + value / count
    rows = [
        WaterfallRow(name=title, seconds=value, share=value / step_s if step_s else 0.0, change=_change(name))
        for (title, name), value in seconds.items()
        if abs(value) > 1e-9
    ]
    rows.sort(key=lambda row: (row.name != "compute", -row.seconds))
    busy = {share.worker: share.compute_s + share.overhead_s for share in shares}
    slowest = max(busy, key=lambda rank: busy[rank])
    skew_s = busy[slowest] - sum(busy.values()) / count
    return StepExplanation(
        source=trace.run,
        mesh=str(trace.mesh),
        step=number,
        num_steps=trace.num_steps,
        step_s=step_s,
        rows=tuple(rows),
        workers=shares,
        slowest=slowest if step_s and skew_s > _MIN_SKEW * step_s else None,
        slowest_s=skew_s,
    )


def _collective_title(note: str) -> str:
    name, _, axis = note.partition(", ")
    return f"exposed {name} ({axis})" if axis else f"exposed {name}"


def _change(name: str) -> str:
    return _CHANGES.get(name) or _CHANGES.get(name.partition(", ")[2]) or "overlap it with compute, or send fewer bytes"
