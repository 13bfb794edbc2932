"""Example batches: generated from a seed at any batch size, or resized from a user's batch.

The first rows of a larger batch equal the rows of a smaller one, so that results are comparable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stagewright import structure
from stagewright.errors import UsageError
from stagewright.machine.host_memory import available_bytes
from stagewright.quantity import format_bytes
from stagewright.sample_lists import flatten_samples
from stagewright.zoo.batch_dimension import find_batch_dimension
from stagewright.zoo.list_arguments import Samples, find_samples
from stagewright.zoo.model import Batch, ImageInput, TextInput

FIRST_FREE_TOKEN = 5
"""Lower ids are special tokens (padding, begin, end, mask) in every built-in vocabulary."""


def generator(seed: int, row: int) -> torch.Generator:
    """Return the CPU generator of a row, unique for each (seed, row) pair below 2**31."""
    return torch.Generator(device="cpu").manual_seed((seed << 31) + row)


def images(inputs: ImageInput, num_classes: int, *, seed: int, dtype: torch.dtype) -> Callable[[int], Batch]:
    """Return a function that makes batches of normally distributed pixels with one class each."""
    shape: tuple[int, ...] = (inputs.channels, inputs.size, inputs.size)
    if inputs.flatten:
        shape = (inputs.channels * inputs.size * inputs.size,)

    def make(batch_size: int) -> Batch:
        rows, target = [], []
        for row in range(check_batch_size(batch_size, 4 * math.prod(shape))):
            source = generator(seed, row)
            rows.append(torch.randn(shape, generator=source, device="cpu"))
            target.append(torch.randint(num_classes, (), generator=source, device="cpu"))
        return Batch(args=(torch.stack(rows).to(dtype),), target=torch.stack(target))

    return make


def texts(
    inputs: TextInput, num_classes: int | None, *, seed: int, padded: bool = False, pad_token: int = 0
) -> Callable[[int], Batch]:
    """Return a function that makes batches of random token ids, with classes or (by default) the ids as target.

    `padded` makes rows of different lengths with an attention mask, like real sentences.
    """
    length = inputs.sequence_length

    def make(batch_size: int) -> Batch:
        rows, masks, target = [], [], []
        lowest = min(FIRST_FREE_TOKEN, inputs.vocabulary_size - 1)
        for row in range(check_batch_size(batch_size, 8 * length)):
            source = generator(seed, row)
            tokens = torch.randint(lowest, inputs.vocabulary_size, (length,), generator=source, device="cpu")
            target.append(torch.randint(num_classes or 1, (), generator=source, device="cpu"))
            used = int(torch.randint((length + 1) // 2, length + 1, (), generator=source, device="cpu"))
            mask = (torch.arange(length, device="cpu") < used).long() if padded else torch.ones_like(tokens)
            rows.append(tokens.masked_fill(mask == 0, pad_token))
            masks.append(mask)
        ids, mask = torch.stack(rows), torch.stack(masks)
        labels = torch.stack(target) if num_classes else ids.masked_fill(mask == 0, -100)
        return Batch(args=(ids,), kwargs={"attention_mask": mask} if padded else {}, target=labels)

    return make


def resized(batch: Batch, module: nn.Module) -> tuple[int, Callable[[int], Batch]]:
    """Return the size of a user's batch, and a function that resizes it by repeating or dropping samples.

    Samples are the items of some lists (``list_arguments``) and the first dimension of tensors, or the second
    (``batch_dimension``); tensors with another size there are unchanged.
    """
    samples = find_samples(batch, module, _resize)
    if samples is None:
        raise UsageError(
            "the example arguments contain no tensor with a batch dimension; let the factory return "
            "(module, args) where args is a tuple of tensors whose first dimension is the batch"
        )
    samples = find_batch_dimension(batch, samples, module, _resize)
    sample_bytes = sum(tensor.nbytes for tensor in structure.tensors((batch.args, batch.kwargs))) / samples.size

    def make(batch_size: int) -> Batch:
        if check_batch_size(batch_size, sample_bytes) == samples.size:
            return batch
        return _resize(batch, samples, batch_size)

    return samples.size, make


def _resize(batch: Batch, samples: Samples, batch_size: int) -> Batch:
    """Return a batch with another number of samples."""

    def resize(value: Any) -> Any:
        if type(value) is list:
            return [value[index % samples.size] for index in range(batch_size)]
        dim = samples.dim_of(value) if isinstance(value, torch.Tensor) else None
        if dim is None:
            return value
        rows = torch.arange(batch_size, device=value.device) % samples.size
        return value.detach().index_select(dim, rows)

    leaves, spec = flatten_samples((batch.args, batch.kwargs, batch.target), samples.lists)
    args, kwargs, target = spec.unflatten([resize(leaf) for leaf in leaves])
    return Batch(args=args, kwargs=kwargs, target=target)


def check_batch_size(batch_size: int, sample_bytes: float = 0) -> int:
    """Return `batch_size`; raise UsageError if it is not positive or does not fit in this machine's memory."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"a batch must have at least 1 sample, not {batch_size!r}")
    needed, available = batch_size * sample_bytes, available_bytes()
    if available is not None and needed > available:
        raise UsageError(
            f"a batch of {batch_size} samples takes {format_bytes(needed)}, but this machine has "
            f"{format_bytes(available)} of memory available; use a smaller batch"
        )
    return batch_size
