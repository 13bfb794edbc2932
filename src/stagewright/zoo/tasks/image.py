"""Images as a model takes them: decoded, resized and normalised when a batch asks for them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from stagewright.errors import UsageError
from stagewright.zoo.model import Batch, ImageInput
from stagewright.zoo.tasks.samples import Samples


class Pictures(Samples):
    """Images that `picture(index)` gives one by one; nothing is kept decoded."""

    def __init__(
        self,
        picture: Callable[[int], Image.Image],
        labels: NDArray[Any],
        inputs: ImageInput,
        dtype: torch.dtype,
    ) -> None:
        self.labels = labels
        self._picture = picture
        self._inputs = inputs
        self._dtype = dtype

    def batch(self, indices: Sequence[int]) -> Batch:
        """Pixels of shape (batch, channels, size, size), or flat, and a class for each."""
        pixels = np.stack([prepared(self._picture(one), self._inputs) for one in indices])
        target = torch.from_numpy(self.labels[list(indices)].astype(np.int64))
        return Batch(args=(torch.from_numpy(pixels).to(self._dtype),), target=target)


def prepared(picture: Image.Image, inputs: ImageInput) -> NDArray[np.float32]:
    """One image in the form of `inputs`."""
    modes = {1: "L", 3: "RGB"}
    if inputs.channels not in modes:
        raise UsageError(f"images have 1 or 3 channels, but the model takes {inputs.channels}")
    picture = picture.convert(modes[inputs.channels])
    if picture.size != (inputs.size, inputs.size):
        picture = picture.resize((inputs.size, inputs.size), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture, dtype=np.float32) / 255
    mean, std = np.asarray(inputs.mean, dtype=np.float32), np.asarray(inputs.std, dtype=np.float32)
    pixels = (pixels.reshape(inputs.size, inputs.size, inputs.channels) - mean) / std
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)
    return planes.reshape(-1) if inputs.flatten else planes


def from_table(table: Any, column: str, inputs: ImageInput, dtype: torch.dtype) -> Pictures:
    """The images of a pyarrow table whose column holds encoded files."""
    encoded = table.column(column)

    def picture(index: int) -> Image.Image:
        cell = encoded[index].as_py()
        try:
            return Image.open(io.BytesIO(cell["bytes"]))
        except (UnidentifiedImageError, KeyError, TypeError) as error:
            raise UsageError(f"row {index} of the column {column!r} holds no image file") from error

    return Pictures(picture, table.column("label").to_numpy(), inputs, dtype)


def digits(split: str, inputs: ImageInput, dtype: torch.dtype) -> Pictures:
    """scikit-learn's digits, a fifth of each class for the test split, always the same."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found = load_digits()
    everything = np.arange(len(found.target))
    train, test = train_test_split(everything, test_size=0.2, random_state=0, stratify=found.target)
    chosen = train if split == "train" else test
    images = np.round(found.images[chosen] * (255 / 16)).astype(np.uint8)
    return Pictures(lambda index: Image.fromarray(images[index]), found.target[chosen], inputs, dtype)
