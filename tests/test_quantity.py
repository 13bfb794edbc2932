"""Numbers with units."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stagewright.errors import UsageError
from stagewright.quantity import format_age, format_bytes, format_count, format_s, parse_bytes, parse_rate, parse_s


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1048576", 1 << 20), ("2GiB", 2 << 30), ("1.5 kb", 1500), ("500MB", 500_000_000), ("1e3B", 1000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "rate"), [("10Gbit/s", 1.25e9), ("10gbit", 1.25e9), ("1.2GB/s", 1.2e9), ("8Mbps", 1e6), ("8MBps", 8e6)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "seconds"), [("50us", 5e-5), ("50µs", 5e-5), ("1.5ms", 1.5e-3), ("2s", 2.0), ("0", 0.0), ("1min", 60)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 GiBs", "1,5MB", "nan", "1e999GiB", "1e305TB"])
def test_nonsense_names_itself_and_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="write it like"):
        parse_bytes(text)


@pytest.mark.parametrize("parse", [parse_rate, parse_s])
def test_a_rate_or_a_time_needs_its_unit(parse: Callable[[str], float]) -> None:
    with pytest.raises(UsageError, match="'10' is not a"):
        parse("10")


def test_formats() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1536, 10 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "10.0 MiB",
        "3.00 TiB",
    ]
    assert [format_count(number) for number in (0, 999, 22_100_000, 4.62e9)] == ["0", "999", "22.1 M", "4.62 G"]
    assert format_s(0.0009996) == "1.00 ms"
    assert [format_s(seconds) for seconds in (0, 2e-9, 5.25e-5, 0.0123, 1.5)] == [
        "0 s",
        "2.00 ns",
        "52.5 µs",
        "12.3 ms",
        "1.50 s",
    ]


@pytest.mark.parametrize("text", ["10Gb/s", "10Gb", "5 mb/s", "3b"])
def test_a_rate_of_bits_or_bytes(text: str) -> None:
    with pytest.raises(UsageError, match="may be bits or bytes per second"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (14, "14 s"), (119, "119 s"), (180, "3 min"), (18000, "5 h"), (1e6, "12 days")]
)
def test_ages(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_a_wrong_rate_is_quoted_as_written() -> None:
    with pytest.raises(UsageError, match=r"'10Gbitt/s' is not a rate"):
        parse_rate("10Gbitt/s")
