"""Context parallelism: divide the sequence inside the blocks of a model, derived from the model alone.

    embedding ─ scatter ─ block ─ gather ─ … ─ scatter ─ block ─ gather ─ norm ─ head ─ loss
    replicated            divided                        divided         replicated

A block is a unit that calls ``scaled_dot_product_attention``, by itself or through transformers' attention interface,
or torch's own ``nn.MultiheadAttention``, as ``nn.TransformerEncoderLayer`` does.
Its code sees only this worker's positions: of hidden states, position embeddings and position numbers, and of an
encoder's output. Masks and biases stay those of the whole sequence. Since everything outside of blocks is replicated,
labels are shifted and losses averaged as on one device. Each worker has its positions' part of the gradients of blocks:
they are summed over the axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stagewright import structure
from stagewright.engine.context.attention import DividedSequence, Exchange
from stagewright.engine.context.axis import ContextAxis
from stagewright.engine.context.sources import Sources
from stagewright.engine.tensor.axis import process_group_of
from stagewright.errors import UsageError


def apply_context_parallel(
    model: nn.Module, blocks: Mapping[str, Sources], group: Any, exchange: Exchange
) -> ContextAxis:
    """Divide the sequence inside the named blocks over ``group``, in place."""
    axis = ContextAxis(process_group_of(group))
    for name, sources in blocks.items():
        region = _Block(axis, exchange, name, sources)
        module = model.get_submodule(name)
        module.register_forward_pre_hook(region.begin, with_kwargs=True)
        module.register_forward_hook(region.end, always_call=True)
    return axis


class _Block:
    """The entry and exit of one block."""

    def __init__(self, axis: ContextAxis, exchange: Exchange, name: str, sources: Sources) -> None:
        self._axis, self._name, self._sources = axis, name, sources
        self._mode = DividedSequence(axis, exchange, name, sources)
        self._is_open = False

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Keep this worker's positions of the block's inputs."""
        length, key_lengths = self._sources.lengths(structure.tensors((args, dict(kwargs))))
        lengths, dim, numbers = {length, *key_lengths}, self._sources.sequence_dim, itertools.count()

        def divide(leaf: torch.Tensor) -> torch.Tensor:
            is_mask = next(numbers) in self._sources.masks
            if not is_mask and leaf.dim() in (2, 3) and leaf.shape[dim] in lengths:
                return self._axis.scatter(leaf, dim)
            return self._axis.copy_to_region(leaf)

        divided = structure.map_tensors(divide, (args, dict(kwargs)))
        self._mode.begin(length, key_lengths)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._is_open = True
        return divided

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Gather all positions of the block's outputs."""
        if self._is_open:
            self._is_open = False
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return None if output is None else structure.map_tensors(self._whole, output)

    def _whole(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return all positions of an output; a bias for the attention of the next blocks is whole already."""
        length, key_lengths, dim = self._mode.length, self._mode.key_lengths, self._sources.sequence_dim
        if leaf.dim() == 4 and tuple(leaf.shape[-2:]) in {(length, keys) for keys in key_lengths}:
            return self._axis.leave(leaf) if leaf.requires_grad else leaf
        if leaf.dim() < 2 or leaf.shape[dim] != self._axis.num_positions(length):
            raise UsageError(
                f"context={self._axis.num_workers} can't divide {self._name}: it returns a tensor of shape "
                f"{list(leaf.shape)}, whose dimension {dim} is not the sequence; use data or pipeline instead"
            )
        return self._axis.gather(leaf, dim, length)
