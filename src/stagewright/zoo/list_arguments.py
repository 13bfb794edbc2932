"""Which lists of a user's example have an item for each sample: ``model(images, targets)`` of torchvision's detectors.

- a list of dictionaries: an item for each sample;
- a list of tensors beside one: likewise; another number of items is refused;
- a list of tensors alone: samples, or tensors that each hold all samples (feature maps). The model is run with fewer
  items and with fewer rows, and what works, and changes its result, is right;
- a tuple: never divided by items.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from stagewright import structure
from stagewright.errors import UsageError
from stagewright.sample_lists import Path, items
from stagewright.zoo.model import Batch

WRAP_LISTS = (
    "wrap the model in a module that takes tensors whose first dimension is the batch (images of several sizes padded, "
    "their sizes in a tensor), and makes the lists in its forward"
)
"""What to do about a list with an item for each sample."""


class Listed(NamedTuple):
    """A list of tensors, or of dictionaries of tensors, in a batch."""

    path: Path
    name: str
    """In sentences."""
    content: list[Any]

    @property
    def has_records(self) -> bool:
        """Whether the items are dictionaries or objects."""
        return not isinstance(self.content[0], torch.Tensor)

    @property
    def rows(self) -> set[int]:
        """First dimensions of all tensors in the list."""
        return {tensor.shape[0] if tensor.ndim else 0 for tensor in structure.tensors(self.content)}

    def __str__(self) -> str:
        kind = ("dictionary of tensors", "dictionaries of tensors") if self.has_records else ("tensor", "tensors")
        return f"{self.name} is a list of {len(self.content)} {kind[len(self.content) > 1]}"


class Samples(NamedTuple):
    """Where a batch has its samples."""

    size: int
    """Number of samples."""
    lists: frozenset[Path]
    """Lists with an item for each, in ``(args, kwargs, target)``."""
    dims: tuple[int, ...] = (0,)
    """The possible batch dimensions of tensors, the likeliest first."""

    def dim_of(self, tensor: torch.Tensor) -> int | None:
        """Return the batch dimension of a tensor; None for one that has other sizes."""
        return next((dim for dim in self.dims if tensor.ndim > dim and tensor.shape[dim] == self.size), None)


Resize = Callable[[Batch, Samples, int], Batch]
"""Returns a batch with another number of samples."""


def find_samples(batch: Batch, module: nn.Module, resize: Resize) -> Samples | None:
    """Return where a batch has its samples; None if no tensor has a first dimension.

    Without lists of samples, the batch size is the first dimension of the first tensor.
    """
    inputs = tuple(batch.args), batch.kwargs
    found = list(_find_lists(inputs, ()))
    apart = {id(tensor) for listed in found for tensor in structure.tensors(listed.content)}
    outside = [tensor for tensor in structure.tensors(inputs) if id(tensor) not in apart and tensor.ndim]
    rows = outside[0].shape[0] if outside else None
    records = [listed for listed in found if listed.has_records and listed.rows != {rows}]
    if records:
        size = len(records[0].content)
        lists = found
        for listed in lists:
            if len(listed.content) != size:
                raise UsageError(
                    f"{listed}, but {records[0]}; give one item for each sample in both, or a tuple of what is not "
                    "divided by samples"
                )
    else:
        first = next((tensor for tensor in structure.tensors(inputs) if tensor.ndim), None)
        size = first.shape[0] if first is not None else 0
        lists = _try_lists(batch, found, rows, size, module, resize)
        if size and not lists:
            _reject_tuples(batch, size, module, resize)
        size = len(lists[0].content) if lists else size
    if not size:
        return None
    paths = {listed.path for listed in lists} | _target_lists(batch.target, size, listed=bool(lists))
    return Samples(size, frozenset(paths))


def _try_lists(
    batch: Batch, found: list[Listed], rows: int | None, size: int, module: nn.Module, resize: Resize
) -> list[Listed]:
    """Return the lists with an item for each sample where only the model tells: it is run."""
    num = rows if rows is not None else len(found[0].content) if found else 0
    candidates = [listed for listed in found if len(listed.content) == num]
    if not candidates:
        return []
    by_items = Samples(num, frozenset(listed.path for listed in candidates))
    by_rows = Samples(size, frozenset())
    items_work, rows_work = (_try_sizes(batch, samples, module, resize) for samples in (by_items, by_rows))
    if items_work == rows_work:
        if items_work:
            raise UsageError(
                f"{candidates[0]} whose first dimension is {size}, and the model runs with fewer items and with fewer "
                f"rows: give a tuple if each tensor holds all {size} samples; if each is one of {num}, {WRAP_LISTS}"
            )
        return []  # capture says why the model fails
    return candidates if items_work else []


def _reject_tuples(batch: Batch, size: int, module: nn.Module, resize: Resize) -> None:
    """Raise UsageError if the tensors are in tuples that the model takes with fewer items, but not with fewer rows."""
    named: dict[Path, Any] = {(0, index): value for index, value in enumerate(batch.args)}
    named |= {(1, name): value for name, value in batch.kwargs.items()}
    tuples = {path: value for path, value in named.items() if type(value) is tuple and structure.tensors(value)}
    others = [value for path, value in named.items() if path not in tuples]
    lengths = {len(value) for value in tuples.values()}
    if len(lengths) != 1 or structure.tensors(others) or _try_sizes(batch, Samples(size, frozenset()), module, resize):
        return
    args = tuple(list(value) if (0, index) in tuples else value for index, value in enumerate(batch.args))
    kwargs = {name: list(value) if (1, name) in tuples else value for name, value in batch.kwargs.items()}
    by_items = Samples(lengths.pop(), frozenset(tuples))
    if _try_sizes(Batch(args=args, kwargs=kwargs), by_items, module, resize):
        raise UsageError(
            f"{_name(next(iter(tuples)))} is a tuple of {by_items.size} items, and the model runs with fewer items, "
            f"not with a first dimension other than {size}: give a list of samples"
        )


def _try_sizes(batch: Batch, samples: Samples, module: nn.Module, resize: Resize, *, must_differ: bool = True) -> bool:
    """Whether the model runs with other numbers of samples, and its results depend on that number."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    outlines = []
    for size in (samples.size, 2 if samples.size != 2 else 3):
        try:
            with torch.random.fork_rng(devices), torch.no_grad():
                trial = resize(batch, samples, size)
                args, kwargs = structure.map_tensors(torch.clone, (trial.args, trial.kwargs))
                leaves, spec = structure.flatten(copy.deepcopy(module)(*args, **kwargs))
        except Exception:  # whatever the user's model raises
            return False
        outlines.append((spec, [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]))
    return outlines[0] != outlines[1]


def _target_lists(target: Any, size: int, *, listed: bool) -> set[Path]:
    """Return the lists of a target with an item for each sample; ``listed``: the arguments have such lists too."""
    paths = set()
    for found in _find_lists(target, (2,)):
        if len(found.content) != size:
            continue
        if found.rows == {size} and not listed and not found.has_records:
            raise UsageError(
                f"{found} whose first dimension is {size} too: give a tuple if each tensor holds all samples, or an "
                "example with another number of samples"
            )
        paths.add(found.path)
    return paths


def _find_lists(value: Any, path: Path) -> Iterator[Listed]:
    """Yield the lists of tensors, or of records with tensors, in nested containers."""
    if type(value) is list and value and (_are_tensors(value) or _are_records(value)):
        yield Listed(path, _name(path), value)
        return
    for key, item in items(value):
        yield from _find_lists(item, (*path, key))


def _are_tensors(value: list[Any]) -> bool:
    return all(isinstance(item, torch.Tensor) for item in value)


def _are_records(value: list[Any]) -> bool:
    """Whether all items are dictionaries or objects with tensors; lists and tuples are, for example, layers' states."""
    kinds = (torch.Tensor, list, tuple)
    return not any(isinstance(item, kinds) for item in value) and all(structure.tensors(item) for item in value)


def _name(path: Path) -> str:
    """Name a list in ``(args, kwargs, target)``."""
    part, *rest = path
    name = "the target"
    if part != 2:
        key, *rest = rest
        name = f"argument {key!r}"
    return name + "".join(f"[{key!r}]" for key in rest)
