"""Strict TOML for files that users write: unknown keys, wrong types and missing keys are errors in one sentence.

    read_table(table, {"batch": integer, "memory": size}, where="plan.toml")
        → the keys that are present, each read by its reader; missing keys take the default of their field

A reader takes a value and its position in the file. The writer supports what the readers read: plain values, tables and
arrays of tables.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from stagewright.errors import UnknownName, UsageError
from stagewright.quantity import parse_bytes, parse_rate, parse_s

MAX_FILE_BYTES = 8 * 2**20
"""Size above which a TOML file is refused."""

Reader: TypeAlias = Callable[[object, str], Any]


def load_toml(path: str | Path) -> dict[str, Any]:
    """Load a file; errors name the file and the line."""
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; name a TOML file in it, like {Path(path) / 'plan.toml'}")
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise UsageError(f"{path} has more than {MAX_FILE_BYTES} bytes; is it another file?")
        return tomllib.loads(content.decode())
    except RecursionError:
        raise UsageError(f"{path} is not TOML that is read here: it is nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        twice = "; a key or a table is defined twice, keep one" if "overwrite" in str(error) else ""
        raise UsageError(f"{path} is not TOML: {error}{twice}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error.reason} at byte {error.start}; save it as UTF-8") from None
    except ValueError as error:  # an integer of thousands of digits
        raise UsageError(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from None


def read_table(
    table: object, readers: Mapping[str, Reader], where: str, required: Sequence[str] = ()
) -> dict[str, Any]:
    """Read a table, each key with its reader; ``required`` are example lines of keys that must be present."""
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} must be a table, not {_show(table)}")
    for key in table:
        if key not in readers:
            raise UnknownName("key", key, readers, hint=f"(in {where})")
    values = {key: readers[key](value, f"{where}: {key}") for key, value in table.items()}
    for line in required:
        key = line.partition(" = ")[0].strip("[]")
        if key not in values:
            raise UsageError(f"{where}: {key} is missing; add it, like {line}")
    return values


def integer(value: object, where: str) -> int:
    """Read an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{where} must be a whole number, not {_show(value)}")
    return value


def number(value: object, where: str) -> float:
    """Read a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where} must be a number, not {_show(value)}")
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"{where} must be a number below 1.8e308, not {_show(value)}") from None


def text(value: object, where: str) -> str:
    """Read a string."""
    if not isinstance(value, str):
        raise UsageError(f"{where} must be a string in quotes, not {_show(value)}")
    return value


def flag(value: object, where: str) -> bool:
    """Read a boolean."""
    if not isinstance(value, bool):
        raise UsageError(f"{where} must be true or false, not {_show(value)}")
    return value


def choice(*known: str) -> Reader:
    """Return a reader of one of the known strings."""

    def read(value: object, where: str) -> str:
        if text(value, where) not in known:
            raise UnknownName(where.rpartition(": ")[2], str(value), known, hint=f"(in {where.rpartition(': ')[0]})")
        return str(value)

    return read


def list_of(reader: Reader) -> Reader:
    """Return a reader of a list, as a tuple."""

    def read(value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise UsageError(f"{where} must be a list in brackets, not {_show(value)}")
        return tuple(reader(item, f"{where}[{index}]") for index, item in enumerate(value))

    return read


def either(when_text: Reader, otherwise: Reader) -> Reader:
    """Return a reader of a string or another type."""
    return lambda value, where: (when_text if isinstance(value, str) else otherwise)(value, where)


def size(value: object, where: str) -> int:
    """Read bytes from a number or a string such as 2GiB."""
    return int(_quantity(value, where, parse_bytes, integer))


def rate(value: object, where: str) -> float:
    """Read bytes per second from a number or a string such as 10Gbit/s."""
    return _quantity(value, where, _exact(parse_rate), number)


def seconds(value: object, where: str) -> float:
    """Read seconds from a number or a string such as 50us."""
    return _quantity(value, where, _exact(parse_s), number)


def _quantity(value: object, where: str, parse: Callable[[str], float], plain: Callable[[object, str], float]) -> float:
    if not isinstance(value, str):
        return plain(value, where)
    try:
        return parse(value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _exact(parse: Callable[[str], float]) -> Callable[[str], float]:
    """Round the last digit of a parsed value: 10us is 1e-05, not 9.999999999999999e-06."""
    return lambda written: float(f"{parse(written):.15g}")


def _show(value: object) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "…"


def write_size(num_bytes: int) -> str | int:
    """Format bytes with a unit, or as a number where that is not exact."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes and num_bytes % factor == 0 and num_bytes < 2**53:
            return f"{num_bytes // factor}{unit}"
    return num_bytes


def write_rate(bytes_per_s: float) -> str | float:
    """Format bytes per second with a unit, or as a number where that is not exact."""
    return _write(bytes_per_s, (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)), _exact(parse_rate))


def write_seconds(value_s: float) -> str | float:
    """Format seconds with a unit, or as a number where that is not exact."""
    return _write(value_s, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)), _exact(parse_s))


def _write(value: float, units: Sequence[tuple[str, float]], parse: Callable[[str], float]) -> str | float:
    for unit, factor in units:
        if value >= factor:
            short = f"{value / factor:.6g}{unit}"
            return short if parse(short) == value else value
    return value


def to_toml(table: Mapping[str, Any]) -> str:
    """Format a table as TOML: plain values, then tables and arrays of tables; None is omitted."""
    return "\n".join(_lines(table, ())).strip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    tables: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, Mapping) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
            tables.append((key, value))
        elif value is not None:
            lines.append(f"{key} = {_value(value)}")
    for key, value in tables:
        name = ".".join((*path, key))
        for item in value if isinstance(value, list) else [value]:
            inner = _lines(item, (*path, key))
            header = f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
            only_tables = bool(inner) and not inner[0]
            lines += inner if only_tables and not isinstance(value, list) else ["", header, *inner]
    return lines


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    assert isinstance(value, list | tuple), f"no TOML for {type(value).__name__}"
    return "[" + ", ".join(_value(item) for item in value) + "]"
