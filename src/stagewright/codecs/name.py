"""The name of a codec, taken apart: which kind it is, its numbers, and the codec inside it.

    block4         kind "block"     numbers (4,)              sort3+1             kind "sort"   numbers (3, 1)
    lowrank:8      kind "lowrank"   numbers (8,)              delta(block4)       kind "delta"  inner "block4"
    topk:2.5       kind "topk"      numbers (2.5,)            delta(block4,1GiB)  … and its option "1GiB"
    shop:Sign:2    kind "shop:Sign" numbers (2,)              a user's own class, in a module of theirs

Pure Python: a plan's codecs are checked before torch is imported, unless one is a user's own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from stagewright.errors import UnknownName, UsageError
from stagewright.quantity import parse_bytes
from stagewright.user_code import is_own, split_name

__all__ = ["AUTO", "EXAMPLES", "CodecName", "check_codec"]

AUTO = "auto"
"""In a plan: chosen on the first batch."""

EXAMPLES = (
    "none",
    "bf16",
    "fp8",
    "block8",
    "block6",
    "block4",
    "hadamard8",
    "hadamard4",
    "lloyd3",
    "lloyd2",
    "lowrank:8",
    "topk:10",
    "sort12+4",
    "sort9+3",
    "sort6+2",
    "sort3+1",
    "delta(block4)",
    "feedback(block4)",
)
"""One of each kind at least, with the numbers that are used most."""

_WRAPPED = re.compile(r"([a-z][a-z0-9_-]*)\(([^,]*)(?:,([^()]*))?\)")
_OWN = re.compile(r"([^:]*:[^:]*)(?::(\d+(?:\.\d+)?))?")
_PLAIN = re.compile(r"([a-z][a-z_-]*?)(?:(\d+)(?:\+(\d+))?|:(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class CodecName:
    """A codec's name, taken apart."""

    text: str
    """What was written, without spaces."""
    kind: str
    """The kind, by which it is registered."""
    numbers: tuple[float, ...] = ()
    """The numbers behind it."""
    inner: CodecName | None = None
    """The codec inside, if it is one around another."""
    option: str | None = None
    """What stands behind the inner codec."""

    @classmethod
    def parse(cls, text: str) -> CodecName:
        """Take a name apart; numbers and kinds of the house's own codecs are checked."""
        plain = re.sub(r"\s", "", text)
        wrapped = _split_wrapper(plain)
        if wrapped is not None:
            kind, inside, option = wrapped
            found = cls(plain, kind, (), cls.parse(inside), option)
        else:
            own = is_own(plain) and plain.partition(":")[0] not in _RULES
            match = (_OWN if own else _PLAIN).fullmatch(plain)
            if match is None:
                raise UnknownName("codec", text, EXAMPLES)
            if own:
                split_name(match[1], "Codec")
            numbers = tuple(float(one) for one in match.groups()[1:] if one is not None)
            found = cls(plain, match[1], numbers)
            if all(one.is_integer() for one in numbers) and "." not in plain.removeprefix(match[1]):
                found = cls(plain, match[1], tuple(int(one) for one in numbers))
        rule = _RULES.get(found.kind)
        if rule is not None:
            rule(found)
        return found

    @property
    def is_own(self) -> bool:
        """Whether it is a user's own class, by the name of its module."""
        return ":" in self.kind

    @property
    def is_stateful(self) -> bool:
        """Whether both ends of a link must remember something from one message to the next."""
        return self.kind in ("delta", "feedback")


def check_codec(text: str) -> None:
    """Raise UsageError where a plan's codec is not one: the house's own, those that a user registered or names.

    A user's own class is imported and made.
    """
    if text == AUTO:
        return
    found = CodecName.parse(text)
    while found.inner is not None:
        found = found.inner
    if found.is_own:
        from stagewright.codecs.registry import get

        get(text)
        return
    registry = sys.modules.get("stagewright.codecs.registry")
    if found.kind not in _RULES and not (registry is not None and registry.is_registered(found.kind)):
        raise UnknownName("codec", text, (*EXAMPLES, AUTO))


def _split_wrapper(text: str) -> tuple[str, str, str | None] | None:
    """``delta(block4,1GiB)`` as its three parts; the inner codec may be one around another."""
    if not text.endswith(")"):
        return None
    kind, _, rest = text[:-1].partition("(")
    inside, depth = "", 0
    for at, sign in enumerate(rest):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            return kind, inside, rest[at + 1 :]
        inside += sign
    return kind, inside, None


def _exactly(*choices: tuple[int, ...]) -> Callable[[CodecName], None]:
    def rule(found: CodecName) -> None:
        if found.inner is not None or found.numbers not in choices:
            known = ", ".join(found.kind + "+".join(map(str, one)) for one in choices)
            raise UsageError(f"there is no codec {found.text!r}; known of this kind: {known}")

    return rule


def _lowrank(found: CodecName) -> None:
    if len(found.numbers) != 1 or ":" not in found.text or found.numbers[0] < 1 or "." in found.text:
        raise UsageError(f"codec {found.text!r} needs a rank of at least 1: write lowrank:8")


def _topk(found: CodecName) -> None:
    if len(found.numbers) != 1 or ":" not in found.text or not 0 < found.numbers[0] <= 100:
        raise UsageError(
            f"codec {found.text!r} needs the percentage that is kept, above 0 and at most 100: write topk:10"
        )


def _sort(found: CodecName) -> None:
    good = len(found.numbers) == 2 and found.numbers[0] >= 1 and sum(found.numbers) <= 16 and found.numbers[1] <= 8
    if not good:
        raise UsageError(
            f"codec {found.text!r} needs value bits and split bits, at most 16 together and 8 of them split bits: "
            "write sort3+1"
        )


def _wrapper(found: CodecName) -> None:
    if found.inner is None:
        raise UsageError(f"codec {found.text!r} is one around another: write {found.kind}(block4)")
    if found.inner.is_stateful:
        raise UsageError(f"codec {found.text!r}: {found.inner.text} remembers too; put only a plain codec inside")
    if found.option is not None:
        if found.kind != "delta":
            raise UsageError(f"codec {found.text!r}: {found.kind} takes no option, but found {found.option!r}")
        parse_bytes(found.option)


_RULES: dict[str, Callable[[CodecName], None]] = {
    "none": _exactly(()),
    "bf": _exactly((16,)),
    "fp": _exactly((8,)),
    "block": _exactly((8,), (6,), (4,)),
    "hadamard": _exactly((8,), (4,)),
    "lloyd": _exactly((3,), (2,)),
    "lowrank": _lowrank,
    "topk": _topk,
    "sort": _sort,
    "delta": _wrapper,
    "feedback": _wrapper,
}
