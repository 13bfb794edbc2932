"""The built-in codecs: for each kind its module, its example names and the numbers that it accepts.

A new built-in codec is one file in `builtin/` and one entry here. This module is pure Python, so a plan's codec names
are checked without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BuiltinCodec:
    """One kind of built-in codec."""

    kind: str
    module: str
    """Module in `codecs.builtin`, imported on first use."""
    examples: tuple[str, ...]
    """The most used names. Without ``accepts`` they are the only names of this kind."""
    needs: str = ""
    """What ``accepts`` requires, for error messages."""
    accepts: Callable[[tuple[float, ...]], bool] | None = None
    """Whether the numbers of a name are valid."""
    is_wrapper: bool = False
    """Whether it wraps another codec and keeps state between messages: ``delta(block4)``."""
    has_option: bool = False
    """Whether a wrapper accepts a size after the inner codec: ``delta(block4,1GiB)``."""


BUILTIN_CODECS = {
    codec.kind: codec
    for codec in (
        BuiltinCodec("none", "casts", ("none",)),
        BuiltinCodec("bf", "casts", ("bf16",)),
        BuiltinCodec("fp", "casts", ("fp8",)),
        BuiltinCodec("block", "block", ("block8", "block6", "block4")),
        BuiltinCodec("hadamard", "block", ("hadamard8", "hadamard4")),
        BuiltinCodec("lloyd", "lloyd", ("lloyd3", "lloyd2")),
        BuiltinCodec(
            "lowrank", "lowrank", ("lowrank:8",), "a rank of at least 1", lambda n: type(n[0]) is int and n[0] > 0
        ),
        BuiltinCodec("topk", "topk", ("topk:10",), "a percentage above 0 and at most 100", lambda n: 0 < n[0] <= 100),
        BuiltinCodec(
            "sort",
            "sort",
            ("sort12+4", "sort9+3", "sort6+2", "sort3+1"),
            "value bits and split bits, at most 16 in total and at most 8 of them split bits",
            lambda n: len(n) == 2 and n[0] >= 1 and sum(n) <= 16 and n[1] <= 8,
        ),
        BuiltinCodec("delta", "stateful", ("delta(block4)",), is_wrapper=True, has_option=True),
        BuiltinCodec("feedback", "stateful", ("feedback(block4)",), is_wrapper=True),
    )
}

EXAMPLES = tuple(name for codec in BUILTIN_CODECS.values() for name in codec.examples)
"""At least one name of each kind."""
