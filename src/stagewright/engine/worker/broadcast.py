"""Broadcast many tensors from one worker in few collectives, and gather tensors of different lengths.

A broadcast costs about a millisecond before its first byte, and a model has hundreds of small tensors. Consecutive
small tensors travel in one bucket, each aligned for any dtype; large ones travel alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

BUCKET_BYTES = 4 * 2**20  # maximum size of a bucket, which is also the extra memory it needs
_ALIGN_BYTES = 16  # of the widest dtype


def broadcast(
    tensors: Iterable[torch.Tensor], device: torch.device, *, group: Any = None, source: int = 0
) -> Iterator[torch.Tensor]:
    """Yield the tensors of a group's worker ``source``, one by one, on the device of each worker.

    Every worker passes the same number of tensors with the same shapes and dtypes; those of the other workers are not
    read and may be overwritten.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        yield from (tensor.detach().to(device) for tensor in tensors)
        return
    bucket: list[torch.Tensor] = []
    bucket_bytes = 0
    for tensor in tensors:
        size = _padded(tensor)
        if bucket_bytes + size > BUCKET_BYTES:
            yield from _send(bucket, device, group, source)
            bucket, bucket_bytes = [], 0
        bucket.append(tensor)
        bucket_bytes += size
        del tensor  # do not hold it while the next is created
        if bucket_bytes > BUCKET_BYTES:
            yield from _send(bucket, device, group, source)
            bucket, bucket_bytes = [], 0
    yield from _send(bucket, device, group, source)


def gather_ragged(local: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Gather one tensor per worker, in rank order, on the host; lengths of the last dimension may differ."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [local.cpu()]
    num_workers, length = dist.get_world_size(), local.shape[-1]
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(num_workers)]
    dist.all_gather(sizes, torch.tensor([length], device=device))
    lengths = [int(size) for size in sizes]
    padded = torch.zeros((*local.shape[:-1], max(lengths)), dtype=local.dtype, device=device)
    padded[..., :length] = local
    gathered = [torch.empty_like(padded) for _ in range(num_workers)]
    dist.all_gather(gathered, padded)
    return [tensor[..., :size].cpu() for tensor, size in zip(gathered, lengths, strict=True)]


def gather_text(text: str, device: torch.device) -> list[str]:
    """Gather one text per worker, in rank order."""
    rows = gather_ragged(torch.tensor(list(text.encode()), dtype=torch.uint8), device)
    return [bytes(row.tolist()).decode() for row in rows]


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES


def _send(bucket: list[torch.Tensor], device: torch.device, group: Any, source: int) -> Iterator[torch.Tensor]:
    """Broadcast a bucket; a single tensor is received in place where possible."""
    if len(bucket) == 1:
        single = bucket.pop().detach().to(device).contiguous()
        if single.numel():
            dist.broadcast(_bytes_of(single), group=group, group_src=source)
        yield single
        return
    packed = torch.zeros(sum(map(_padded, bucket)), dtype=torch.uint8, device=device)
    slices, start = [], 0
    is_source = dist.get_rank(group) == source
    for tensor in bucket:
        end = start + tensor.numel() * tensor.element_size()
        slices.append(packed[start:end])
        if is_source:
            slices[-1].copy_(_bytes_of(tensor.detach().contiguous()))
        start += _padded(tensor)
    if packed.numel():
        dist.broadcast(packed, group=group, group_src=source)
    for tensor, part in zip(bucket, slices, strict=True):
        yield part.view(tensor.dtype).view(tensor.shape)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
