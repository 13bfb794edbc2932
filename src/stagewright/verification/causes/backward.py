"""Causes of a difference in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagewright.verification.assembly import Key, Part
from stagewright.verification.causes.catalogue import cause
from stagewright.verification.causes.patterns import constant_factor, fit_sum, is_close
from stagewright.verification.comparison import Comparison, sum_parts
from stagewright.verification.layout import Layout
from stagewright.verification.verdict import Cause

_NO_LAYOUT = Layout(placements=(), mesh=(), coordinate=())


def find_backward_cause(comparison: Comparison, key: Key) -> Cause | None:
    """Explain the first gradient that differs."""
    if key.kind == "output gradient":
        return (
            _unequal_rows(comparison, key)
            or _activation_reduction(comparison, key)
            or find_gradient_cause(comparison, comparison.wrong("backward"))
        )
    return find_gradient_cause(comparison, comparison.wrong("backward"))


def find_gradient_cause(comparison: Comparison, wrong: Sequence[Key]) -> Cause | None:
    """Explain parameter gradients that differ."""
    keys = [key for key in wrong if key.kind == "gradient"]
    if not keys:
        return None
    missing = [key for key in keys if not comparison.parts(key)]
    if missing:
        return cause("missing gradient", f"{_name(missing[0])} has no gradient on any rank.")
    tied = set(comparison.baseline.step.recording.ranks[0].tied.values())
    for key in keys:
        if _name(key) in tied and (found := _tied_cause(comparison, key)):
            return found
    return (
        _clipping_cause(comparison, keys)
        or _disagreement(comparison, keys)
        or _shard_factor_cause(comparison, keys)
        or _factor_cause(comparison, keys)
        or _lost_microbatch(comparison, keys)
        or _padding_cause(comparison)
    )


def _tied_cause(comparison: Comparison, key: Key) -> Cause | None:
    parts = comparison.parts(key)
    total = sum_parts(parts) if len(parts) > 1 else None
    tolerance = comparison.errors[key].tolerance
    if total is not None and is_close(total, parts[0].expected, 2 * tolerance):
        return cause("tied weights not summed", f"{_name(key)}: the gradients of its copies sum to the baseline's.")
    aliases = [a for a, name in comparison.baseline.step.recording.ranks[0].tied.items() if name == _name(key)]
    right = all(
        not error.is_wrong
        for one, error in comparison.errors.items()
        if one.kind == "gradient" and _name(one) != _name(key)
    )
    if right:
        return cause("tied weights not summed", f"Only {_name(key)}, shared with {aliases[0]}, has a wrong gradient.")
    return None


def _activation_reduction(comparison: Comparison, key: Key) -> Cause | None:
    """Recognize an activation gradient that was not reduced over ranks, or twice."""
    parts = comparison.parts(key)
    tolerance, scale = comparison.errors[key].tolerance, comparison.gradient_scale
    if not any(bool(part.value.any()) for part in parts):
        return cause("missing gradient", f"{key.module}: its output gradient is zero; backward stops after it.")
    if len(parts) > 1 and all(torch.equal(part.expected, parts[0].expected) for part in parts[1:]):
        total = sum_parts(parts)
        if total is not None and is_close(total / scale, parts[0].expected, 2 * tolerance):
            return cause(
                "missing all-reduce", f"{_name(key)}: the sum over ranks of its gradients equals the baseline's."
            )
    for part in parts:
        factor = constant_factor(part.value / scale, part.expected, tolerance)
        if factor is not None and abs(factor - 1) > 2 * tolerance:
            name = "all-reduce twice" if factor > 1 else "missing all-reduce"
            return cause(name, f"{key.module}: its output gradient is {factor:.4g} × the baseline's.")
    return None


def _unequal_rows(comparison: Comparison, key: Key) -> Cause | None:
    """Recognize a loss that counts padding, or divides by another number of tokens on each rank or micro-batch."""
    gradients = [
        k for k, error in comparison.errors.items() if k.kind == "output gradient" and error.phase == "backward"
    ]
    if not gradients or key.module not in (gradients[0].module, ""):
        return None  # the loss acts on the first gradient of the backward pass
    factors: list[float] = []
    for part in comparison.parts(key):
        if part.value.shape != part.expected.shape or part.value.ndim < 2:
            return None
        at_ignored = part.value[part.expected == 0].abs()
        if bool((at_ignored > comparison.errors[key].tolerance * part.value.abs().max()).any()):
            return cause(
                "padding counted", f"{_name(key)}: gradients where the baseline's are zero (ignored positions)."
            )
        factors += _row_factors(part, comparison.errors[key].tolerance)
    if len(factors) > 1 and max(factors) / max(min(factors), 1e-30) > 1 + 10 * comparison.errors[key].tolerance:
        return cause(
            "padding counted",
            f"The loss gradient is scaled by {min(factors):.3g} to {max(factors):.3g} in different rows: "
            "each rank or micro-batch divides by its own number of tokens.",
        )
    return None


def _row_factors(part: Part, tolerance: float) -> list[float]:
    factors = []
    for value, expected in zip(part.value, part.expected, strict=True):
        factor = constant_factor(value, expected, tolerance)
        if factor is not None:
            factors.append(factor)
    return factors


def _padding_cause(comparison: Comparison) -> Cause | None:
    first = next((key for key in comparison.errors if key.kind == "output gradient"), None)
    return _unequal_rows(comparison, first) if first is not None else None


def _locals(comparison: Comparison, keys: Sequence[Key]) -> list[torch.Tensor] | None:
    """Return each rank's local gradients of some parameters as one vector, if every rank recorded them whole."""
    ranks = range(len(comparison.candidate.recording.ranks))
    vectors: list[list[torch.Tensor]] = [[] for _ in ranks]
    for key in keys:
        held = comparison.candidate.pieces.get(key._replace(kind="local gradient"), {})
        expected = comparison.baseline.values[key]
        if any(rank not in held or held[rank][-1].value.shape != expected.shape for rank in ranks):
            return None
        for rank in ranks:
            vectors[rank].append(held[rank][-1].value.double().flatten())
    return [torch.cat(vector) for vector in vectors]


def _all_gradients(comparison: Comparison) -> list[Key]:
    return [key for key in comparison.errors if key.kind == "gradient"]


def _clipping_cause(comparison: Comparison, keys: Sequence[Key]) -> Cause | None:
    """Recognize clipping of local gradients: the optimizer used a sum of them with unequal factors."""
    everything = _all_gradients(comparison)
    vectors = _locals(comparison, everything)
    before = [key._replace(kind="local gradient") for key in everything]
    if any(key not in comparison.baseline.values for key in before):
        return None
    raw = torch.cat([comparison.baseline.values[key].double().flatten() for key in before])
    used = torch.cat([comparison.baseline.values[key].double().flatten() for key in everything])
    tolerance = max(comparison.errors[key].tolerance for key in keys)
    clip = constant_factor(used, raw, tolerance)
    if clip is None or clip > 1 - 10 * tolerance:
        return None  # the baseline does not clip
    firsts = [comparison.parts(key)[0] for key in everything]
    final = torch.cat([part.value.double().flatten() for part in firsts])
    factor = constant_factor(final, used, tolerance)
    if factor is not None and vectors is None:
        return cause("wrong clipping norm", f"Clipped gradients are {factor:.4g} × the baseline's.")
    if vectors is None or len(vectors) < 2:
        return None
    if factor is not None:
        mean = torch.stack(vectors).mean(0)
        if is_close(mean, raw, 2 * tolerance):
            return cause(
                "wrong clipping norm", f"Gradients are right before clipping, then {factor:.4g} × the baseline's."
            )
        return None
    factors, error = fit_sum(vectors, final)
    if error <= 10 * tolerance:
        shown = ", ".join(f"{value * len(vectors):.3g}" for value in factors)
        return cause(
            "gradient clipped before reduction",
            f"Ranks' gradients were scaled by {shown}; the baseline's by {clip:.3g}.",
        )
    return None


def _disagreement(comparison: Comparison, keys: Sequence[Key]) -> Cause | None:
    """Recognize gradients that differ between ranks but whose mean or sum is right."""
    for key in keys:
        parts = comparison.parts(key)
        if len(parts) < 2 or all(torch.equal(part.value, parts[0].value) for part in parts[1:]):
            continue
        total, tolerance = sum_parts(parts), comparison.errors[key].tolerance
        for name, divisor in (("mean", len(parts)), ("sum", 1)):
            if total is not None and is_close(total / divisor, parts[0].expected, 2 * tolerance):
                return cause(
                    "missing all-reduce", f"{_name(key)} differs between ranks; its {name} equals the baseline's."
                )
    return None


def _factor_cause(comparison: Comparison, keys: Sequence[Key]) -> Cause | None:
    """Recognize gradients that are a multiple of the baseline's."""
    factors = []
    for key in keys:
        part = comparison.parts(key)[0]
        factors.append(constant_factor(part.value, part.expected, comparison.errors[key].tolerance))
    known = [factor for factor in factors if factor is not None]
    tolerance = max(comparison.errors[key].tolerance for key in keys)
    if not known or len(known) < 0.9 * len(factors) or max(known) - min(known) > 10 * tolerance * abs(known[0]):
        return None
    factor = sorted(known)[len(known) // 2]
    everything = _all_gradients(comparison)
    is_partial = len(keys) < 0.9 * len(everything)
    what = f"{len(keys)} of {len(everything)} gradients are {factor:.4g} × the baseline's"
    vectors = _locals(comparison, keys)
    if vectors is not None and len(vectors) > 1 and not comparison.rows.stages:
        raw = torch.cat([comparison.baseline.values[key].double().flatten() for key in keys])
        mean = torch.stack(vectors).mean(0)
        if is_close(mean, raw, 10 * tolerance) and factor > 1:
            return cause("all-reduce twice", f"{what}; the mean of the local ones is right.")
        if is_close(mean * len(vectors), raw, 10 * tolerance) and factor < 1:
            return cause("loss scaled", f"{what}; the sum of the local ones would be right.")
    if is_partial:
        return cause("all-reduce twice" if factor > 1 else "missing all-reduce", f"{what}.")
    return cause("loss scaled", f"{what}{_known_count(comparison, factor)}.")


def _shard_factor_cause(comparison: Comparison, keys: Sequence[Key]) -> Cause | None:
    """Recognize shards that each rank scaled by a factor of its own, as clipping by a local norm does."""
    factors: dict[int, list[float]] = {}
    tolerance = max(comparison.errors[key].tolerance for key in keys)
    for key in keys:
        for rank, value, expected in _shards(comparison, key):
            factor = constant_factor(value, expected, tolerance)
            if factor is not None:
                factors.setdefault(rank, []).append(factor)
    middle = {rank: sorted(own)[len(own) // 2] for rank, own in factors.items()}
    agree = all(abs(f / middle[rank] - 1) < 20 * tolerance for rank, own in factors.items() for f in own)
    if len(middle) < 2 or not agree or max(middle.values()) / min(middle.values()) < 1 + 20 * tolerance:
        return None
    shown = ", ".join(f"{middle[rank]:.4g}" for rank in sorted(middle))
    return cause(
        "wrong clipping norm", f"Ranks scale their gradient shards by other factors than the baseline: {shown}."
    )


def _shards(comparison: Comparison, key: Key) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return each rank's shard of a gradient with the same part of the baseline's, on a mesh of one dimension."""
    expected, found, start = comparison.baseline.values[key], [], 0
    held = comparison.candidate.pieces.get(key, {})
    for rank, pieces in sorted(held.items(), key=lambda item: (item[1][-1].layout or _NO_LAYOUT).coordinate):
        value, layout = pieces[-1].value, pieces[-1].layout
        if layout is None or len(layout.placements) != 1 or not layout.placements[0].startswith("shard"):
            return []
        dim = int(layout.placements[0].partition(":")[2])
        if value.numel():
            found.append((rank, value, expected.narrow(dim, start, value.shape[dim])))
            start += value.shape[dim]
    return found


def _known_count(comparison: Comparison, factor: float) -> str:
    """Say which count of the run equals a factor."""
    world = len(comparison.candidate.recording.ranks)
    passes = 1 + max(
        (entry.forward_pass for rank in comparison.candidate.recording.ranks for entry in rank.entries), default=0
    )
    ratio = factor if factor >= 1 else 1 / factor
    names = [
        name
        for name, count in (("micro-batches", passes), ("ranks", world), ("ranks × micro-batches", world * passes))
        if count > 1 and abs(ratio / count - 1) < 0.02
    ]
    return f": the number of {' or '.join(names)}" if names else ""


def _lost_microbatch(comparison: Comparison, keys: Sequence[Key]) -> Cause | None:
    """Recognize gradients of fewer samples: activation gradients are right, sums over them are not."""
    wrong = [key for key in comparison.wrong("backward") if key.kind == "output gradient"]
    passes = {entry.forward_pass for rank in comparison.candidate.recording.ranks for entry in rank.entries}
    if not wrong and len(passes) > 1 and len(keys) > 0.5 * len(_all_gradients(comparison)):
        return cause(
            "micro-batch lost",
            f"Activation gradients of all {len(passes)} micro-batches are right, but {len(keys)} gradients are not.",
        )
    return None


def _name(key: Key) -> str:
    return f"{key.module}.{key.name}".strip(".") or "the model"
