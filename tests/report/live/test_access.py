"""Who may see the page."""

from __future__ import annotations

import pytest

from stagewright.errors import UsageError
from stagewright.report.live.access import Access, choose_access, is_loopback


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize("address", ["0.0.0.0", "192.168.1.4", "::", "node7"])
def test_other_addresses_need_a_token(address: str) -> None:
    with pytest.raises(UsageError, match="--token auto"):
        choose_access(address, None)
    assert choose_access(address, "auto").token is not None


def test_tokens_are_made_anew_and_compared_whole() -> None:
    one, other = choose_access("127.0.0.1", "auto"), choose_access("127.0.0.1", "auto")
    assert one.token is not None
    assert one.token != other.token
    assert len(one.token) >= 32
    assert one.accepts_token(one.token)
    for wrong in (None, "", one.token[:-1], one.token + "a", "é" * 20):
        assert not one.accepts_token(wrong)
    assert choose_access("127.0.0.1", None).accepts_token(None)


@pytest.mark.parametrize("token", ["short", "with space and more", "x" * 20 + ";", "x" * 20 + "\r\n"])
def test_tokens_that_are_refused(token: str) -> None:
    with pytest.raises(UsageError, match="--token auto"):
        choose_access("127.0.0.1", token)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:8080", True),
        ("localhost:8080", True),
        ("[::1]:8080", True),
        ("localhost", True),
        ("evil.example:8080", False),
        ("127.0.0.1.evil.example", False),
        (None, False),
    ],
)
def test_names_that_are_answered(host: str | None, expected: bool) -> None:
    assert Access(address="127.0.0.1").accepts_host(host) is expected
    assert Access(address="0.0.0.0", token="t" * 20).accepts_host(host)
