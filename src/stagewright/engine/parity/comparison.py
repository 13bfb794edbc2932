"""Compare one step of a plan with the single-device baseline: loss, outputs, every gradient, every buffer.

Each worker compares what it holds with worker 0's baseline, which is broadcast one tensor at a time. All workers get
the same ``ParityReport``. No speed-up is shown for a plan that fails this comparison.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from stagewright.engine.parity.baseline import Baseline
from stagewright.engine.parity.relative_error import SMALLEST, label, name_outputs, relative_error, scales
from stagewright.engine.parity.tolerances import MAX_SENSITIVITY
from stagewright.engine.worker.broadcast import broadcast, gather_ragged, gather_text
from stagewright.runs.result import ParityReport


def compare_with_baseline(
    baseline: Baseline | None,
    *,
    loss: float,
    gradients: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    outputs: Mapping[int, Sequence[torch.Tensor]],
    tolerance: float,
    device: torch.device,
    trained: Collection[str] = (),
) -> ParityReport:
    """Compare what this worker holds with worker 0's baseline; every worker must call this and gets the same report.

    ``outputs`` are those of this worker's micro-batches, by micro-batch index over all replicas; only worker 0 passes a
    ``baseline``. The error is infinite for an output, gradient or changed buffer that no worker has, or that the
    baseline does not have. So it is for a missing gradient of a parameter that this worker trains (``trained``) if the
    baseline has one: another replica may have it and continue without this one.
    """
    collected = _Errors(tolerance)
    sensitivity = baseline.rounding_sensitivity if baseline else {}
    kinds: list[tuple[str, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor] | None, frozenset[str] | None]] = [
        ("gradients", gradients, baseline.gradients if baseline else None, None),
        ("buffers", buffers, *((baseline.buffers, baseline.changed) if baseline else (None, None))),
        ("outputs", name_outputs(outputs), name_outputs(dict(enumerate(baseline.outputs))) if baseline else None, None),
    ]
    for kind, held, expected, required in kinds:
        names: list[str] = []
        for name, value, scale, allowed in _broadcast_tensors(expected, device, kind, sensitivity):
            names.append(name)
            if name in held:
                collected.add(kind, label(kind, name), relative_error(held[name], value, scale), allowed)
            elif kind == "gradients" and name in trained:
                collected.add(kind, f"{label(kind, name)} (missing on a worker)", float("inf"))
        missing = _held_by_no_worker(names, held, required, device)
        unexpected = [] if kind == "buffers" else [name for name in held if name not in set(names)]
        for remark, odd in (("missing on all workers", missing), ("missing in the baseline", unexpected)):
            if odd:
                collected.add(kind, f"{label(kind, odd[0])} ({remark})", float("inf"))
    local = [baseline.loss, baseline.loss_scale, _allowed(sensitivity, "loss")] if baseline else [0.0, 0.0, 0.0]
    expected_loss, scale, allowed = next(broadcast([torch.tensor(local, dtype=torch.float64)], device)).tolist()
    collected.add("loss", "the loss", abs(loss - expected_loss) / max(scale, SMALLEST), allowed)
    return collected.report(device)


class _Errors:
    """Relative errors on this worker."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = self._largest_allowed = tolerance
        self._largest = {"loss": 0.0, "outputs": 0.0, "gradients": 0.0, "buffers": 0.0}
        self._worst, self._worst_ratio, self._failed = "nothing", 0.0, False

    def add(self, kind: str, name: str, error: float, sensitivity: float = 0.0) -> None:
        """Add an error; ``sensitivity`` raises the tolerance only if the error exceeds it."""
        allowed = self._tolerance if error <= self._tolerance else max(self._tolerance, sensitivity)
        if error / allowed > self._worst_ratio:
            self._worst, self._worst_ratio = name, error / allowed
        if not error <= self._largest[kind]:  # also if it is NaN
            self._largest[kind] = error
        self._failed |= not error <= allowed
        self._largest_allowed = max(self._largest_allowed, allowed)

    def report(self, device: torch.device) -> ParityReport:
        """Combine the errors of all workers; every worker must call this."""
        values = [*self._largest.values(), float(self._failed), self._largest_allowed]
        maxima = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        loss, outputs, gradients, buffers, failed, tolerance = maxima.tolist()
        return ParityReport(
            equal=not failed,
            tolerance=tolerance,
            loss=loss,
            outputs=outputs,
            gradients=gradients,
            buffers=buffers,
            worst=worst_of_all_workers(self._worst, self._worst_ratio, device),
        )


def worst_of_all_workers(name: str, error: float, device: torch.device) -> str:
    """Return the name with the largest error of any worker; every worker must call this."""
    names = gather_text(name, device)
    errors = gather_ragged(torch.tensor([error], dtype=torch.float64), device)
    return names[max(range(len(names)), key=lambda rank: float(errors[rank]))]


def _held_by_no_worker(
    names: Sequence[str], held: Mapping[str, Any], required: frozenset[str] | None, device: torch.device
) -> list[str]:
    """Return the names that no worker holds, by worker 0's list; only ``required`` ones if worker 0 gives these."""
    if not names:
        return []
    present = torch.tensor([float(name in held) for name in names], device=device)
    if required is not None:
        optional = torch.tensor([float(name not in required) for name in names], device=device)
        present = torch.maximum(present, optional)
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    return [name for name, flag in zip(names, present.tolist(), strict=True) if flag == 0]


def _allowed(sensitivity: Mapping[str, float], name: str) -> float:
    return min(sensitivity.get(name, 0.0), MAX_SENSITIVITY)


def _broadcast_tensors(
    tensors: Mapping[str, torch.Tensor] | None, device: torch.device, kind: str, sensitivity: Mapping[str, float]
) -> Iterator[tuple[str, torch.Tensor, float, float]]:
    """Broadcast worker 0's tensors one by one, each with its name, scale and rounding sensitivity.

    Names and shapes are sent as JSON.
    """
    sizes = scales(tensors or {}, by_module=kind == "gradients")
    header = {
        name: [
            list(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            sizes[name],
            _allowed(sensitivity, label(kind, name)),
        ]
        for name, tensor in (tensors or {}).items()
    }
    header = json.loads(gather_text(json.dumps(header), device)[0])
    values = (
        tensors[name] if tensors is not None else torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (shape, dtype, _, _) in header.items()
    )
    for (name, (_, _, scale, allowed)), value in zip(header.items(), broadcast(values, device), strict=True):
        yield name, value, scale, allowed
