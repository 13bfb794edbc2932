"""Parse and format numbers with units: 2GiB, 10Gbit/s, 50us, 4.62 G.

Sizes: B, kB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024). Rates: a size per second,
or bits (kbit, Mbit, Gbit) per second. Times: ns, us, ms, s, min.
"""

from __future__ import annotations

import math
import re

from stagewright.errors import UsageError

_DECIMAL = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_BINARY = {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
_SIZES = _DECIMAL | _BINARY
_BITS = {"bit": 1 / 8, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "tbit": 1e12 / 8}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([a-zµ]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse a size such as ``2GiB``; a bare number is bytes."""
    return round(_parse(text, _SIZES, "b", "size", "2GiB, 500MB or 1048576"))


def parse_rate(text: str) -> float:
    """Parse a rate in bytes per second: ``10Gbit/s``, ``10Gbps`` (bits) or ``1.2GB/s``; a bare number is refused."""
    plain = text.strip().removesuffix("/s")
    if re.fullmatch(r"[0-9.]+\s*[kmgt]?b", plain, re.IGNORECASE) and plain.endswith("b"):
        raise UsageError(f"{text!r} may be bits or bytes per second; write it like {plain}it/s or {plain[:-1]}B/s")
    plain = plain.removesuffix("bps") + "bit" if plain.endswith("bps") else plain.removesuffix("ps")
    return _parse(plain, {**_SIZES, **_BITS}, None, "rate", "10Gbit/s or 1.2GB/s", written=text)


def parse_s(text: str) -> float:
    """Parse a time in seconds, from ``50us`` or ``1.5ms``; a bare number other than 0 is refused."""
    return _parse(text, _TIMES, None, "time", "50us, 1.5ms or 2s")


def _parse(
    text: str, units: dict[str, float], default: str | None, kind: str, examples: str, *, written: str = ""
) -> float:
    """Parse a number and its unit; an error quotes what was ``written``, by default the text."""
    match = _NUMBER.fullmatch(text)
    if match is not None and float(match[1]) == 0 and not match[2]:
        return 0.0
    unit = (match[2].lower() or default or "") if match else ""
    if match is None or unit not in units or not math.isfinite(float(match[1]) * units[unit]):
        raise UsageError(f"{(written or text)!r} is not a {kind}; write it like {examples}")
    return float(match[1]) * units[unit]


def format_age(seconds: float) -> str:
    """Format an age in one unit: ``14 s``, ``3 min``, ``5 h``, ``12 days``."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_bytes(size: float) -> str:
    """Format a size with a binary unit: ``1.21 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{_digits(size)} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_count(number: float) -> str:
    """Format a count with a decimal unit: ``22.1 M``."""
    for unit in ("", " k", " M", " G", " T"):
        if abs(number) < 1000 or unit == " T":
            return f"{number:.0f}" if not unit else f"{_digits(number)}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def format_s(seconds: float) -> str:
    """Format a time with a suitable unit: ``12.3 ms``."""
    if not math.isfinite(seconds):
        return str(seconds)
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= 0.9995 * factor:  # below, it rounds to less than 1 of this unit
            return f"{_digits(seconds / factor)} {unit}"
    return "0 s" if seconds == 0 else f"{_digits(seconds / 1e-9)} ns"


def _digits(number: float) -> str:
    """Format three significant digits."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"
