"""Dataclasses as plain JSON values, and back.

``to_json`` turns a dataclass with everything inside it into dicts and lists. ``from_json`` builds the dataclass again
from its field types: missing keys take the field's default, unknown keys are ignored, so older files stay readable.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Convert a value to what ``json.dumps`` accepts: dataclasses and mappings to dicts, sequences to lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_json(cls: type[T], content: Mapping[str, Any]) -> T:
    """Build a dataclass from a JSON object; TypeError where a field without a default is missing."""
    hints = _type_hints(cls)  # type: ignore[arg-type]
    known = [field.name for field in fields(cls) if field.init and field.name in content]  # type: ignore[arg-type]
    return cls(**{name: _convert(hints[name], content[name]) for name in known})


@cache
def _type_hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _convert(hint: Any, value: Any) -> Any:
    """Convert a JSON value to a field's type; values that need no conversion are returned as they are."""
    if value is None:
        return None
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert(next(arg for arg in args if arg is not type(None)), value)
    if is_dataclass(hint) and isinstance(value, Mapping):
        return from_json(hint, value)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list | tuple):
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_convert(args[0], item) for item in value)
        return tuple(_convert(arg, item) for arg, item in zip(args, value, strict=True))
    if origin is list and isinstance(value, list | tuple):
        return [_convert(args[0], item) for item in value]
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {_key(args[0], key): _convert(args[1], item) for key, item in value.items()}
    if hint is Path:
        return Path(value)
    return float(value) if hint is float and isinstance(value, int) else value


def _key(hint: Any, key: str) -> Any:
    """JSON keys are strings: convert those of a mapping by number."""
    return int(key) if hint is int else key
