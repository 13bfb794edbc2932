"""Codec names: the kind of codec, its numbers and the codec that it wraps.

    block4         kind "block"     numbers (4,)              sort3+1             kind "sort"   numbers (3, 1)
    lowrank:8      kind "lowrank"   numbers (8,)              delta(block4)       kind "delta"  inner "block4"
    topk:2.5       kind "topk"      numbers (2.5,)            delta(block4,1GiB)  … with the option "1GiB"
    shop:Sign:2    kind "shop:Sign" numbers (2,)              the user's class Sign in the module shop

Pure Python: parsing a name imports neither torch nor the codec.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stagewright.codecs.catalog import BUILTIN_CODECS, EXAMPLES, BuiltinCodec
from stagewright.errors import UnknownName, UsageError
from stagewright.quantity import parse_bytes
from stagewright.user_code import is_user_defined, split_name

AUTO = "auto"
"""In a plan: the codec is chosen on the first batch."""

_CUSTOM = re.compile(r"([^:]*:[^:]*)(?::(\d+(?:\.\d+)?))?")
_SIMPLE = re.compile(r"([a-z][a-z_-]*?)(?:(\d+)(?:\+(\d+))?|:(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class CodecName:
    """A parsed codec name."""

    text: str
    """The name as written, without spaces."""
    kind: str
    """The name under which the codec is registered, or ``module:Class``."""
    numbers: tuple[float, ...] = ()
    inner: CodecName | None = None
    option: str | None = None
    """The text after the wrapped codec."""

    @classmethod
    def parse(cls, text: str) -> CodecName:
        """Parse a name; for built-in kinds also check the numbers."""
        compact = re.sub(r"\s", "", text)
        wrapper = _split_wrapper(compact)
        if wrapper is not None:
            kind, inner, option = wrapper
            name = cls(compact, kind, (), cls.parse(inner), option)
        else:
            is_custom = is_user_defined(compact) and compact.partition(":")[0] not in BUILTIN_CODECS
            match = (_CUSTOM if is_custom else _SIMPLE).fullmatch(compact)
            if match is None:
                raise UnknownName("codec", text, EXAMPLES)
            if is_custom:
                split_name(match[1], "Codec")
            name = cls(compact, match[1], _numbers(match))
        builtin = BUILTIN_CODECS.get(name.kind)
        if builtin is not None:
            _check_builtin(name, builtin)
        return name

    @property
    def is_custom(self) -> bool:
        """Whether the kind is a user's class, named with its module."""
        return ":" in self.kind

    @property
    def is_stateful(self) -> bool:
        """Whether both ends of a link keep state from one message to the next."""
        return self.kind in BUILTIN_CODECS and BUILTIN_CODECS[self.kind].is_wrapper


def _numbers(match: re.Match[str]) -> tuple[float, ...]:
    return tuple(float(digits) if "." in digits else int(digits) for digits in match.groups()[1:] if digits)


def _split_wrapper(text: str) -> tuple[str, str, str | None] | None:
    """Split ``delta(block4,1GiB)`` into its three parts; the inner codec may itself be a wrapper."""
    if not text.endswith(")"):
        return None
    kind, _, rest = text[:-1].partition("(")
    inner, depth = "", 0
    for index, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            return kind, inner, rest[index + 1 :]
        inner += character
    return kind, inner, None


def _check_builtin(name: CodecName, builtin: BuiltinCodec) -> None:
    """Raise UsageError unless the rest of the name is valid for its kind."""
    text, kind = name.text, name.kind
    if builtin.is_wrapper:
        _check_wrapper(name, builtin)
    elif builtin.accepts is None:
        matches = [_SIMPLE.fullmatch(example) for example in builtin.examples]
        if name.inner is not None or name.numbers not in [_numbers(match) for match in matches if match]:
            raise UsageError(f"unknown codec {text!r}; codecs of this kind: {', '.join(builtin.examples)}")
    else:
        example = builtin.examples[-1]
        has_separator = (":" in text) == (":" in example)
        if name.inner is not None or not name.numbers or not has_separator or not builtin.accepts(name.numbers):
            raise UsageError(f"codec {text!r}: {kind} needs {builtin.needs}; write {example}")


def _check_wrapper(name: CodecName, builtin: BuiltinCodec) -> None:
    if name.inner is None:
        raise UsageError(f"codec {name.text!r} wraps another codec; write {builtin.examples[0]}")
    if name.inner.is_stateful:
        raise UsageError(f"codec {name.text!r}: {name.inner.text} is stateful too; put only a stateless codec inside")
    if name.option is not None:
        if not builtin.has_option:
            raise UsageError(f"codec {name.text!r}: {name.kind} takes no option, got {name.option!r}")
        parse_bytes(name.option)
