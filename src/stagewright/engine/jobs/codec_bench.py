"""What every codec does to what really crosses a model's cuts: error, size, time, and the links on which it pays.

model ─► capture ─► cut ─► one batch forward and backward ─► the crossing's tensors ─► each codec, beside a copy
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stagewright.codecs.choose import Cost
from stagewright.codecs.kernels.select import kernel_names
from stagewright.codecs.measure import copy_seconds, measure_codec
from stagewright.engine.pipeline.crossing_tensors import tensors_at
from stagewright.errors import UsageError
from stagewright.graph.unit_graph import UnitGraph
from stagewright.zoo.model import Batch, Model

__all__ = ["CodecBench", "CodecRow", "bench_codecs", "even_cuts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRow:
    """One codec on what crosses one cut in one direction."""

    cut: str
    """The unit before the cut."""
    backward: bool
    """Gradients, or activations."""
    cost: Cost
    """What it does, all tensors of the crossing together."""
    copy_s: float
    """A copy of the same tensors in the same run."""

    def to_dict(self, rates: Sequence[float]) -> dict[str, Any]:
        """As JSON knows it; ``pays`` says it for each link."""
        raw = self.cost.raw_bytes
        return {
            "cut": self.cut,
            "direction": "backward" if self.backward else "forward",
            **self.cost.to_dict(),
            "error": self.cost.error if math.isfinite(self.cost.error) else None,
            "copy_s": self.copy_s,
            "encode_bytes_per_s": raw / self.cost.encode_s,
            "decode_bytes_per_s": raw / self.cost.decode_s,
            "pays": [self.cost.pays(rate) for rate in rates],
            "link_gain": [raw / rate / self.cost.seconds(rate) for rate in rates],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecBench:
    """Codecs on a model's cuts."""

    model: str
    """Its name."""
    device: str
    """Where it was measured."""
    kernels: str
    """What does the work of the block codecs there: numba, triton or torch."""
    dtype: str
    """Of what crosses."""
    batch_size: int
    """Samples."""
    rates: tuple[float, ...]
    """Links, in bytes a second."""
    rows: tuple[CodecRow, ...]
    """Cut by cut, forward and backward."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
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
    """Cuts that leave about equally many units in each stage."""
    count = len(graph.calls)
    if not 2 <= num_stages <= count:
        raise UsageError(f"{count} units can be cut into 2 to {count} stages, not {num_stages}: change --stages")
    return [round(count * at / num_stages) - 1 for at in range(1, num_stages)]


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
    tensors = tensors_at(graph, cuts, batch, model.loss if training else None)
    jobs = [(at, way, name) for at in range(len(cuts)) for way in (False, True) if tensors[way][at] for name in names]
    if not jobs:
        raise UsageError(f"no activation that a codec takes crosses the cuts of {model.name!r}: choose other cuts")
    rows = []
    for done, (at, way, name) in enumerate(jobs):
        if progress is not None:
            progress(done, len(jobs), name)
        every = tensors[way][at]
        costs = [measure_codec(name, one, repeats) for one in every]
        rows.append(
            CodecRow(
                cut=graph.calls[cuts[at]].name,
                backward=way,
                cost=Cost.together(costs),
                copy_s=sum(copy_seconds(one, repeats) for one in every),
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
