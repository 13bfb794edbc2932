"""From one worker to all: many tensors in few messages.

A message costs about a millisecond before its first byte, and a model has hundreds of tensors of a few bytes. Small
ones that follow each other travel as one piece, each from a byte on where any dtype may begin; large ones travel alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["broadcast"]

PIECE_BYTES = 4 * 2**20  # what a piece holds at most, and what memory it takes beside its tensors
_STEP_BYTES = 16  # of the widest dtype


def broadcast(
    tensors: Iterable[torch.Tensor], device: torch.device, *, group: Any = None, source: int = 0
) -> Iterator[torch.Tensor]:
    """The tensors of a group's worker `source`, one after the other, on the device of each worker.

    Every worker gives as many of the same shapes and dtypes; those of the others are not read, and may be written over.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        yield from (one.detach().to(device) for one in tensors)
        return
    piece: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        size = _padded(tensor)
        if held + size > PIECE_BYTES:
            yield from _sent(piece, device, group, source)
            piece, held = [], 0
        piece.append(tensor)
        held += size
        del tensor  # not to be held beside the next
        if held > PIECE_BYTES:
            yield from _sent(piece, device, group, source)
            piece, held = [], 0
    yield from _sent(piece, device, group, source)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _STEP_BYTES) * _STEP_BYTES


def _sent(piece: list[torch.Tensor], device: torch.device, group: Any, source: int) -> Iterator[torch.Tensor]:
    """A tensor alone is written over in place where it can be."""
    if len(piece) == 1:
        alone = piece.pop().detach().to(device).contiguous()
        if alone.numel():
            dist.broadcast(_bytes_of(alone), group=group, group_src=source)
        yield alone
        return
    packed = torch.zeros(sum(map(_padded, piece)), dtype=torch.uint8, device=device)
    places, at = [], 0
    is_source = dist.get_rank(group) == source
    for tensor in piece:
        end = at + tensor.numel() * tensor.element_size()
        places.append(packed[at:end])
        if is_source:
            places[-1].copy_(_bytes_of(tensor.detach().contiguous()))
        at += _padded(tensor)
    if packed.numel():
        dist.broadcast(packed, group=group, group_src=source)
    for tensor, place in zip(piece, places, strict=True):
        yield place.view(tensor.dtype).view(tensor.shape)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
