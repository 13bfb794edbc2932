"""What an attached job achieved: step time, throughput, MFU, memory, skew, and what recording cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stagewright.analytic.hardware.devices import find_accelerator
from stagewright.errors import UsageError
from stagewright.runs.run_folder import RunFolder
from stagewright.trace.attached import attached_profiles, read_marker
from stagewright.trace.kineto.read import trace_of

_PROFILING = 20  # times the usual cost of recording: this step started or ended a profile
_WARM_STEPS = 3  # not counted: allocation, compilation, caches


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedSummary:
    """Medians over the steps of rank 0 that were not profiled, without the first few."""

    num_steps: int
    num_ranks: int
    step_s: float
    samples_per_s: float
    """Of all data-parallel replicas; 0 if no DataLoader was seen."""
    tokens_per_s: float
    loading: float
    """Share of the steps spent in the DataLoader, on the rank that waits longest for it."""
    checkpointing: float
    garbage_collection: float
    peak_memory_bytes: tuple[int, ...]
    skew: float
    """Difference between the slowest and the fastest rank's median step, relative to the mean."""
    flops_per_step: float
    """Of matrix products and attention on rank 0, counted in the profiled steps; 0 if none was profiled."""
    device: str
    mfu: float | None
    """Model FLOPs utilization; None for devices whose peak is unknown."""
    recording: float
    """What recording costs in a step that is not profiled, as a share of it: median."""
    profiling_s: float
    """What starting, stopping and saving profiles cost in all."""
    total_recording: float
    """Share of the whole time that recording and profiling took, with the set-up of the run folder."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(folder: RunFolder) -> AttachedSummary:
    """Read the metrics of all ranks."""
    lines = {rank: [line for line in folder.metrics(rank) if line.get("kind") == "step"] for rank in folder.workers()}
    lines = {rank: of_rank for rank, of_rank in lines.items() if of_rank}
    if not lines:
        raise UsageError(f"{folder.path} has no steps yet")
    reference = lines[min(lines)]
    plain = [line for line in reference if not line["profiled"]][_WARM_STEPS:] or reference
    step_s = _median(line["seconds"] for line in plain)
    profiles = attached_profiles(folder)
    # Ranks of one replica load the same samples, which the metrics count for each rank.
    replicas = trace_of(profiles).mesh.data / len(profiles) if profiles else 1.0
    timed = [line for line in plain if line["seconds"] > 0]
    medians = [_median(line["seconds"] for line in of_rank[_WARM_STEPS:] or of_rank) for of_rank in lines.values()]
    costs = [line["recording_s"] for line in reference]
    total_s = sum(line["seconds"] for line in reference) + sum(costs)
    marker = read_marker(folder)
    flops = profiles[min(profiles)].flops / max(1, len(profiles[min(profiles)].steps)) if profiles else 0.0
    accelerator = find_accelerator(marker.get("device", ""))
    return AttachedSummary(
        num_steps=len(reference) + 1,
        num_ranks=len(lines),
        step_s=step_s,
        samples_per_s=replicas * _median(line["samples"] / line["seconds"] for line in timed),
        tokens_per_s=replicas * _median(line["tokens"] / line["seconds"] for line in timed),
        loading=max(_share(of_rank, "loading_s") for of_rank in lines.values()),
        checkpointing=max(_share(of_rank, "checkpoint_s") for of_rank in lines.values()),
        garbage_collection=max(_share(of_rank, "garbage_collection_s") for of_rank in lines.values()),
        peak_memory_bytes=tuple(max(line["memory_bytes"] or 0 for line in lines[rank]) for rank in sorted(lines)),
        skew=(max(medians) - min(medians)) / (sum(medians) / len(medians)),
        flops_per_step=flops,
        device=marker.get("device", ""),
        mfu=flops / step_s / accelerator.flops_16 if accelerator is not None and step_s > 0 and flops else None,
        recording=_median(line["recording_s"] / line["seconds"] for line in timed),
        profiling_s=sum(cost for cost in costs[1:] if cost > _PROFILING * _median(costs)),
        total_recording=sum(costs) / total_s,
    )


def _share(lines: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(line[name] for line in lines) / max(1e-12, sum(line["seconds"] for line in lines)))


def _median(values: Iterable[float]) -> float:
    numbers = list(values)
    return float(statistics.median(numbers)) if numbers else 0.0
