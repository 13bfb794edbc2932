"""Codecs by name, and how to register one.

    @register("half")
    class Half(Codec):                      # get("half"), or get("half3") and get("half:3") with numbers
        def __init__(self, name): …         # a CodecName: numbers, inner codec, option

A class that is not registered is named with its module: get("shop:Half"), get("shop:Half:3"). Importing this module
does not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from stagewright.codecs.catalog import BUILTIN_CODECS, EXAMPLES
from stagewright.codecs.name import AUTO, CodecName
from stagewright.errors import StagewrightError, UnknownName, UsageError
from stagewright.plugins import plugins
from stagewright.user_code import describe, find, one_line

if TYPE_CHECKING:
    from stagewright.codecs.base import Codec

_Factory = TypeVar("_Factory", bound=Callable[[CodecName], "Codec"])

_FACTORIES: dict[str, Callable[[CodecName], Codec]] = {}


def register(kind: str) -> Callable[[_Factory], _Factory]:
    """Register the decorated class as a kind of codec."""

    def add(factory: _Factory) -> _Factory:
        module: Any = getattr(factory, "__module__", "")
        is_builtin = kind in BUILTIN_CODECS and module == _builtin_module(kind)
        if (kind in _FACTORIES or kind in BUILTIN_CODECS) and not is_builtin:
            raise UsageError(f"codec {kind!r} exists already; choose another name")
        _FACTORIES[kind] = factory
        get.cache_clear()
        return factory

    return add


@lru_cache(maxsize=256)
def get(name: str) -> Codec:
    """Return the codec with this name: ``get("block4")``, ``get("lowrank:8")``, ``get("delta(block4)")``."""
    return build_codec(CodecName.parse(name))


def build_codec(name: CodecName) -> Codec:
    """Create the codec for a parsed name."""
    if name.is_custom:
        return _build_custom(name, name.kind)
    if name.kind not in _FACTORIES and name.kind in BUILTIN_CODECS:
        importlib.import_module(_builtin_module(name.kind))
    if name.kind not in _FACTORIES:
        if name.kind in plugins("codecs"):
            return _build_custom(name, plugins("codecs")[name.kind])
        raise UnknownName("codec", name.text, codec_names())
    return _FACTORIES[name.kind](name)


def check_codec(text: str) -> None:
    """Raise UsageError unless a plan may use this codec: built-in, registered, or a user's class.

    A user's class is imported and created; other names are checked without importing torch.
    """
    check_codec_name(text)
    if text != AUTO and _innermost(CodecName.parse(text)).is_custom:
        get(text)


def check_codec_name(text: str) -> None:
    """Raise UsageError unless this can be the name of a codec; a user's class is checked by its form only."""
    if text in (AUTO, "none"):
        return
    name = _innermost(CodecName.parse(text))
    if not name.is_custom and name.kind not in {*BUILTIN_CODECS, *_FACTORIES, *plugins("codecs")}:
        raise UnknownName("codec", text, (*EXAMPLES, AUTO))


def _innermost(name: CodecName) -> CodecName:
    while name.inner is not None:
        name = name.inner
    return name


def codec_names() -> tuple[str, ...]:
    """Return at least one name of each kind: built-in codecs first, then registered ones and plug-ins."""
    return (*EXAMPLES, *(kind for kind in (*_FACTORIES, *plugins("codecs")) if kind not in BUILTIN_CODECS))


def _builtin_module(kind: str) -> str:
    return f"stagewright.codecs.builtin.{BUILTIN_CODECS[kind].module}"


def _build_custom(name: CodecName, reference: str) -> Codec:
    """Import a user's class and create the codec."""
    from stagewright.codecs.base import Codec

    factory = find(reference, "codec", "Codec")
    if not (isinstance(factory, type) and issubclass(factory, Codec)):
        actual = f"the class {factory.__name__}" if isinstance(factory, type) else describe(factory)
        raise UsageError(
            f"{reference!r} is {actual}, not a codec; name a class that inherits from stagewright.codecs.Codec"
        )
    try:
        return factory(name)
    except StagewrightError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise UsageError(f"cannot create the codec {name.text!r}: {one_line(error)}") from error
