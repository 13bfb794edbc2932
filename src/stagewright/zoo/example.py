"""Example batches: generated from a seed at any batch size, or resized from a user's batch.

The first rows of a larger batch equal the rows of a smaller one, so that results are comparable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from stagewright import structure
from stagewright.errors import UsageError
from stagewright.machine.host_memory import available_bytes
from stagewright.quantity import format_bytes
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


def resized(batch: Batch) -> tuple[int, Callable[[int], Batch]]:
    """Return the size of a user's batch, and a function that resizes it by repeating or dropping rows.

    The batch size is the first dimension of the first tensor; tensors with another first dimension are unchanged.
    """
    _reject_lists_of_samples(batch)
    tensors = structure.tensors((batch.args, batch.kwargs))
    size = next((tensor.shape[0] for tensor in tensors if tensor.dim() > 0), 0)
    if size == 0:
        raise UsageError(
            "the example arguments contain no tensor with a batch dimension; let the factory return "
            "(module, args) where args is a tuple of tensors whose first dimension is the batch"
        )

    def make(batch_size: int) -> Batch:
        if check_batch_size(batch_size, sum(tensor.nbytes for tensor in tensors) / size) == size:
            return batch

        def resize(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != size:
                return value
            rows = torch.arange(batch_size, device=value.device) % size
            return value.detach().index_select(0, rows)

        args, kwargs, target = structure.map_leaves(resize, (batch.args, batch.kwargs, batch.target))
        return Batch(args=args, kwargs=kwargs, target=target)

    return size, make


WRAP_LISTS = (
    "wrap the model in a module that takes tensors whose first dimension is the batch (images of several sizes padded, "
    "their sizes in a tensor), and makes the lists in its forward"
)
"""What to do about a list with an item for each sample."""


def _reject_lists_of_samples(batch: Batch) -> None:
    """Reject a list with a dictionary of tensors for each sample, as the targets of torchvision's detectors.

    The first dimension of such tensors counts boxes or channels, not samples.
    """
    arguments = [*((f"argument {index}", value) for index, value in enumerate(batch.args))]
    arguments += [(f"argument {name!r}", value) for name, value in batch.kwargs.items()]
    for name, value in arguments:
        if (
            isinstance(value, list)
            and value
            and all(isinstance(item, dict) and structure.tensors(item) for item in value)
        ):
            raise UsageError(
                f"{name} is a list of {len(value)} dictionaries of tensors, one for each sample, but a batch is split "
                f"along a dimension of tensors; {WRAP_LISTS}"
            )


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
