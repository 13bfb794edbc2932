"""Causes of a difference before the step or in the forward pass."""

from __future__ import annotations

import torch

from stagewright.verification.assembly import Key, Part
from stagewright.verification.causes.catalogue import cause
from stagewright.verification.causes.patterns import constant_factor, find_block_order, find_shift, is_close
from stagewright.verification.comparison import Comparison, sum_parts
from stagewright.verification.verdict import Cause


def find_initial_cause(comparison: Comparison, key: Key) -> Cause | None:
    """Explain a parameter or buffer that differs before the step."""
    tolerance = comparison.errors[key].tolerance
    name = f"{key.module}.{key.name}".lstrip(".")
    if not comparison.parts(key):
        known = next((module for module in comparison.candidate.modules if module), "")
        return cause("module names differ", f"No rank has {name}; the candidate's modules are named like {known}.")
    for part in comparison.parts(key):
        order = find_block_order(part.value, part.expected, tolerance, max(len(part.ranks), _world(comparison)))
        if order:
            return cause("wrong shard order", f"{name} before the step: {order}.")
    if key.kind == "buffer":
        return cause("stale buffer", f"The buffer {name} differs already before the step.")
    wrong = [wrong_key for wrong_key in comparison.wrong("before the step") if wrong_key.kind == "parameter"]
    total = sum(error.phase == "before the step" for error in comparison.errors.values())
    ranks = sorted({rank for wrong_key in wrong for rank in comparison.errors[wrong_key].ranks})
    return cause(
        "different initial weights",
        f"{len(wrong)} of {total} tensors differ before the step (rank {', '.join(map(str, ranks))}).",
    )


def find_forward_cause(comparison: Comparison, key: Key) -> Cause | None:
    """Explain the first tensor that differs in the forward pass."""
    tolerance = comparison.errors[key].tolerance
    parts = [part for part in comparison.parts(key) if part.value.shape == part.expected.shape]
    where = f"{key.module or 'the model'}, {key.kind}"
    info = comparison.candidate.modules.get(key.module)
    plain = comparison.baseline.step.modules.get(key.module)
    if key.kind == "input":
        for part in parts:
            if shift := find_shift(part.value, part.expected, tolerance):
                return cause("mask or position shifted", f"{where} {key.name}: {shift}.")
        return _reduction_cause(comparison, key, parts) or _corrupted_rows(comparison, key, parts)
    if info is not None and plain is not None and info.training != plain.training:
        mode = "training" if info.training else "eval"
        return cause("train or eval mode", f"{key.module or 'the model'} is in {mode} mode, unlike the baseline's.")
    if info is not None and "BatchNorm" in info.type and info.training:
        count = max(len(held) for held in comparison.candidate.pieces[key].values())
        share = f"{count} micro-batches" if count > 1 else "a part of the batch on each rank"
        return cause("batch norm per replica", f"{key.module} normalizes over {share}; its input is right.")
    if plain is not None and plain.dropout > 0 and plain.training:
        return _dropout_cause(comparison, key, parts, plain.dropout)
    found = _reduction_cause(comparison, key, parts)
    if found is not None:
        return found
    for part in parts:
        order = find_block_order(part.value, part.expected, tolerance, max(len(part.ranks), _world(comparison)))
        if order:
            return cause("wrong shard order", f"{where}: {order}.")
    stale = [other for other in comparison.wrong("before the step", "buffers") if other.module == key.module]
    if stale and stale[0].kind.startswith("buffer"):
        return cause("stale buffer", f"The buffer {stale[0].module}.{stale[0].name} differs.")
    for part in parts:
        if shift := find_shift(part.value, part.expected, tolerance):
            return cause("mask or position shifted", f"{where}: {shift}.")
    if comparison.wrong("buffers"):
        stale_key = comparison.wrong("buffers")[0]
        return cause("stale buffer", f"The buffer {stale_key.module}.{stale_key.name} differs.")
    return None


def _dropout_cause(comparison: Comparison, key: Key, parts: list[Part], probability: float) -> Cause:
    given = comparison.parts(Key("input", key.module, "args[0]", key.call))
    if len(given) == len(parts) and all(torch.equal(a.value, b.value) for a, b in zip(given, parts, strict=True)):
        return cause("train or eval mode", f"{key.module} (p = {probability:g}) returns its input unchanged.")
    whole = [part for part in parts if len(part.ranks) == 1]
    shares = {tuple(comparison.rows.by_rank[part.ranks[0]][0] or ()) for part in whole}
    is_replicated = len(whole) > 1 and len(shares) == 1
    if is_replicated and any(not torch.equal(part.value, whole[0].value) for part in whole[1:]):
        return cause("dropout seed per rank", f"{key.module} (p = {probability:g}) drops other elements on each rank.")
    return cause("dropout masks differ", f"{key.module} (p = {probability:g}) drops other elements than the baseline.")


def _reduction_cause(comparison: Comparison, key: Key, parts: list[Part]) -> Cause | None:
    """Recognize a sum over ranks that is missing, done twice, or that contains the bias of every rank."""
    tolerance = comparison.errors[key].tolerance
    where = f"{key.module or 'the model'}, {key.kind}"
    source = comparison.candidate.entries[key].source.split("|")
    if (
        key.kind == "input"
        and len(source) == 5
        and Key("output", source[1], source[2], int(source[4])) in comparison.partial
    ):
        return cause("missing all-reduce", f"The input of {key.module} is the partial sum that {source[1]} returned.")
    same_rows = len(parts) > 1 and all(part.expected.shape == parts[0].expected.shape for part in parts)
    if same_rows and all(torch.equal(part.expected, parts[0].expected) for part in parts[1:]):
        total = sum_parts(parts)
        if total is not None and is_close(total, parts[0].expected, 2 * tolerance):
            return cause("missing all-reduce", f"{where}: the sum over {len(parts)} ranks equals the baseline's.")
    bias = comparison.baseline.values.get(Key("parameter", key.module, "bias"))
    for part in parts:
        factor = constant_factor(part.value, part.expected, tolerance)
        if factor is None and bias is not None and key.kind == "output" and part.value.shape[-1:] == bias.shape:
            factor = constant_factor(part.value - bias, part.expected - bias, tolerance)  # the bias is added last
        if factor is not None and abs(factor - 1) > 2 * tolerance:
            name = "all-reduce twice" if factor > 1 else "missing all-reduce"
            return cause(name, f"{where}: {factor:.4g} × the baseline's.")
        if bias is not None and key.kind == "output" and part.value.shape[-1:] == bias.shape:
            count = _world(comparison) - 1
            excess = part.value.double() - part.expected.double()
            if count and is_close(excess, (bias.double() * count).expand_as(excess), 0.02 + tolerance):
                return cause("bias added on every rank", f"{where}: too large by {count} × the bias.")
        found = _partial_with_bias(key, parts, bias, tolerance)
        if found:
            return found
    return None


def _partial_with_bias(key: Key, parts: list[Part], bias: torch.Tensor | None, tolerance: float) -> Cause | None:
    """Recognize partial sums that each contain the whole bias."""
    total = sum_parts(parts) if len(parts) > 1 else None
    if bias is None or total is None or total.shape[-1:] != bias.shape or parts[0].expected.shape != total.shape:
        return None
    if is_close(total - bias.double() * (len(parts) - 1), parts[0].expected, 2 * tolerance):
        return cause("missing all-reduce", f"{key.module}: the partial sums of {len(parts)} ranks give the baseline's.")
    return None


def _corrupted_rows(comparison: Comparison, key: Key, parts: list[Part]) -> Cause | None:
    """Recognize rows that were right when they left a stage and wrong when the next one received them."""
    for part in parts:
        if len(part.ranks) == 1 and part.ranks[0] in comparison.rows.stages and part.value.ndim:
            wrong = [
                row
                for row in range(part.value.shape[0])
                if not is_close(part.value[row], part.expected[row], comparison.errors[key].tolerance)
            ]
            return cause(
                "rows corrupted between stages",
                f"{key.module}, input: {len(wrong)} of {part.value.shape[0]} rows are not what the stage before sent.",
            )
    return None


def _world(comparison: Comparison) -> int:
    return len(comparison.candidate.recording.ranks)
