"""The tensors that cross the cuts of a pipeline, as both ends of a link know them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stagewright.graph.unit_graph import UnitGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """Shape and dtype of a tensor to receive."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The tensors that cross each cut."""

    shapes: Callable[[int, tuple[int, int]], Sequence[TensorShape]]
    """``shapes(cut, microbatch.size)``: every tensor that crosses a cut."""
    gradients: Callable[[int, int], Sequence[bool]]
    """``gradients(cut, variant)``: for each tensor, whether training sends its gradient back."""
    needs_gradient: Sequence[Sequence[bool]]
    """For each cut and tensor of the first graph, whether it is an activation, which codecs compress."""

    @classmethod
    def of(cls, graphs: Sequence[UnitGraph], cuts: Sequence[int]) -> Links:
        """Return the tensors that cross the cuts of captured graphs, one for each shape of the inputs; it may grow."""

        @functools.cache  # every transfer asks
        def shapes(cut: int, size: tuple[int, int]) -> list[TensorShape]:
            variant, num_samples = size
            crossing = graphs[variant].crossing_shapes(cuts[cut], num_samples)
            return [TensorShape(shape=shape, dtype=dtype) for shape, dtype in crossing]

        @functools.cache
        def gradients(cut: int, variant: int) -> tuple[bool, ...]:
            return graphs[variant].needs_gradient(cuts[cut])

        first = [graphs[0].needs_gradient(cut) for cut in cuts]
        return cls(shapes=shapes, gradients=gradients, needs_gradient=first)
