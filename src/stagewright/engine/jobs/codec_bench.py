"""Benchmark codecs on the tensors that cross a model's cuts: error, size, time, and the links on which they pay off.

model ─► capture ─► cut ─► forward and backward of one batch ─► crossing tensors ─► each codec, and a plain copy
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stagewright.codecs.cost import CodecCost
from stagewright.codecs.kernels.select import kernel_names
from stagewright.codecs.measure import measure_codec, measure_copy
from stagewright.engine.batch.crossing_tensors import collect_crossing_tensors
from stagewright.errors import UsageError
from stagewright.graph.unit_graph import UnitGraph
from stagewright.zoo.model import Batch, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRow:
    """One codec on the tensors that cross one cut in one direction."""

    cut: str
    """The unit before the cut."""
    backward: bool
    """Whether the tensors are gradients; else activations."""
    cost: CodecCost
    """All tensors of the crossing combined."""
    copy_s: float
    """Time of a plain copy of the same tensors in the same run."""

    def to_dict(self, rates: Sequence[float]) -> dict[str, Any]:
        """Convert to JSON; ``pays`` and ``link_gain`` have one entry per link rate."""
        raw = self.cost.raw_bytes
        return {
            "cut": self.cut,
            "direction": "backward" if self.backward else "forward",
            **self.cost.to_dict(),
            "error": self.cost.error if math.isfinite(self.cost.error) else None,
            "copy_s": self.copy_s,
            "encode_bytes_per_s": raw / self.cost.encode_s,
            "decode_bytes_per_s": raw / self.cost.decode_s,
            "pays": [self.cost.pays_off(rate) for rate in rates],
            "link_gain": [raw / rate / self.cost.transfer_s(rate) for rate in rates],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecBench:
    """Results of a codec benchmark on a model's cuts."""

    model: str
    device: str
    kernels: str
    """Implementation of the block codecs on that device: numba, triton or torch."""
    dtype: str
    batch_size: int
    rates: tuple[float, ...]
    """Link bandwidths in bytes per second."""
    rows: tuple[CodecRow, ...]
    """By cut, forward and backward."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON."""
        return {
            "model": self.model,
            "device": self.device,
            "kernels": self.kernels,
            "dtype": self.dtype,
            "batch": self.batch_size,
            "links_bytes_per_s": list(self.rates),
            "rows": [row.to_dict(self.rates) for row in self.rows],
        }


def even_cuts(graph: UnitGraph, num_stages: int) -> list[int]:
    """Return cuts with about the same number of units in each stage."""
    count = len(graph.calls)
    if not 2 <= num_stages <= count:
        raise UsageError(f"{count} units can be cut into 2 to {count} stages, not {num_stages}: change --stages")
    return [round(count * stage / num_stages) - 1 for stage in range(1, num_stages)]


def bench_codecs(
    model: Model,
    graph: UnitGraph,
    cuts: Sequence[int],
    names: Sequence[str],
    rates: Sequence[float],
    *,
    device: str,
    training: bool = True,
    repeats: int = 5,
    progress: Callable[[int, int, str], None] | None = None,
) -> CodecBench:
    """Measure codecs on one batch of the model."""
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    tensors = collect_crossing_tensors(graph, cuts, batch, model.loss if training else None)
    jobs = [
        (index, backward, name)
        for index in range(len(cuts))
        for backward in (False, True)
        if tensors[backward][index]
        for name in names
    ]
    if not jobs:
        raise UsageError(f"no tensor that a codec can compress crosses the cuts of {model.name!r}: choose other cuts")
    rows = []
    for done, (index, backward, name) in enumerate(jobs):
        if progress is not None:
            progress(done, len(jobs), name)
        crossing = tensors[backward][index]
        costs = [measure_codec(name, tensor, repeats) for tensor in crossing]
        rows.append(
            CodecRow(
                cut=graph.calls[cuts[index]].name,
                backward=backward,
                cost=CodecCost.combine(costs),
                copy_s=sum(measure_copy(tensor, repeats) for tensor in crossing),
            )
        )
    first: torch.Tensor = next(row[0] for row in tensors[False] if row)
    return CodecBench(
        model=model.name,
        device=device,
        kernels=kernel_names()[first.device.type],
        dtype=str(first.dtype).removeprefix("torch."),
        batch_size=graph.batch_size_of(model.args, model.kwargs),
        rates=tuple(rates),
        rows=tuple(rows),
    )
