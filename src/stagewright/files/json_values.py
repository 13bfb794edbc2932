"""JSON of others, and dataclasses as plain JSON values and back.

``read_object`` reads a file that anyone may have written: a wrong, huge or deeply nested one is a UsageError.
``to_json`` turns a dataclass with everything inside it into dicts and lists. ``from_json`` builds the dataclass again
and checks every value against the type of its field: missing keys take the field's default, unknown keys are ignored,
so older files stay readable.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stagewright.errors import UsageError

T = TypeVar("T")

MAX_FILE_BYTES = 256 * 2**20
"""Size above which a JSON file is refused; a profile of the largest models has a few MiB."""

_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def parse_json(content: str | bytes) -> Any:
    """Parse JSON; ValueError for anything else, also where it is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; FileNotFoundError where it is missing, UsageError for a damaged one."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise UsageError(f"{path} has {size} bytes, but at most {MAX_FILE_BYTES} are read; is it another file?")
        content = parse_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(*error.args) from None
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def read_object_or_empty(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; empty where it is missing or damaged."""
    try:
        return read_object(path)
    except (OSError, UsageError):
        return {}


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
    """Build a dataclass from a JSON object; ValueError where a value is missing or has the wrong type."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{_show(content)} is not an object")
    hints = _type_hints(cls)  # type: ignore[arg-type]
    values = {}
    for field in fields(cls):  # type: ignore[arg-type]
        if field.init and field.name in content:
            values[field.name] = _convert(hints[field.name], content[field.name], field.name)
        elif field.init and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{field.name} is missing")
    return cls(**values)


@cache
def _type_hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _convert(hint: Any, value: Any, name: str) -> Any:
    """Convert a JSON value to a field's type; ValueError where it has another type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, name)
    if origin is Literal:
        return value if isinstance(value, str | int) and value in args else _refuse(value, name, f"one of {args}")
    if is_dataclass(hint):
        # A caller may have built the value already, where its keys differ from its fields.
        return value if isinstance(value, hint) else from_json(hint, value)  # type: ignore[arg-type]
    if origin in (tuple, list):
        return _convert_list(origin, args, value, name)
    if hint is dict or origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, Mapping):
            return _refuse(value, name, "an object")
        kinds = args or (str, Any)
        return {_key(kinds[0], key): _convert(kinds[1], item, f"{name}.{key}") for key, item in value.items()}
    if hint is Path:
        return Path(_convert(str, value, name))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return _refuse(value, name, "a number")
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    return _refuse(value, name, _NAMES.get(hint, str(hint)))


def _convert_union(args: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and type(None) in args:
        return None
    kinds = [arg for arg in args if arg is not type(None)]
    for kind in kinds[:-1]:
        try:
            return _convert(kind, value, name)
        except ValueError:
            continue
    return _convert(kinds[-1], value, name)


def _convert_list(origin: Any, args: tuple[Any, ...], value: Any, name: str) -> Any:
    if not isinstance(value, list | tuple):
        return _refuse(value, name, "a list")
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        if len(args) != len(value):
            return _refuse(value, name, f"a list of {len(args)}")
        pairs = zip(args, value, strict=True)
        return tuple(_convert(arg, item, f"{name}[{index}]") for index, (arg, item) in enumerate(pairs))
    return origin(_convert(args[0], item, f"{name}[{index}]") for index, item in enumerate(value))


def _refuse(value: Any, name: str, wanted: str) -> Any:
    raise ValueError(f"{name} is {_show(value)}, not {wanted}")


def _show(value: Any) -> str:
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        shown = f"a value of type {type(value).__name__}"
    return shown if len(shown) <= 60 else shown[:57] + "…"


def _key(hint: Any, key: str) -> Any:
    """JSON keys are strings: convert those of a mapping by number."""
    return int(key) if hint is int else key
