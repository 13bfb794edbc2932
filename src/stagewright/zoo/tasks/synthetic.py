"""Synthetic samples with a learnable rule, in the format of a model.

images        a coarse pattern of 4 x 4 patches for each class, plus noise
texts         the second token is the class, the others are noise
next token    arithmetic sequences over 64 tokens: start and step are random, the rest follows
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from stagewright.errors import UsageError
from stagewright.zoo.example import FIRST_FREE_TOKEN, generator
from stagewright.zoo.model import Batch, ImageInput, Model, ModelInput, TextInput
from stagewright.zoo.tasks.samples import Samples

NUM_TRAIN, NUM_TEST = 1024, 256
NUM_SEQUENCE_TOKENS = 64


class Synthetic(Samples):
    """One split; sample i depends only on the seed and i."""

    def __init__(self, split: str, model: Model, inputs: ModelInput, seed: int, dtype: torch.dtype) -> None:
        self._inputs = inputs
        self._seed = seed
        self._first_row = 0 if split == "train" else NUM_TRAIN
        self._dtype = dtype
        self._next_token = model.objective == "next-token"
        num_classes = model.num_classes or 1
        num_samples = NUM_TRAIN if split == "train" else NUM_TEST
        self.labels = np.random.default_rng([seed, self._first_row]).integers(num_classes, size=num_samples)
        self._lowest = FIRST_FREE_TOKEN
        if isinstance(inputs, TextInput):
            needed = FIRST_FREE_TOKEN + max(num_classes, NUM_SEQUENCE_TOKENS)
            if inputs.vocabulary_size < needed or inputs.sequence_length < 2:
                raise UsageError(
                    f"synthetic texts need {needed} tokens and 2 positions; the model {model.name!r} has "
                    f"{inputs.vocabulary_size} and {inputs.sequence_length}"
                )
        else:
            shape = (num_classes, inputs.channels, 4, 4)
            self._patterns = torch.randn(shape, generator=generator(seed, 2**31 - 1), device="cpu")

    def batch(self, indices: Sequence[int]) -> Batch:
        """Generate the samples at `indices`."""
        classes = torch.from_numpy(self.labels[list(indices)].astype(np.int64))
        if isinstance(self._inputs, ImageInput):
            rows = torch.stack([self._image(index, self._inputs) for index in indices])
            return Batch(args=(rows.to(self._dtype),), target=classes)
        if self._next_token:
            ids = torch.stack([self._sequence(index, self._inputs) for index in indices])
            return Batch(args=(ids,), target=ids)
        return Batch(args=(torch.stack([self._text(index, self._inputs) for index in indices]),), target=classes)

    def _image(self, index: int, inputs: ImageInput) -> torch.Tensor:
        size = (inputs.channels, inputs.size, inputs.size)
        noise = torch.randn(size, generator=generator(self._seed, self._first_row + index), device="cpu")
        pattern = self._patterns[int(self.labels[index])]
        image = noise + functional.interpolate(pattern[None], size=inputs.size)[0]
        return image.flatten() if inputs.flatten else image

    def _text(self, index: int, inputs: TextInput) -> torch.Tensor:
        source = generator(self._seed, self._first_row + index)
        shape = (inputs.sequence_length,)
        ids = torch.randint(self._lowest, inputs.vocabulary_size, shape, generator=source, device="cpu")
        ids[1] = self._lowest + int(self.labels[index])
        return ids

    def _sequence(self, index: int, inputs: TextInput) -> torch.Tensor:
        source = generator(self._seed, self._first_row + index)
        start, step = torch.randint(1, NUM_SEQUENCE_TOKENS, (2,), generator=source, device="cpu").tolist()
        positions = torch.arange(inputs.sequence_length, device="cpu")
        return torch.remainder(start + step * positions, NUM_SEQUENCE_TOKENS) + self._lowest
