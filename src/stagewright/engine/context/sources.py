"""What the attention calls of a block work on: whose tokens attend, to whose, and with which masks.

    self-attention     queries, keys and values of the hidden states
    cross-attention    queries of the hidden states, keys and values of another input (an encoder's output)

Both sequences are divided, each by its own length. Masks and trained biases stay whole. A bias that a block makes
itself comes from the numbers of tokens that it sees, which are this worker's, so those are replaced by the whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stagewright.errors import UsageError

_FACTORIES = (torch.zeros, torch.ones, torch.full, torch.empty)
_SHAPINGS = (torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.expand)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The inputs that a block's attention calls work on, by their numbers among the tensors of all inputs."""

    hidden: int
    """The hidden states, whose tokens attend."""
    keys: tuple[int, ...]
    """For each attention call, in order, the input with the keys and values."""
    masks: tuple[int, ...]
    """The inputs of which attention masks are made, and nothing else."""
    makes_masks: bool
    """Whether the block makes masks or biases itself."""
    sequence_dim: int = 1
    """The dimension of tokens in hidden states, position embeddings and position numbers."""

    def lengths(self, tensors: Sequence[torch.Tensor]) -> tuple[int, tuple[int, ...]]:
        """Return the tokens of the whole sequence, and those that each attention call attends to."""
        dim = self.sequence_dim
        return tensors[self.hidden].shape[dim], tuple(tensors[key].shape[dim] for key in self.keys)


def whole_sizes(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], here: tuple[int, int], whole: tuple[int, int]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments of a function that makes or shapes positions, or a mask, for the whole sequence.

    ``here`` are the numbers of queries and keys that this worker has, ``whole`` those of the sequences.
    """
    if func is torch.arange and tuple(args[:-1]) in ((), (0,)) and args[-1:] and args[-1] in here:
        if here[0] == here[1] and whole[0] != whole[1]:
            raise UsageError(
                f"context parallelism can't tell the positions of {whole[0]} queries from those of {whole[1]} keys, "
                f"of which a worker has {here[0]} each: use other lengths, or data or pipeline parallelism"
            )
        return (*args[:-1], whole[here.index(args[-1])]), kwargs
    if func in _FACTORIES:
        if "size" in kwargs:
            return args, {**kwargs, "size": _whole(kwargs["size"], here, whole)}
        return _with_sizes(args, here, whole), kwargs
    if func in _SHAPINGS and tuple(args[0].shape[-2:]) == whole:
        return (args[0], *_with_sizes(args[1:], here, whole)), kwargs
    return args, kwargs


def _with_sizes(args: Sequence[Any], here: tuple[int, int], whole: tuple[int, int]) -> Sequence[Any]:
    """Replace sizes that are given one by one, or as the first argument."""
    if args and isinstance(args[0], Sequence):
        return (_whole(args[0], here, whole), *args[1:])
    return _whole(args, here, whole)


def _whole(sizes: Sequence[Any], here: tuple[int, int], whole: tuple[int, int]) -> Sequence[Any]:
    """Return the sizes of a mask for the whole sequence, or other sizes as they are."""
    return (*sizes[:-2], *whole) if tuple(sizes[-2:]) == here else sizes
