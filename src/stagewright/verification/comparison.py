"""Compare a candidate's step with the baseline's, tensor by tensor in the order of execution.

Activation gradients are compared up to one factor for the whole step: replicas and micro-batches divide the loss by
their part of the batch and average the gradients later, so only parameter gradients have an absolute scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from stagewright.verification.assembly import (
    Baseline,
    Key,
    Part,
    Rows,
    Step,
    assemble,
    make_baseline,
    match_rows,
    relative_error,
    shard_kind,
)
from stagewright.verification.verdict import Phase, TensorError

_SAFETY = 4.0
"""How much more than the perturbed baselines a correct step may differ: it rounds in other places than they do."""
_FLOOR_EPS = 4.0
"""Smallest tolerance, in machine epsilons of the coarsest format of the activations."""
_SIGNIFICANT = 100.0
"""Optimizer steps are compared where a gradient exceeds this many tolerances: Adam turns noise into whole steps."""

_LABELS = {
    "gradient": "gradient of {}",
    "parameter": "{}",
    "buffer": "buffer {}",
    "parameter after": "{} after the step",
}


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Both steps, aligned, with an error and a tolerance for each tensor."""

    baseline: Baseline
    perturbed: tuple[Baseline, ...]
    candidate: Step
    rows: Rows
    eps: float
    dtype: str
    gradient_scale: float = 1.0
    errors: dict[Key, TensorError] = field(default_factory=dict)
    """In the order of execution, phase by phase."""
    partial: set[Key] = field(default_factory=set)
    """Outputs of row-parallel modules that are partial sums, all-reduced elsewhere."""
    _parts: dict[Key, list[Part]] = field(default_factory=dict)

    def parts(self, key: Key) -> list[Part]:
        """Return the candidate's tensor, assembled from its parts."""
        if key not in self._parts:
            self._parts[key] = assemble(key, self.baseline, self.candidate, self.rows)
        return self._parts[key]

    def wrong(self, *phases: Phase) -> list[Key]:
        """Return the tensors that differ in some phases, in order."""
        return [key for key, error in self.errors.items() if error.phase in phases and error.is_wrong]

    def scale(self, key: Key, baseline: Baseline | None = None) -> float:
        """Return the largest value of a tensor; for gradients, of all gradients of its module."""
        values = (baseline or self.baseline).values
        if key.kind not in ("gradient", "local gradient"):
            return _largest(values[key])
        return max(_largest(v) for other, v in values.items() if other[:2] == key[:2])

    def tolerance(self, key: Key) -> float:
        """Return what rounding explains of a tensor."""
        value = self.baseline.values[key]
        if not value.is_floating_point():
            return 0.0
        scale = self.scale(key)
        changes = [relative_error(step.values[key], value, scale) for step in self.perturbed if key in step.values]
        return max([_FLOOR_EPS * self.eps, *(_SAFETY * change for change in changes)])


def compare_steps(baseline: Step, perturbed: Sequence[Step], candidate: Step) -> Comparison:
    """Compare all tensors of two steps."""
    plain = make_baseline(baseline)
    formats = {
        value.dtype
        for key, value in plain.values.items()
        if value.is_floating_point() and key.kind in ("output", "output gradient", "parameter")
    } | {torch.float32}
    coarsest = max(formats, key=lambda dtype: torch.finfo(dtype).eps)
    if formats == {torch.float32, torch.float64}:
        coarsest = torch.float64
    comparison = Comparison(
        baseline=plain,
        perturbed=tuple(make_baseline(step) for step in perturbed),
        candidate=candidate,
        rows=match_rows(plain, candidate),
        eps=torch.finfo(coarsest).eps,
        dtype=str(coarsest).removeprefix("torch."),
    )
    comparison.gradient_scale = _find_gradient_scale(comparison)
    for phase, keys in _execution_order(comparison.baseline):
        for key in keys:
            error = _compare(comparison, key, phase)
            if error is not None:
                comparison.errors[key] = error
    return comparison


def _execution_order(baseline: Baseline) -> Iterable[tuple[Phase, list[Key]]]:
    order = baseline.step.order

    def of_kinds(*kinds: str) -> list[Key]:
        return sorted((key for key in baseline.values if key.kind in kinds), key=order.__getitem__)

    yield "before the step", of_kinds("parameter", "buffer")
    yield "forward", of_kinds("input", "output")
    gradients: dict[str, list[Key]] = {}
    for key in of_kinds("gradient"):
        gradients.setdefault(key.module, []).append(key)
    activations = of_kinds("output gradient")
    last = {key.module: index for index, key in enumerate(activations)}
    backward: list[Key] = []
    for index, key in enumerate(activations):
        backward.append(key)
        if last[key.module] == index:
            backward += gradients.pop(key.module, [])
    backward += [key for module in reversed(gradients) for key in gradients[module]]
    yield "backward", backward
    yield "optimizer step", of_kinds("parameter after")
    yield "buffers", of_kinds("buffer after")


def _compare(comparison: Comparison, key: Key, phase: Phase) -> TensorError | None:
    if key.kind == "parameter after":
        return _compare_update(comparison, key)
    label = _LABELS.get(key.kind, f"{key.kind} {{}}").format(key.name).strip()
    parts = comparison.parts(key)
    tolerance, scale = comparison.tolerance(key), comparison.scale(key)
    if not parts:
        is_known = key.module in comparison.candidate.modules
        if key.kind != "parameter" and not (key.kind == "gradient" and is_known):
            return None
        return TensorError(
            phase=phase, module=key.module, tensor=label, error=math.inf, tolerance=tolerance, ranks=(),
            remark="on no rank",
        )  # fmt: skip
    factor = comparison.gradient_scale if key.kind == "output gradient" else 1.0
    errors = [
        relative_error(part.value / factor if factor != 1.0 else part.value, part.expected, scale) for part in parts
    ]
    remark = ""
    if max(errors) > tolerance and key.kind == "output" and len(parts) > 1 and _is_row_parallel(comparison, key.module):
        total = sum_parts(parts)
        if total is not None and relative_error(total, parts[0].expected, scale) <= tolerance:
            comparison.partial.add(key)
            errors, remark = [relative_error(total, parts[0].expected, scale)] * len(parts), "partial sums"
    worst = max(range(len(parts)), key=errors.__getitem__)
    return TensorError(
        phase=phase,
        module=key.module,
        tensor=label,
        error=errors[worst],
        tolerance=tolerance,
        ranks=tuple(comparison.candidate.recording.ranks[rank].rank for rank in parts[worst].ranks),
        held=parts[worst].joined,
        remark=remark,
    )


def sum_parts(parts: Sequence[Part]) -> torch.Tensor | None:
    """Return the sum of tensors of the same shape."""
    if len({part.value.shape for part in parts}) != 1 or not parts[0].value.is_floating_point():
        return None
    return torch.stack([part.value.double() for part in parts]).sum(0)


def _is_row_parallel(comparison: Comparison, module: str) -> bool:
    """Whether a module's weight is sharded in its input dimension."""
    if shard_kind(module, comparison.candidate) == "row":
        return True
    key = Key("parameter", module, "weight")
    return key in comparison.baseline.values and any(part.dim == 1 for part in comparison.parts(key))


def _compare_update(comparison: Comparison, key: Key) -> TensorError | None:
    """Compare the change of a parameter where its gradient is right and larger than rounding noise."""
    gradient = key._replace(kind="gradient")
    before = key._replace(kind="parameter")
    known = comparison.errors.get(gradient)
    start = comparison.errors.get(before)
    if (known is not None and known.is_wrong) or start is None or start.is_wrong:
        return None
    parts, starts = comparison.parts(key), comparison.parts(before)
    if not parts or len(parts) != len(starts):
        return None
    old, new = comparison.baseline.values[before], comparison.baseline.values[key]
    update = new.double() - old.double()
    scale = _largest(update)
    significant = significant_elements(comparison, key)
    if scale == 0.0:
        scale = max(_largest(old) * comparison.eps, 1e-30)
    precision = 4 * torch.finfo(old.dtype).eps * _largest(old) / scale if old.is_floating_point() else 0.0
    changes = [
        _masked_error((step.values[key].double() - step.values[before].double()), update, significant, scale)
        for step in comparison.perturbed
        if key in step.values
    ]
    tolerance = max([_FLOOR_EPS * comparison.eps + precision, *(_SAFETY * change for change in changes)])
    errors = [
        _masked_error(part.value.double() - begin.value.double(), update, significant, scale)
        for part, begin in zip(parts, starts, strict=True)
    ]
    worst = max(range(len(parts)), key=errors.__getitem__)
    return TensorError(
        phase="optimizer step",
        module=key.module,
        tensor=f"update of {key.name}",
        error=errors[worst],
        tolerance=tolerance,
        ranks=tuple(comparison.candidate.recording.ranks[rank].rank for rank in parts[worst].ranks),
        held=parts[worst].joined,
    )


def significant_elements(comparison: Comparison, key: Key) -> torch.Tensor:
    """Return where a parameter's gradient is well above rounding noise; everywhere if it has no gradient."""
    gradient = key._replace(kind="gradient")
    value = comparison.baseline.values.get(gradient)
    if value is None:
        return torch.ones_like(comparison.baseline.values[key], dtype=torch.bool)
    limit = min(_SIGNIFICANT * comparison.tolerance(gradient), 0.5) * comparison.scale(gradient)
    return value.abs().double() > limit


def _masked_error(value: torch.Tensor, expected: torch.Tensor, where: torch.Tensor, scale: float) -> float:
    if value.shape != expected.shape:
        return math.inf
    if not bool(where.any()):
        return 0.0
    return relative_error(value[where], expected[where], scale)


def _find_gradient_scale(comparison: Comparison) -> float:
    """Return the median factor between activation gradients and the baseline's, as the nearest exact one."""
    factors: list[float] = []
    for key in comparison.baseline.values:
        if key.kind != "output gradient":
            continue
        for part in comparison.parts(key):
            if part.value.shape == part.expected.shape:
                left, right = part.value.double().flatten(), part.expected.double().flatten()
                if float(right @ right) > 0 and math.isfinite(float(left @ right)):
                    factors.append(float(left @ right) / float(right @ right))
    if not factors:
        return 1.0
    middle = sorted(factors)[len(factors) // 2]
    rounded = float(round(middle)) if middle >= 1 else (1 / round(1 / middle) if middle > 1e-6 else 1.0)
    return rounded if rounded and abs(middle / rounded - 1) < 100 * comparison.eps + 1e-3 else (middle or 1.0)


def _largest(value: torch.Tensor) -> float:
    if not value.numel():
        return 0.0
    finite = value.double().abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.max())
