"""Check flattened inputs against those of the example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stagewright.errors import UsageError
from stagewright.graph.symbolic_shapes import is_constant


def check_input(index: int, leaf: Any, example: Any) -> None:
    """Check one input against the traced one: only the batch size may differ."""
    if not isinstance(example, torch.Tensor):
        if type(leaf) is not type(example) or leaf != example:
            raise UsageError(
                f"input {index} was {example!r} at capture but is {leaf!r} now; capture again with the new value"
            )
        return
    if not isinstance(leaf, torch.Tensor):
        raise UsageError(f"input {index} was a tensor at capture but is {type(leaf).__name__} now")
    shape = [int(size) if is_constant(size) else "batch" for size in example.shape]
    matches = leaf.ndim == len(shape) and all(
        expected in ("batch", size) for size, expected in zip(leaf.shape, shape, strict=True)
    )
    if not matches or leaf.dtype != example.dtype:
        raise UsageError(
            f"input {index} has shape {list(leaf.shape)} and dtype {leaf.dtype}, but the graph was captured for "
            f"{shape} and {example.dtype}; capture again with an example of the new shape"
        )


def outline(leaves: Sequence[Any]) -> str:
    """Describe flat arguments for an error message."""
    parts = [f"tensor{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return "(" + ", ".join(parts) + ")"
