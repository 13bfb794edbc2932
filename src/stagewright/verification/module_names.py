"""Modules of a model under the names that the plain model has, without the wrappers of DDP, FSDP and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from torch import nn

Names: TypeAlias = Mapping[str, str] | Callable[[str], str] | str | None

# Class of a wrapper → the attribute with the wrapped module.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers."""
    while (
        attribute := next((_WRAPPERS[c.__name__] for c in type(module).__mro__ if c.__name__ in _WRAPPERS), None)
    ) and (isinstance(inner := getattr(module, attribute, None), nn.Module)):
        module = inner
    return module


def find_wrapper(module: nn.Module, name: str) -> nn.Module | None:
    """Return the first wrapper of a class among a model's modules."""
    return next((inner for inner in module.modules() if any(c.__name__ == name for c in type(inner).__mro__)), None)


def plain_modules(model: nn.Module, names: Names = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once with its name in the plain model, parents before their children.

    ``names`` maps names of a pipeline stage to those of the model: a prefix, a function, or a mapping of leading names
    (``{"0": "3"}`` maps ``0.attn`` to ``3.attn``).
    """
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        module = unwrap(module)
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(child, f"{name}.{child_name}" if name else child_name)

    for name, module in walk(model, ""):
        yield map_name(name, names), module


def map_name(name: str, names: Names) -> str:
    """Return a name in the plain model; the root of a pipeline stage keeps the empty name."""
    if names is None or not name:
        return name
    if callable(names):
        return names(name)
    if isinstance(names, str):
        return f"{names}.{name}" if names else name
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        head = ".".join(parts[:length])
        if head in names:
            return ".".join([names[head], *parts[length:]])
    return name
