"""Lists with an item for each sample, such as the images and targets of torchvision's detectors.

    ([image, image, …], [{"boxes": …}, {"boxes": …}, …])

Such a list is divided by items, as a tensor is along a dimension. It may be an argument, or in tuples, lists and
dictionaries.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from stagewright import structure
from stagewright.errors import UsageError
from stagewright.structure import Structure

Path: TypeAlias = tuple[Any, ...]
"""Keys and positions from the outermost container to a list."""

_CONTAINERS = (tuple, list, dict)


def find_sample_lists(value: Any, other: Any) -> frozenset[Path]:
    """Return where two batches of different sizes have lists of different lengths."""
    if type(value) is not type(other) or type(value) not in _CONTAINERS:
        return frozenset()
    if type(value) is list and len(value) != len(other):
        return frozenset({()})
    pairs = [(key, item, other[key]) for key, item in items(value) if _has(other, key)]
    return frozenset((key, *path) for key, item, counterpart in pairs for path in find_sample_lists(item, counterpart))


def flatten_samples(value: Any, lists: Collection[Path]) -> tuple[list[Any], Structure]:
    """Return the leaves of a value and its structure; each of these lists is one leaf."""
    if not lists:
        return structure.flatten(value)
    held: dict[int, Any] = {}
    placeholders = []  # alive, so that no other leaf has the identity of one
    for path in lists:
        found = at_path(value, path)
        if type(found) is not list:
            continue  # the caller compares the leaves with those of the example
        placeholder = object()
        placeholders.append(placeholder)
        held[id(placeholder)] = found
        value = replaced(value, path, placeholder)
    leaves, spec = structure.flatten(value)
    return [held.get(id(leaf), leaf) for leaf in leaves], spec


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDims:
    """Where the samples of a batch are, for every batch of the same structure."""

    dims: tuple[int | None, ...]
    """The batch dimension of each leaf; 0 for a list of samples, None for a leaf without one."""
    lists: frozenset[Path] = frozenset()
    """Lists with an item for each sample, each of which is one leaf."""

    @classmethod
    def find(cls, example: Any, other: Any) -> BatchDims:
        """Compare two examples with different batch sizes."""
        lists = find_sample_lists(example, other)
        (leaves, spec), (other_leaves, other_spec) = (flatten_samples(value, lists) for value in (example, other))
        if spec != other_spec:
            raise UsageError(f"two example batches differ in structure: {spec} and {other_spec}")
        return cls(dims=tuple(map(_differing_dim, leaves, other_leaves)), lists=lists)

    def flatten(self, value: Any) -> tuple[list[Any], Structure]:
        """Return the leaves of a batch and its structure; raise UsageError if it has others than the examples."""
        leaves, spec = flatten_samples(value, self.lists)
        if len(leaves) != len(self.dims):
            raise UsageError(
                f"the batch has {len(leaves)} values, the example had {len(self.dims)}; give it the same structure"
            )
        return leaves, spec

    def count(self, value: Any) -> int | None:
        """Return the number of samples in a batch; None if nothing in it tells."""
        for leaf, dim in zip(self.flatten(value)[0], self.dims, strict=True):
            if dim is not None:
                return len(leaf) if isinstance(leaf, list) else int(leaf.shape[dim])
        return None


def _differing_dim(leaf: Any, other: Any) -> int | None:
    if type(leaf) is list and type(other) is list:
        return 0
    if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor) or leaf.ndim != other.ndim:
        return None
    return next((dim for dim in range(leaf.ndim) if leaf.shape[dim] != other.shape[dim]), None)


def items(value: Any) -> list[tuple[Any, Any]]:
    """Return the keys, or positions, and the items of a plain container; none of anything else."""
    if type(value) is dict:
        return list(value.items())
    return list(enumerate(value)) if type(value) in (tuple, list) else []


def at_path(value: Any, path: Path) -> Any:
    """Return what is at a path; None if there is nothing."""
    for key in path:
        if not _has(value, key):
            return None
        value = value[key]
    return value


def replaced(value: Any, path: Path, new: Any) -> Any:
    """Return a copy of nested containers with another value at a path."""
    if not path:
        return new
    key, *rest = path
    changed = {**dict(items(value)), key: replaced(value[key], tuple(rest), new)}
    return changed if type(value) is dict else type(value)(changed.values())


def _has(value: Any, key: Any) -> bool:
    return any(key == known for known, _ in items(value))
