"""Options of a study, declared once as fields of a frozen dataclass.

    batch: int = option(32, "Samples per step.", quick=16, on_gpus=64, minimum=1)

The command line, its help with the defaults, and the values of ``--quick`` come from these declarations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, TypeAlias

from stagewright.errors import UsageError
from stagewright.quantity import format_bytes

Note: TypeAlias = Callable[[str], None]
"""Shows a line to the user."""

_UNSET: Any = object()
_METADATA = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionInfo:
    """How one field appears on the command line, and its other defaults."""

    help: str = ""
    flag: str = ""
    """Where the name of the field is not the name of the option."""
    on_command_line: bool = True
    quick: Any = _UNSET
    on_gpus: Any = _UNSET
    panel: Literal["Experiment", "Execution"] = "Experiment"
    typed: type = str
    """Type that the command line reads, before `parse`."""
    parse: Callable[[Any], Any] | None = None
    """Turns what the user types into the value of the field (with `also`: into one value for each field)."""
    also: tuple[str, ...] = ()
    """Other fields that the same option sets."""
    show: Callable[[Any], str] | None = None
    """Writes a default into the help, the way a user would type it."""
    default_text: str = ""
    """Written into the help where the default is not a fixed value."""
    minimum: int | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    """The words that it takes, which the help lists; the study itself refuses others."""


def option(default: Any, help: str = "", **info: Any) -> Any:
    """Declare a field that is an option of the command line; `info` are fields of OptionInfo."""
    if "parse" not in info and isinstance(default, int | float):
        info.setdefault("typed", type(default))
    return field(default=default, metadata={_METADATA: OptionInfo(help=help, **info)})


def setting(default: Any, *, quick: Any = _UNSET) -> Any:
    """Declare a field that is not on the command line."""
    return field(default=default, metadata={_METADATA: OptionInfo(on_command_line=False, quick=quick)})


def declared_options(options: type) -> dict[str, tuple[Field[Any], OptionInfo]]:
    """The fields of an options class that are on the command line, by name."""
    return {name: pair for name, pair in _declared(options).items() if pair[1].on_command_line}


def quick_values(options: type) -> dict[str, Any]:
    """The defaults that --quick replaces."""
    return {name: info.quick for name, (_, info) in _declared(options).items() if info.quick is not _UNSET}


def gpu_values(options: type) -> dict[str, Any]:
    """The full-size defaults that GPUs replace."""
    return {name: info.on_gpus for name, (_, info) in _declared(options).items() if info.on_gpus is not _UNSET}


def help_of(options: type, name: str) -> str:
    """The help of an option with its defaults: "Samples per step. [default: 8; GPUs: 16; quick: 4]"."""
    declared = _declared(options)
    declaration, info = declared[name]
    quick = tuple(declared[field][1].quick for field in (name, *info.also))
    defaults = {
        "default": info.default_text or _show(info, declaration.default),
        "GPUs": _show(info, info.on_gpus),
        "quick": _show(info, quick if info.also else quick[0]),
    }
    text = "; ".join(f"{kind}: {value}" for kind, value in defaults.items() if value)
    return " ".join(sentence for sentence in (info.help, f"[{text}]" if text else "") if sentence)


def parse_words(text: str) -> tuple[str, ...]:
    """Split words separated by commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def parse_numbers(text: str) -> tuple[int, ...]:
    """Split whole numbers separated by commas."""
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise UsageError(f"{text!r} is not a list of whole numbers; separate them with commas, like 2,4")
    return tuple(int(number) for number in text.replace(" ", "").split(","))


def show_bytes(size: int) -> str:
    """Write a size without a space, as it is typed: "256MiB"."""
    return re.sub(r"(\.0+)? ", "", format_bytes(size))


def _declared(options: type) -> Mapping[str, tuple[Field[Any], OptionInfo]]:
    return {item.name: (item, item.metadata[_METADATA]) for item in fields(options) if _METADATA in item.metadata}


def _show(info: OptionInfo, value: Any) -> str:
    if value is _UNSET or value is None or value is False or value == () or (info.also and value[0] is _UNSET):
        return ""
    if info.show is not None:
        return info.show(value)
    if isinstance(value, tuple):
        return (", " if isinstance(value[0], str) else ",").join(map(str, value))
    return str(value)
