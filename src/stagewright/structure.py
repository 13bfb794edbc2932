"""Flatten any Python value into its tensors and other leaves, and rebuild it.

Tuples, lists, dictionaries and classes registered with ``torch.utils._pytree`` are flattened as torch does. Any other
object that contains tensors is taken apart into its items and attributes: dataclasses and attrs classes (frozen, with
slots), subclasses of list, tuple and dict (also those that refuse changes), plain objects. It is rebuilt without its
constructor, so nothing that the constructor checks or derives runs again. An object without tensors is one leaf.

An object that contains tensors and can't be taken apart (a module, a set, a generator, an object that contains itself)
stays one leaf; ``find_tensor`` says where in it the first tensor is.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_TRACED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.Generator)
_BASES: tuple[type, ...] = (defaultdict, OrderedDict, dict, list, tuple)
"""Containers whose subclasses are taken apart, the most derived first."""
_MAX_DEPTH = 12


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """How to rebuild an object that pytree does not know: its class, its items and the names of its attributes."""

    object_class: type
    base: type
    """The built-in container that the class is derived from, or ``object``."""
    num_items: int
    """Items of a list or tuple."""
    keys: tuple[Any, ...]
    """Keys of a dictionary."""
    names: tuple[str, ...]
    """Names of the attributes."""

    def rebuild(self, parts: Sequence[Any]) -> Any:
        """Create the object from its items and attributes."""
        num_items = self.num_items or len(self.keys)
        items, attributes = parts[:num_items], parts[num_items:]
        if self.object_class is torch.Size:
            return torch.Size(items)
        create: Any = self.base.__new__
        value = create(self.object_class, items) if self.base is tuple else create(self.object_class)
        base: Any = self.base
        if base is list:
            base.extend(value, items)
        for key, item in zip(self.keys, items, strict=False):
            base.__setitem__(value, key, item)
        for name, attribute in zip(self.names, attributes, strict=True):
            object.__setattr__(value, name, attribute)
        return value


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure of a value without its leaves."""

    node: Any = None
    """``None`` for a leaf, an ``ObjectLayout``, or pytree's specification of one level."""
    children: tuple[Structure, ...] = ()
    num_leaves: int = 1

    @property
    def is_leaf(self) -> bool:
        """Whether the value is a single leaf."""
        return self.node is None

    @property
    def is_builtin(self) -> bool:
        """Whether the value consists of plain tuples, lists and dictionaries only."""
        return self.is_leaf or (self.container in (tuple, list, dict) and all(map(_is_builtin, self.children)))

    @property
    def container(self) -> Any:
        """The type of the outermost container, ``None`` for a leaf."""
        return self.node.object_class if isinstance(self.node, ObjectLayout) else getattr(self.node, "type", None)

    @property
    def keys(self) -> list[Any]:
        """How to index each child: positions of a tuple or list, keys of a dictionary."""
        return list(self.node.context) if self.container is dict else list(range(len(self.children)))

    def paths(self) -> list[str]:
        """Return the path to each leaf: ``[0]['mask'].values``."""
        if self.is_leaf:
            return [""]
        if isinstance(self.node, ObjectLayout):
            items = [f"[{key!r}]" for key in self.node.keys] or [f"[{index}]" for index in range(self.node.num_items)]
            steps = [*items, *(f".{name}" for name in self.node.names)]
        else:
            steps = [f"[{key!r}]" for key in self.keys]
        return [step + rest for step, child in zip(steps, self.children, strict=True) for rest in child.paths()]

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Rebuild a value from its leaves."""
        if self.is_leaf:
            return leaves[0]
        parts, start = [], 0
        for child in self.children:
            parts.append(child.unflatten(leaves[start : start + child.num_leaves]))
            start += child.num_leaves
        if isinstance(self.node, ObjectLayout):
            return self.node.rebuild(parts)
        return pytree.tree_unflatten(parts, self.node)


_LEAF = Structure()


def flatten(value: Any, *, records: bool = False) -> tuple[list[Any], Structure]:
    """Return the leaves of a value, in order, and its structure.

    With ``records``, dataclasses, attrs classes and subclasses of containers are taken apart even without tensors.
    """
    found: list[Any] = []
    return found, _flatten(value, found, (), records)


def leaves(value: Any, *, records: bool = False) -> list[Any]:
    """Return the leaves of a value, in order."""
    return flatten(value, records=records)[0]


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Rebuild a value with each leaf replaced by ``function(leaf)``."""
    found, structure = flatten(value)
    return structure.unflatten([function(leaf) for leaf in found])


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Rebuild a value with each tensor replaced by ``function(tensor)``."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def find_tensor(value: Any) -> str | None:
    """Return the path to the first tensor in a value (``.state['mask']``), ``None`` if there is none."""
    return _find_tensor(value, (), 0)


def find_change(value: Any, before: Sequence[Any], structure: Structure) -> str | None:
    """Return the path to the first object in a value that was changed since it was flattened, ``None`` if none was.

    Only changes of objects count (an attribute that was set, an item that was added to a cache), not those of plain
    lists and dictionaries, nor values written into tensors.
    """
    if structure.is_builtin and all(isinstance(leaf, (*_TRACED, *_PLAIN)) for leaf in before):
        return None  # the most common case, without an object
    if structure.is_leaf:
        has_changed = not isinstance(before[0], (*_TRACED, *_PLAIN)) and find_tensor(value) is not None
        return "" if has_changed and value is before[0] and not isinstance(value, nn.Module) else None
    found, current = flatten(value)
    if isinstance(structure.node, ObjectLayout):
        parts = dict(_parts(value))
        if current.node != structure.node:
            keys = [f"[{key!r}]" for key in structure.node.keys]
            known = {*keys, *(f"[{index}]" for index in range(structure.node.num_items))}
            known |= {f".{name}" for name in structure.node.names}
            return next((path for path in parts if path not in known), "")
        paths = list(parts)
        if current == structure:
            pairs = zip(found, before, strict=True)
            if all(new is old or (isinstance(old, _PLAIN) and new == old) for new, old in pairs):
                return None
    elif current.node != structure.node:
        return None
    else:
        paths = [f"[{key!r}]" for key in structure.keys]
    start = 0
    for path, child, part in zip(paths, structure.children, _children(value), strict=True):
        leaves_before = before[start : start + child.num_leaves]
        start += child.num_leaves
        if isinstance(structure.node, ObjectLayout) and child.is_leaf and part is not leaves_before[0]:
            return path
        rest = find_change(part, leaves_before, child)
        if rest is not None:
            return path + rest
    return None


def _children(value: Any) -> list[Any]:
    """Return the parts into which one level of a value is flattened."""
    parts, node = _flatten_level(value)
    return _take_apart(value, records=False)[0] if node.is_leaf() else parts


def _flatten_level(value: Any) -> tuple[list[Any], Any]:
    """Flatten one level of a value as pytree does.

    pytree leaves a reference cycle through ``is_leaf`` behind. It must not hold the value: tensors with their autograd
    graphs would live until the garbage collector runs.
    """
    holder = [value]
    parts, node = pytree.tree_flatten(value, is_leaf=lambda item: item is not holder[0])
    holder.clear()
    return parts, node


def _flatten(value: Any, found: list[Any], parents: tuple[int, ...], records: bool) -> Structure:
    if isinstance(value, (*_TRACED, *_PLAIN)) or id(value) in parents:
        found.append(value)
        return _LEAF
    parts, node = _flatten_level(value)
    if node.is_leaf():
        parts, node = _take_apart(value, records)
        if node is None:
            found.append(value)
            return _LEAF
    children = tuple(_flatten(part, found, (*parents, id(value)), records) for part in parts)
    return Structure(node, children, sum(child.num_leaves for child in children))


def _take_apart(value: Any, records: bool) -> tuple[list[Any], Any]:
    """Return the items and attributes of an object that contains tensors, with its layout, or ``None`` for a leaf."""
    if isinstance(value, (nn.Module, set, frozenset, Enum, *_OPAQUE)):
        return [], None
    if (find_tensor(value) is None and not (records and _is_record(value))) or _is_cyclic(value):
        return [], None
    kind = type(value)
    base = next((base for base in _BASES if isinstance(value, base)), object)
    if base is object:
        try:
            object.__new__(kind)
        except TypeError:  # implemented in C, with a state of its own
            return [], None
    keys = tuple(dict.keys(value)) if isinstance(value, dict) else ()
    items = [dict.__getitem__(value, key) for key in keys]
    if isinstance(value, (list, tuple)):
        items = list(value)
    attributes = dict(_attributes(value))
    layout = ObjectLayout(kind, base, 0 if keys else len(items), keys, tuple(attributes))
    return [*items, *attributes.values()], layout


def _is_record(value: Any) -> bool:
    return is_dataclass(value) or hasattr(value, "__attrs_attrs__") or isinstance(value, _BASES)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Return the attributes of an object that are set, in its dictionary and its slots."""
    if isinstance(value, defaultdict):
        yield "default_factory", value.default_factory
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{owner.__name__.lstrip('_')}{slot}" if private else slot
            if slot not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
    yield from getattr(value, "__dict__", {}).items()


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Return what an object consists of, each part with its path."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", dict.__getitem__(value, key)) for key in dict.keys(value))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    yield from ((f".{name}", attribute) for name, attribute in _attributes(value))


def _find_tensor(value: Any, parents: tuple[int, ...], depth: int) -> str | None:
    if isinstance(value, _TRACED):
        return ""
    if isinstance(value, (*_PLAIN, *_OPAQUE)) or id(value) in parents or depth > _MAX_DEPTH:
        return None
    for path, part in _parts(value):
        rest = _find_tensor(part, (*parents, id(value)), depth + 1)
        if rest is not None:
            return path + rest
    return None


def _is_cyclic(value: Any, parents: tuple[int, ...] = ()) -> bool:
    """Whether an object contains itself, in a part that has tensors."""
    if isinstance(value, (*_TRACED, *_PLAIN, *_OPAQUE, nn.Module)):
        return False
    if id(value) in parents:
        return True
    return any(_is_cyclic(part, (*parents, id(value))) for _, part in _parts(value))


def _is_builtin(structure: Structure) -> bool:
    return structure.is_builtin
