"""Sequence parallelism: a block whose norms, dropouts and residuals see this worker's tokens only.

    x ─ divide ─► norm ─► all-gather ─► attention ─► reduce-scatter ─► + ─► norm ─► all-gather ─► … ─► join ─► y
                  shard                 whole sequence, own heads      shard

The block's code runs unchanged on its shard of the hidden states. What is replicated between regions without sequence
parallelism is divided: activations, and the work on them. Dropout masks are drawn for the whole sequence, as in the
baseline, and narrowed. Blocks that follow each other pass shards on without joining them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stagewright import structure
from stagewright.engine.tensor.axis import SEQUENCE_DIM, TensorAxis, shard_sizes
from stagewright.engine.tensor.dropout import draw_noise
from stagewright.errors import UsageError


class DividedBlock:
    """The ends of one block, and of the regions inside it."""

    def __init__(
        self,
        axis: TensorAxis,
        name: str,
        *,
        length: int | None = None,
        receives_shard: bool = False,
        returns_shard: bool = False,
        draws_masks: bool = False,
    ) -> None:
        """``length``: tokens of the example where shards are passed on, which must be told from the shard alone.

        ``draws_masks``: whether the block applies dropout, with masks of the whole sequence.
        """
        self._axis, self._name, self._length = axis, name, length
        self._receives_shard, self._returns_shard = receives_shard, returns_shard
        self._mode = _SequenceDropout(self) if draws_masks else None
        self._is_entered = False
        self.sizes: tuple[int, ...] = ()
        """Tokens of each worker in this pass."""
        self.in_region = False
        """True where the sequence is whole: from a region's column- to its row-parallel layers, and in islands."""

    @property
    def held(self) -> int:
        """Tokens of this worker."""
        return self.sizes[self._axis.index]

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run before the block's forward: keep this worker's tokens of the hidden states."""
        hidden = find_hidden(args, kwargs)
        if hidden is None or hidden.dim() != 3:
            raise UsageError(
                f"sequence_parallel = true can't divide {self._name}: it takes no hidden states of the shape [samples, "
                "tokens, features]; leave it out"
            )
        for other in structure.tensors((args, dict(kwargs))):
            is_encoded = other.dim() == 3 and other.shape[SEQUENCE_DIM] > 1  # of an encoder, for attention
            if other is not hidden and other.requires_grad and not is_encoded:
                raise UsageError(
                    f"sequence_parallel = true can't divide {self._name}: it takes a trained tensor of shape "
                    f"{list(other.shape)} beside its hidden states, whose gradient would be that of some tokens; "
                    "leave it out"
                )
        self.in_region = False
        tokens = hidden.shape[SEQUENCE_DIM]
        self.sizes = (
            self._sizes_of_shard(tokens)
            if self._receives_shard
            else sizes_of_shards(tokens, self._axis.num_workers, self._length)
        )
        if self._mode is not None and module.training and not self._is_entered:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._is_entered = True
        if self._receives_shard:
            return None
        shard = self._axis.divide_sequence(hidden, self.sizes)
        return structure.map_tensors(lambda leaf: shard if leaf is hidden else leaf, (args, dict(kwargs)))

    def end(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Run after the block's forward, even if it raised: join the shards of its outputs."""
        if self._mode is not None and self._is_entered:
            self._is_entered = False
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is None or self._returns_shard:
            return None
        return structure.map_tensors(self._join, output)

    def gather(self, value: torch.Tensor, *, is_replicated: bool = False) -> torch.Tensor:
        """Pass this worker's tokens into a region, which computes all tokens.

        ``is_replicated``: every worker computes the same from them first, so that each has the whole gradient.
        """
        self._check_shard(value, "its divided layers take")
        if is_replicated:
            return self._axis.gather_replicated(value, self.sizes)
        return self._axis.gather_to_region(value, self.sizes)

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum what a region returns, and keep this worker's tokens."""
        if partial.dim() != 3 or partial.shape[SEQUENCE_DIM] != sum(self.sizes):
            raise self._unknown_shape(partial, "its divided layers return")
        return self._axis.scatter_from_region(partial, self.sizes)

    def begin_island(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run before the forward of what every worker computes whole: join the hidden states."""
        hidden = find_hidden(args, kwargs)
        if hidden is None:
            raise UsageError(
                f"sequence_parallel = true can't divide {self._name}: its {type(module).__name__} takes no hidden "
                "states; leave it out"
            )
        self._check_shard(hidden, f"its {type(module).__name__} takes")
        self.in_region = True
        whole = self._axis.enter_island(hidden, self.sizes)
        return structure.map_tensors(lambda leaf: whole if leaf is hidden else leaf, (args, dict(kwargs)))

    def end_island(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Run after it, even if it raised: keep this worker's tokens of the hidden states, and other outputs whole."""
        self.in_region = False
        return None if output is None else structure.map_tensors(self._leave_island, output)

    def _leave_island(self, value: torch.Tensor) -> torch.Tensor:
        is_hidden = value.dim() == 3 and value.shape[SEQUENCE_DIM] == sum(self.sizes)
        return self._axis.leave_island(value, self.sizes) if is_hidden else value

    def own_noise(self, noise: torch.Tensor) -> torch.Tensor:
        """Return this worker's tokens of a mask."""
        return self._axis.own_shard(noise, self.sizes, SEQUENCE_DIM)

    def check_dropout(self, value: torch.Tensor) -> None:
        """Raise if dropout is applied to anything but this worker's tokens."""
        self._check_shard(value, "it applies dropout to")

    def _join(self, value: torch.Tensor) -> torch.Tensor:
        self._check_shard(value, "it returns")
        return self._axis.join_sequence(value, self.sizes)

    def _check_shard(self, value: torch.Tensor, what: str) -> None:
        if value.dim() != 3 or value.shape[SEQUENCE_DIM] != self.held:
            raise self._unknown_shape(value, what)

    def _unknown_shape(self, value: torch.Tensor, what: str) -> UsageError:
        return UsageError(
            f"sequence_parallel = true can't divide {self._name}: {what} a tensor of shape {list(value.shape)}, whose "
            f"dimension {SEQUENCE_DIM} is not the sequence; leave it out"
        )

    def _sizes_of_shard(self, held: int) -> tuple[int, ...]:
        """Return the shards of a sequence, given this worker's."""
        assert self._length is not None
        workers = self._axis.num_workers
        return shard_sizes(self._length if self._length % workers else held * workers, workers)


class _SequenceDropout(TorchFunctionMode):
    """Dropout outside of regions that draws the mask of the whole sequence and applies this worker's tokens of it."""

    def __init__(self, block: DividedBlock) -> None:
        super().__init__()
        self._block = block

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.dropout and not self._block.in_region:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or p == 0:
            return input
        self._block.check_dropout(input)
        shape = list(input.shape)
        shape[SEQUENCE_DIM] = sum(self._block.sizes)
        noise = draw_noise(shape, p, input, self._block.own_noise)
        return input.mul_(noise) if inplace else input * noise


def sizes_of_shards(length: int, workers: int, known: int | None = None) -> tuple[int, ...]:
    """Return the shards of a sequence.

    Raise where a later block that takes a shard could not tell them from it alone; ``known``: tokens of the example.
    """
    if length < 2 * workers:
        raise UsageError(
            f"sequence_parallel = true divides sequences over tensor = {workers} workers, two tokens or more for "
            f"each, not {length} tokens: leave it out, or use longer sequences"
        )
    if known is not None and length != known and (length % workers or known % workers):
        raise UsageError(
            f"sequence_parallel = true with tensor = {workers} divides sequences of {known} tokens here, or of any "
            f"multiple of {workers} if {known} is one, not {length} tokens: pad sequences to such a length"
        )
    return shard_sizes(length, workers)


def find_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the hidden states among the arguments of a module: those of this name, else the first floating tensor."""
    if isinstance(kwargs.get("hidden_states"), torch.Tensor):
        return kwargs["hidden_states"]  # type: ignore[no-any-return]
    return next((leaf for leaf in structure.tensors((args, dict(kwargs))) if leaf.is_floating_point()), None)
