"""The answer of a comparison: which strategy to use, its speed-up, what limits it, and what to change.

The limit is the largest loss between n × and the actual speed-up, from the recorded events: see `speedup_losses`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stagewright.errors import UsageError
from stagewright.quantity import format_bytes
from stagewright.runs.baseline import fastest_variant
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.strategy import sharding_name
from stagewright.trace.breakdown import breakdown, mean_parts
from stagewright.trace.events import Trace
from stagewright.trace.read import read_trace

_MIN_GAIN = 1.03
"""Speed-ups below this are not worth a second device."""
_MIN_LOSS = 0.03
"""Losses below this share of the step don't limit anything."""
_LESS_MEMORY = 0.8
"""Another strategy is named if it needs at most this share of the fastest one's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One timed strategy of a comparison."""

    result: RunResult
    speedup: float | None
    """Over the single-device baseline; None without parity or baseline."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step beyond the baseline's share, by part; empty without recorded events."""

    @property
    def name(self) -> str:
        if sharding := sharding_name(
            self.result.shard, self.result.zero, self.result.fsdp_gather, self.result.fsdp_shards
        ):
            return sharding
        return "one device" if self.result.strategy == "serial" else f"{self.result.strategy} parallel"


def speedup_losses(trace: Trace, baseline_s: float, num_workers: int, num_batches: int = 1) -> dict[str, float]:
    """Return the seconds that separate a step from the ideal, by part: mean over workers in the median step.

    Args:
        trace: The recorded events.
        baseline_s: Time of a step on a single device.
        num_workers: The ideal is a step of ``baseline_s / num_workers``.
        num_batches: Batches in a recorded step; inference records a stream of several.
    """
    losses = mean_parts(breakdown(trace, trace.median_step), num_batches)
    losses["compute"] -= baseline_s / num_workers
    return losses


def compare_headline(rows: Sequence[RunResult]) -> tuple[str, ...]:
    """Return the headline of the rows of `stagewright.compare`; their run folders hold the events."""
    single = {index: [row.latency_s] for index, row in enumerate(rows) if row.workers == 1 and row.is_timed}
    fastest = fastest_variant(single)
    baseline = None if fastest is None else rows[fastest]
    return headline([_candidate(row, baseline) for row in rows if row.is_timed])


def _candidate(row: RunResult, baseline: RunResult | None) -> Candidate:
    losses: dict[str, float] = {}
    if baseline is not None and row.run is not None and row.speedup is not None:
        folder = RunFolder(Path(row.run))
        try:
            num_batches = 1 if row.training else folder.plan().steps
            losses = speedup_losses(read_trace(folder), baseline.latency_s, row.workers, num_batches)
        except UsageError:
            pass  # without events the headline names no limit
    return Candidate(result=row, speedup=row.speedup, losses=losses)


def headline(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Return what to do in one sentence, and in a second one the strategy that needs less memory, if any."""
    verified = [candidate for candidate in candidates if candidate.result.workers > 1 and candidate.result.equal]
    if not verified:
        return ()
    fastest = max(verified, key=_rank)
    if fastest.speedup is None:
        return (
            f"{_capitalize(fastest.name)} is fastest: {fastest.result.samples_per_s:.1f} samples/s on "
            f"{fastest.result.workers} devices; add serial to --strategy to see the speed-up.",
        )
    if fastest.speedup < _MIN_GAIN:
        return (
            f"Stay on one device: {fastest.name} comes closest, at {fastest.speedup:.2f} × on "
            f"{fastest.result.workers} devices{_limit(fastest)}.",
            *_memory_sentence(
                fastest, [candidate for candidate in candidates if candidate.result.equal], on_one_device=True
            ),
        )
    return (
        f"Use {fastest.name}: {fastest.speedup:.2f} × one device's throughput on {fastest.result.workers} devices"
        f"{_limit(fastest)}.",
        *_memory_sentence(fastest, verified),
    )


def _rank(candidate: Candidate) -> tuple[float, float]:
    """Return the order of candidates: by speed-up, because the baselines of several comparisons differ."""
    return candidate.speedup or 0.0, candidate.result.samples_per_s


def _memory_sentence(
    fastest: Candidate, candidates: Sequence[Candidate], *, on_one_device: bool = False
) -> tuple[str, ...]:
    """Name the strategy that needs the least memory, if it is another one and needs clearly less."""
    measured = [candidate for candidate in candidates if candidate.result.peak_memory_bytes]
    chosen = (
        next((candidate for candidate in measured if candidate.result.workers == 1), None) if on_one_device else fastest
    )
    if chosen is None or chosen not in measured:
        return ()
    least = min(measured, key=lambda candidate: candidate.result.max_memory_bytes)
    least_bytes, chosen_bytes = least.result.max_memory_bytes, chosen.result.max_memory_bytes
    if least is chosen or least_bytes > _LESS_MEMORY * chosen_bytes:
        return ()
    speedup = "" if least.speedup is None else f", at {least.speedup:.2f} ×"
    return (
        f"If memory is short, use {least.name}: {format_bytes(least_bytes)} per device instead of "
        f"{format_bytes(chosen_bytes)}{speedup}.",
    )


def _limit(candidate: Candidate) -> str:
    """Say what limits a strategy most and what to change, as the end of a sentence."""
    result = candidate.result
    if not candidate.losses:
        return ""
    name, seconds = max(candidate.losses.items(), key=lambda item: item[1])
    share = seconds / result.latency_s
    if share < _MIN_LOSS:
        return ", and no single loss limits it"
    limit, change = _ADVICE[name](result)
    return f"; {limit} {share:.0%} of the step, so try {change}"


def _compute(result: RunResult) -> tuple[str, str]:
    if result.schedule is not None and result.microbatches > result.stages:
        fewer = max(result.workers, result.microbatches // 2)
        return "slower compute on small micro-batches takes", f"--batch {2 * result.batch} or --microbatches {fewer}"
    if "tensor" in str(result.strategy):
        return "slower compute on narrower matrices takes", f"--batch {2 * result.batch}"
    return "contention (shared caches and memory bandwidth, other programs) takes", "an idle machine and --rounds 3"


def _collective(result: RunResult) -> tuple[str, str]:
    if "tensor" in str(result.strategy):
        return "exposed all-reduces of activations take", "faster links, or data or pipeline parallelism between hosts"
    if result.shard:
        return "exposed all-gathers and reduce-scatters take", f"--batch {2 * result.batch}, or no --shard if it fits"
    if result.zero:
        return "exposed all-gathers and reduce-scatters take", f"--batch {2 * result.batch}, or no --zero if it fits"
    return "the exposed gradient all-reduce takes", f"--batch {2 * result.batch}, which has more compute per all-reduce"


def _bubble(result: RunResult) -> tuple[str, str]:
    more = 2 * result.microbatches
    change = f"--microbatches {more}" if more <= result.batch else "--schedule zbv or a larger --batch"
    return "the pipeline bubble takes", change


_ADVICE: dict[str, Callable[[RunResult], tuple[str, str]]] = {
    "compute": _compute,
    "transfer": lambda _: ("exposed P2P transfers take", "--codec auto, or a cut with a smaller crossing"),
    "collective": _collective,
    "bubble": _bubble,
    "wait": lambda result: (
        "waiting for the slowest worker takes",
        "a more even --policy or --cut" if result.schedule else "devices of equal speed that nothing else uses",
    ),
    "overhead": lambda result: ("overhead between actions takes", f"--batch {2 * result.batch}"),
}


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
