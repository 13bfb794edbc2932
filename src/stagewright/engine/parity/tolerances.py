"""Tolerances of the parity check: rounding, run-to-run noise, and how sensitive a model is to rounding.

    allowed error = max(tolerance of the dtype, min(noise + rounding sensitivity, MAX_SENSITIVITY)), for each tensor

Noise: kernels that add in no fixed order (the backward of fused attention on a GPU) change results from run to run. The
baseline runs the same step twice, and a tensor is allowed a multiple of the difference.

Rounding sensitivity: floating-point reordering changes a value by its rounding error, and some models amplify that: a
codec rounds to the next quantization step, 16-bit sums lose low bits, batch norm divides by a small variance, compiled
kernels round less often. For such plans the baseline runs once more with a perturbation of that size at codecs, or at
the output of every unit, and a tensor is allowed a multiple of the change that it caused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from stagewright.engine.batch.batch_norm import find_tracked_norms
from stagewright.engine.parity.baseline import Baseline
from stagewright.engine.parity.relative_error import SMALLEST, label, name_outputs, relative_error, scales
from stagewright.graph.unit_graph import UnitGraph
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Model

MAX_SENSITIVITY = 0.1
"""Upper bound of the relative error allowed for rounding: a larger one would make the check meaningless."""
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3, "float64": 1e-10}
"""Largest relative error that counts as equal, by dtype: what floating-point reordering may cause."""
UNIT_ROUNDING = {"float32": 2**-21, "bfloat16": 2**-9, "float16": 2**-12}
"""Rounding error of one unit's output, relative to its largest value."""
NOISE_FACTOR = 4
"""Allowed error over the measured difference between two runs."""
REORDERING = 0.1
"""Share of the tolerance that floating-point reordering reaches at most; 0.07 was measured."""


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 without TF32 and with deterministic convolutions.

    By default torch lets convolutions use TF32 on a GPU, by kernels that it chooses per memory layout; results may
    differ by a thousandth. Nondeterministic convolutions differ between two runs of the same model.
    """
    cudnn: Any = torch.backends.cudnn
    deterministic = cudnn.deterministic, cudnn.benchmark
    backends: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    precisions = [backend.fp32_precision for backend in backends]
    legacy: tuple[str, bool] | None = None
    with suppress(RuntimeError):  # torch refuses to read the legacy settings if both interfaces were used
        legacy = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        if legacy is not None:
            torch.set_float32_matmul_precision("highest")
            cudnn.allow_tf32 = False
        else:
            for backend in backends:
                backend.fp32_precision = "ieee"
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = deterministic
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy[0])
            cudnn.allow_tf32 = legacy[1]
        else:
            for backend, precision in zip(backends, precisions, strict=True):
                backend.fp32_precision = precision


def choose_perturbation(
    plan: Plan, model: Model, graph: UnitGraph, links: Sequence[tuple[str, str]], cuts: Sequence[int]
) -> dict[str, Any] | None:
    """Return the arguments of ``make_baseline`` for the perturbed run; None if the plan needs none."""
    coded = plan.mesh.size("tensor") > 1 and any(codec != "none" for link in links for codec in link)
    in_16_bits = plan.compute_dtype != "float32" and (plan.mesh.size("tensor") > 1 or plan.compile != "none")
    is_compiled = plan.compile != "none"
    has_batch_norm = plan.training and plan.mesh.num_workers > 1 and bool(find_tracked_norms(model.module))
    only_coded = coded and not in_16_bits
    dtype = plan.compute_dtype
    perturbation = REORDERING * TOLERANCES[dtype] if only_coded else UNIT_ROUNDING[dtype]
    if in_16_bits or has_batch_norm or is_compiled:
        by_cut, all_cuts = dict(zip(cuts, links, strict=True)), range(len(graph.calls) - 1)
        all_links = [by_cut.get(cut, ("none", "none")) for cut in all_cuts]
        return {"cuts": all_cuts, "links": all_links, "perturbation": perturbation}
    return {"cuts": cuts, "links": links, "perturbation": perturbation} if coded else None


def is_nondeterministic(device: torch.device) -> bool:
    """Return whether two runs of the same step on a device may differ; one CPU thread repeats itself exactly."""
    return device.type == "cuda" or torch.get_num_threads() > 1


def measure_noise(repeated: Baseline, baseline: Baseline) -> dict[str, float]:
    """Return four times the relative difference between two runs of the same step: they are two samples of many."""
    return {name: NOISE_FACTOR * change for name, change in _relative_changes(repeated, baseline).items()}


def measure_sensitivity(perturbed: Baseline, baseline: Baseline) -> dict[str, float]:
    """Return twice the relative change of each tensor and of the loss: the perturbation is one sample of many."""
    return {name: 2 * change for name, change in _relative_changes(perturbed, baseline).items()}


def _relative_changes(other: Baseline, baseline: Baseline) -> dict[str, float]:
    """Return the relative difference of each tensor and of the loss."""
    changes = {"loss": abs(other.loss - baseline.loss) / max(baseline.loss_scale, SMALLEST)}
    for kind, values, expected in (
        ("gradients", other.gradients, baseline.gradients),
        ("buffers", other.buffers, baseline.buffers),
        ("outputs", name_outputs(dict(enumerate(other.outputs))), name_outputs(dict(enumerate(baseline.outputs)))),
    ):
        sizes = scales(expected, by_module=kind == "gradients")
        changes |= {label(kind, name): relative_error(values[name], expected[name], sizes[name]) for name in expected}
    return changes
