"""Damaged and hostile variants of a valid file, from a seed."""

from __future__ import annotations

import random
import re

_VALUES = (
    *("null", "true", "false", "0", "-1", "1", "2", "7", "1.5", "-0.0", "1e400", "-1e400", "NaN", "Infinity"),
    *("9007199254740993", "18446744073709551616", "99999999999999999999999999999999", "1e-400", "3000000"),
    *('""', '"abc"', '"\\u001b[2J"', '"\\ud800"', '"../../../etc/passwd"', '"a:b"', '"os:system"', '"cpu:0"'),
    *("[]", "{}", "[1]", '{"a": 1}', "[[[[]]]]", '[null, "x", 1.5]', "[" * 2000, "9" * 5000, '"' + "x" * 3000 + '"'),
    *("inf", "nan", "2026-11-15", "'x'", "2GiB"),
)
_BYTES = (b"\x00", b"\xff" * 4, b"\xff" * 8, b"\x80" * 12, b"\x7f\xff\xff\xff", b"\r\n", b"\n", b"%0d%0a", b"\xc3\x28")
_VALUE = re.compile(rb'"(?:[^"\\\n]|\\.)*"|[-+]?[0-9][0-9.eE+-]*|true|false|null|\[[^\[\]\n]*\]')


def mutate(content: bytes, chance: random.Random, *, text: bool) -> bytes:
    """Return a variant with one to four changes; of a text, mostly of its values."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if text and chance.random() < 0.7:
            content = _change_value(content, chance)
        else:
            content = _change_bytes(content, chance)
    return content


def _change_value(content: bytes, chance: random.Random) -> bytes:
    """Replace, drop or double one value of a JSON or TOML text."""
    found = list(_VALUE.finditer(content))
    if not found:
        return _change_bytes(content, chance)
    spot = chance.choice(found)
    kind = chance.random()
    if kind < 0.75:
        new = chance.choice(_VALUES).encode()
    elif kind < 0.9:
        new = chance.choice(found)[0]
    else:
        new = b""
    return content[: spot.start()] + new + content[spot.end() :]


def _change_bytes(content: bytes, chance: random.Random) -> bytes:
    size = len(content)
    if not size:
        return bytes(chance.randrange(256) for _ in range(chance.randrange(64)))
    at, to = sorted((chance.randrange(size), chance.randrange(size)))
    kind = chance.randrange(8)
    if kind == 0:  # flip a bit
        return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
    if kind == 1:  # truncate
        return content[:at]
    if kind == 2:  # drop a part
        return content[:at] + content[min(to, at + 40) :]
    if kind == 3:  # double a part
        return content[:to] + content[at:to][:4000] + content[to:]
    if kind == 4:  # exchange some bytes
        return content[:at] + bytes(chance.randrange(256) for _ in range(8)) + content[at + 8 :]
    if kind == 5:  # a number at its limit
        new = chance.choice(_BYTES)
        return content[:at] + new + content[at + len(new) :]
    if kind == 6:  # insert
        return content[:at] + chance.choice(_BYTES) + content[at:]
    return content[to:] + content[:at]  # exchange the ends
