"""The rotation of `codecs.rotation` in Triton, for 64 values held as a tuple of 64 tensors.

The signs are static, so they become operand modifiers and cost nothing.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# Decorated functions are in Triton's language: its compiler checks the types.

from __future__ import annotations

import triton
import triton.language as tl

from stagewright.codecs.rotation import SIGN_BITS


def _sign_differences() -> list[bool]:
    """Return, for stage h and value i at 64 · log2(h) + i, whether the signs of its pair differ before that stage.

    A pair becomes ±(a + b), ±(a − b) if its signs are equal, else ±(a − b), ±(a + b); both keep the sign of a. Signs
    cost nothing this way, and all values end up with the sign of value 0, which is +.
    """
    signs = [bool(SIGN_BITS >> index & 1) for index in range(64)]
    sizes = [1, 2, 4, 8, 16, 32]
    return [signs[i & ~size & -size] != signs[(i | size) & -size] for size in sizes for i in range(64)]


def _pair_operations() -> tuple[list[int], list[bool]]:
    """Return the inverse's operation for each pair, so that outputs have their signs, and which inputs are negated.

    0: a + b, a − b     1: a + b, b − a     2: b − a, a + b, where b arrives negated
    """
    wanted = [bool(SIGN_BITS >> index & 1) for index in range(64)]
    operations: dict[tuple[int, int], int] = {}
    for size in (32, 16, 8, 4, 2, 1):
        before = list(wanted)
        for i in range(64):
            if not i & size:
                pair = (wanted[i], wanted[i | size])
                operations[size, i] = operations[size, i | size] = {(False, True): 1, (True, False): 2}.get(pair, 0)
                before[i], before[i | size] = (pair[0] and pair[1], pair[0])
        wanted = before
    return [operations[size, i] for size in (1, 2, 4, 8, 16, 32) for i in range(64)], wanted


SIGN_DIFFERENCES = tl.constexpr(tuple(_sign_differences()))
PAIR_OPERATIONS = tl.constexpr(tuple(_pair_operations()[0]))
NEGATED = tl.constexpr(tuple(_pair_operations()[1]))


@triton.jit
def _stage(values, SIZE: tl.constexpr, OFFSET: tl.constexpr):
    """Map (a, b) to (a + b, a − b) for values SIZE apart, applying the signs of `codecs.rotation`."""
    outputs = ()
    for index in tl.static_range(64):
        if ((index & SIZE) != 0) == SIGN_DIFFERENCES[OFFSET + index]:
            outputs = outputs + (values[index & ~SIZE] + values[index | SIZE],)  # noqa: RUF005
        else:
            outputs = outputs + (values[index & ~SIZE] - values[index | SIZE],)  # noqa: RUF005
    return outputs


@triton.jit
def rotate(values):
    """Compute H · (s ∘ x): the rotation without its factor 1/8."""
    values = _stage(values, 1, 0)
    values = _stage(values, 2, 64)
    values = _stage(values, 4, 128)
    values = _stage(values, 8, 192)
    values = _stage(values, 16, 256)
    return _stage(values, 32, 320)


@triton.jit
def _stage_back(values, SIZE: tl.constexpr, OFFSET: tl.constexpr):
    outputs = ()
    for index in tl.static_range(64):
        a = values[index & ~SIZE]
        b = values[index | SIZE]
        if ((index & SIZE) != 0) == (PAIR_OPERATIONS[OFFSET + index] == 2):
            outputs = outputs + (a + b,)  # noqa: RUF005
        elif PAIR_OPERATIONS[OFFSET + index] == 0:
            outputs = outputs + (a - b,)  # noqa: RUF005
        else:
            outputs = outputs + (b - a,)  # noqa: RUF005
    return outputs


@triton.jit
def rotate_back(values):
    """Compute s ∘ (H · y) of values that are negated where NEGATED is true."""
    values = _stage_back(values, 1, 0)
    values = _stage_back(values, 2, 64)
    values = _stage_back(values, 4, 128)
    values = _stage_back(values, 8, 192)
    values = _stage_back(values, 16, 256)
    return _stage_back(values, 32, 320)
