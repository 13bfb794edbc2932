"""Image data sets: decoded, resized and normalized when a batch is requested."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from stagewright.errors import UsageError
from stagewright.extras import require
from stagewright.zoo.model import Batch, ImageInput
from stagewright.zoo.tasks.samples import Samples

if TYPE_CHECKING:
    from PIL import Image


class ImageSamples(Samples):
    """Images that `load_image(index)` decodes on request; nothing decoded stays in memory."""

    def __init__(
        self, load_image: Callable[[int], Image.Image], labels: NDArray[Any], inputs: ImageInput, dtype: torch.dtype
    ) -> None:
        self.labels = labels
        self._load_image = load_image
        self._inputs = inputs
        self._dtype = dtype

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return pixels of shape (batch, channels, size, size), or flat, and their classes."""
        pixels = np.stack([prepare_image(self._load_image(index), self._inputs) for index in indices])
        target = torch.from_numpy(self.labels[list(indices)].astype(np.int64))
        return Batch(args=(torch.from_numpy(pixels).to(self._dtype),), target=target)


def prepare_image(image: Image.Image, inputs: ImageInput) -> NDArray[np.float32]:
    """Convert, resize and normalize an image for `inputs`."""
    modes = {1: "L", 3: "RGB"}
    if inputs.channels not in modes:
        raise UsageError(f"images have 1 or 3 channels, but the model takes {inputs.channels}")
    from PIL import Image

    image = image.convert(modes[inputs.channels])
    if image.size != (inputs.size, inputs.size):
        image = image.resize((inputs.size, inputs.size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.float32) / 255
    mean, std = np.asarray(inputs.mean, dtype=np.float32), np.asarray(inputs.std, dtype=np.float32)
    pixels = (pixels.reshape(inputs.size, inputs.size, inputs.channels) - mean) / std
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)
    return planes.reshape(-1) if inputs.flatten else planes


def from_table(table: Any, column: str, inputs: ImageInput, dtype: torch.dtype) -> ImageSamples:
    """Return the images of a pyarrow table with a column of encoded files."""
    require("PIL")
    from PIL import Image, UnidentifiedImageError

    encoded = table.column(column)

    def load_image(index: int) -> Image.Image:
        cell = encoded[index].as_py()
        try:
            return Image.open(io.BytesIO(cell["bytes"]))
        except (UnidentifiedImageError, KeyError, TypeError) as error:
            raise UsageError(f"row {index} of the column {column!r} is not an image file") from error

    return ImageSamples(load_image, table.column("label").to_numpy(), inputs, dtype)


def digits(split: str, inputs: ImageInput, dtype: torch.dtype) -> ImageSamples:
    """Return scikit-learn's digits; a fixed fifth of each class is the test split."""
    require("sklearn")
    require("PIL")
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    indices = np.arange(len(data.target))
    train, test = train_test_split(indices, test_size=0.2, random_state=0, stratify=data.target)
    selected = train if split == "train" else test
    images = np.round(data.images[selected] * (255 / 16)).astype(np.uint8)
    return ImageSamples(lambda index: Image.fromarray(images[index]), data.target[selected], inputs, dtype)
