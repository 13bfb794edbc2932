"""From two recorded steps to a verdict: the first wrong module of each phase, and the likely cause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from stagewright.errors import UsageError
from stagewright.verification.assembly import STATE_KINDS, Key, Step, load_step
from stagewright.verification.causes.backward import find_backward_cause
from stagewright.verification.causes.catalogue import cause
from stagewright.verification.causes.failure import find_failure_cause
from stagewright.verification.causes.forward import find_forward_cause, find_initial_cause
from stagewright.verification.causes.optimizer import find_buffer_cause, find_optimizer_cause
from stagewright.verification.comparison import Comparison, compare_steps
from stagewright.verification.record import Recording, read_recording
from stagewright.verification.verdict import PHASES, Cause, Phase, TensorError, Verdict

_LOST = ("Connection closed", "Connection reset", "gloo", "NCCL")
"""Messages of ranks that lost their connection to another."""


def diagnose(baseline: str | Path, candidate: str | Path) -> Verdict:
    """Compare two folders of records; ``baseline`` has the folders ``exact``, ``repeated`` and ``rounding-N``."""
    folder = Path(baseline)
    exact = load_step(read_recording(folder / "exact" if (folder / "exact").is_dir() else folder))
    if len(exact.recording.ranks) != 1:
        raise UsageError(f"{folder}: the baseline ran on {len(exact.recording.ranks)} ranks; run it on one")
    if (folder / "repeated").is_dir():
        check_repeatable(exact, load_step(read_recording(folder / "repeated")))
    perturbed = [load_step(read_recording(path)) for path in sorted(folder.glob("rounding-*"))]
    if not perturbed:
        raise UsageError(
            f"{folder}: no runs with perturbed rounding (rounding-1, …), so there is no tolerance; "
            "let `stagewright verify --baseline FILE.py:FUNCTION` run the baseline"
        )
    recording = read_recording(candidate)
    failed = find_failure(recording)
    return failed or judge(compare_steps(exact, perturbed, _with_baseline_names(exact, load_step(recording))))


def check_repeatable(first: Step, second: Step) -> None:
    """Refuse a baseline that gives other numbers when it is repeated."""
    for key, held in first.pieces.items():
        other = second.pieces.get(key)
        if other is None or not all(
            torch.equal(a.value.nan_to_num(), b.value.nan_to_num()) for a, b in zip(held[0], other[0], strict=True)
        ):
            name = f"{key.module}.{key.name}".strip(".") or "the model"
            raise UsageError(
                f"the baseline gives other numbers when repeated, first in {name} ({key.kind}); "
                "seed it inside its function: torch.manual_seed(0)"
            )


def find_failure(recording: Recording) -> Verdict | None:
    """Return the verdict of a step that raised on a rank or that some rank did not finish."""
    failed = [rank for rank in recording.ranks if rank.error]
    missing = sorted(set(range(recording.ranks[0].world_size)) - {rank.rank for rank in recording.ranks})
    if not failed and not missing:
        return None
    lines = [f"Rank {rank.rank} failed in {rank.last_module or 'the model'}: {rank.error}" for rank in failed]
    lines += [f"Rank {rank} did not finish the step." for rank in missing]
    # A lost connection is the consequence of another rank's failure.
    roots = [rank for rank in failed if not any(word in rank.error for word in _LOST)] or failed
    module = roots[0].last_module if roots else ""
    error = TensorError(
        phase="forward", module=module, tensor="step", error=float("inf"), tolerance=0.0,
        ranks=tuple(rank.rank for rank in roots), remark="raised" if roots else "did not finish",
    )  # fmt: skip
    return Verdict(
        same=False,
        first={"forward": error},
        cause=find_failure_cause(roots, missing),
        tensors=(error,),
        num_ranks=recording.ranks[0].world_size,
        dtype="",
        gradient_scale=1.0,
        problem=" ".join(lines),
    )


def _with_baseline_names(baseline: Step, candidate: Step) -> Step:
    """Move copies of shared parameters, which a pipeline holds on two stages, to the name that the baseline uses."""
    tied = baseline.recording.ranks[0].tied
    for key in list(candidate.pieces):
        full = f"{key.module}.{key.name}".lstrip(".")
        if key.kind in STATE_KINDS and full in tied:
            module, _, name = tied[full].rpartition(".")
            owner = key._replace(module=module, name=name)
            held = candidate.pieces.setdefault(owner, {})
            for rank, pieces in candidate.pieces.pop(key).items():
                held.setdefault(rank, pieces)
            candidate.entries.setdefault(owner, candidate.entries[key])
    return candidate


def judge(comparison: Comparison) -> Verdict:
    """Find the first wrong tensor of each phase and explain the earliest."""
    firsts: dict[str, Key] = {}
    for phase in PHASES:
        wrong = comparison.wrong(phase)
        if wrong:
            firsts[phase] = wrong[0]
    explanation: Cause | None = None
    if comparison.rows.problem:
        explanation = cause("different batch", f"{comparison.rows.problem[:1].upper()}{comparison.rows.problem[1:]}.")
    for phase in PHASES:
        if explanation is None and phase in firsts:
            explanation = _explain(comparison, phase, firsts[phase])
            break
    errors = {phase: _blamed(comparison, key) for phase, key in firsts.items()}
    if comparison.rows.problem:
        errors["forward"] = TensorError(
            phase="forward", module="", tensor="input", error=float("inf"), tolerance=0.0, ranks=()
        )
    return Verdict(
        same=not firsts and not comparison.rows.problem,
        first=errors,
        cause=explanation,
        tensors=tuple(comparison.errors.values()),
        num_ranks=len(comparison.candidate.recording.ranks),
        dtype=comparison.dtype,
        gradient_scale=comparison.gradient_scale,
        problem=f"{comparison.rows.problem}." if comparison.rows.problem else "",
    )


def _explain(comparison: Comparison, phase: Phase, key: Key) -> Cause | None:
    match phase:
        case "before the step":
            return find_initial_cause(comparison, key)
        case "forward":
            return find_forward_cause(comparison, key)
        case "backward":
            return find_backward_cause(comparison, key)
        case "optimizer step":
            return find_optimizer_cause(comparison, key)
        case "buffers":
            return find_buffer_cause(comparison, key)


def _blamed(comparison: Comparison, key: Key) -> TensorError:
    """Name the module that made a tensor wrong: the producer of a partial sum, the consumer of a wrong gradient."""
    error = comparison.errors[key]
    if key.kind == "input":
        source = comparison.candidate.entries[key].source.split("|")
        if len(source) == 5 and Key("output", source[1], source[2], int(source[4])) in comparison.partial:
            return _renamed(error, source[1], "output")
    if key.kind == "output gradient":
        consumers = _consumers(comparison, key)
        if len(consumers) == 1:
            return _renamed(error, consumers[0], "gradient of its input")
    return error


def _renamed(error: TensorError, module: str, tensor: str) -> TensorError:
    return TensorError(
        phase=error.phase, module=module, tensor=tensor, error=error.error, tolerance=error.tolerance,
        ranks=error.ranks, held=error.held, remark=error.remark,
    )  # fmt: skip


def _consumers(comparison: Comparison, key: Key) -> Sequence[str]:
    """Return the innermost modules that take an output as their input, in the baseline."""
    names = {
        entry.module
        for entry in comparison.baseline.step.recording.ranks[0].entries
        if entry.kind == "input" and entry.source.split("|")[1:3] == [key.module, key.name]
    }
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
