"""The codecs by name, and how to add one.

@register("half")
class Half(Codec):                      # get("half"), or get("half3") and get("half:3") with numbers
    def __init__(self, name): …         # CodecName: its numbers, its inner codec

One that is not registered is named with its module: get("shop:Half"), get("shop:Half:3").
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from stagewright.codecs.base import Codec
from stagewright.codecs.name import EXAMPLES, CodecName
from stagewright.errors import StagewrightError, UnknownName, UsageError
from stagewright.user_code import describe, find, one_line

__all__ = ["codec_names", "get", "is_registered", "register"]

_Kind = TypeVar("_Kind", bound=Callable[[CodecName], Codec])

_HOMES = {
    "none": "plain",
    "bf": "plain",
    "fp": "plain",
    "block": "block",
    "hadamard": "hadamard",
    "lloyd": "lloyd",
    "lowrank": "lowrank",
    "topk": "topk",
    "sort": "sort",
    "delta": "stateful",
    "feedback": "stateful",
}
"""The module of each of the house's own kinds, imported when it is asked for."""

_KINDS: dict[str, Callable[[CodecName], Codec]] = {}


def register(kind: str) -> Callable[[_Kind], _Kind]:
    """Register the decorated class as a kind of codec."""

    def add(made: _Kind) -> _Kind:
        home: Any = getattr(made, "__module__", "")
        own = kind in _HOMES and home == f"stagewright.codecs.builtin.{_HOMES[kind]}"
        if (kind in _KINDS or kind in _HOMES) and not own:
            raise UsageError(f"codec {kind!r} exists already: give the new one another name")
        _KINDS[kind] = made
        get.cache_clear()
        return made

    return add


def is_registered(kind: str) -> bool:
    """Whether there is such a kind."""
    return kind in _HOMES or kind in _KINDS


@lru_cache(maxsize=256)
def get(name: str) -> Codec:
    """The codec of that name: ``get("block4")``, ``get("lowrank:8")``, ``get("delta(block4)")``."""
    return make(CodecName.parse(name))


def make(found: CodecName) -> Codec:
    """The codec of a name that is taken apart."""
    if found.is_own:
        return _own(found)
    if found.kind not in _KINDS and found.kind in _HOMES:
        importlib.import_module(f"stagewright.codecs.builtin.{_HOMES[found.kind]}")
    if found.kind not in _KINDS:
        raise UnknownName("codec", found.text, codec_names())
    return _KINDS[found.kind](found)


def _own(found: CodecName) -> Codec:
    """A user's own class, from its module."""
    kind = find(found.kind, "codec", "Codec")
    if not (isinstance(kind, type) and issubclass(kind, Codec)):
        what = f"the class {kind.__name__}" if isinstance(kind, type) else describe(kind)
        raise UsageError(
            f"{found.kind!r} is {what}, not a codec; name a class that inherits from stagewright.codecs.Codec"
        )
    try:
        return kind(found)  # type: ignore[arg-type]  # a name taken apart, as registered ones are given
    except StagewrightError:
        raise
    except Exception as error:  # anything that a user's code may raise
        raise UsageError(f"the codec {found.text!r} can't be made: {one_line(error)}") from error


def codec_names() -> tuple[str, ...]:
    """One name of every kind at least: the house's own, then those that were added."""
    return (*EXAMPLES, *(kind for kind in _KINDS if kind not in _HOMES))
