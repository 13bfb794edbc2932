"""Who may see the page: this machine alone, or whoever has the token.

A page of another site that the browser has open can't read ours (same-origin rules), but it could give itself a name
that resolves to 127.0.0.1; so without a token only the loopback's own names are answered. Pure.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass

from stagewright.errors import UsageError

__all__ = ["LEAST_TOKEN", "Access", "choose_access", "is_loopback"]

LEAST_TOKEN = 16
"""Characters of a token that nobody guesses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where the page is served and to whom."""

    address: str
    """The address to listen on."""
    token: str | None = None
    """What a viewer must know; None: nothing."""

    def knows(self, offered: str | None) -> bool:
        """Whether a viewer has the token; takes as long for a wrong one as for the right one."""
        if self.token is None:
            return True
        return hmac.compare_digest((offered or "").encode(), self.token.encode())

    def answers_to(self, host: str | None) -> bool:
        """Whether a request was meant for this page, by the name it was sent to."""
        if self.token is not None:
            return True
        name = (host or "").rpartition(":")[0] if (host or "").rpartition(":")[2].isdigit() else host or ""
        return is_loopback(name.strip("[]"))


def choose_access(address: str, token: str | None) -> Access:
    """What was asked for, if it is safe; the token ``auto`` is made here."""
    if token == "auto":
        token = secrets.token_urlsafe(24)
    if token is not None and len(token) < LEAST_TOKEN:
        raise UsageError(
            f"a token of {len(token)} characters can be guessed, it needs {LEAST_TOKEN}; let one be made: --token auto"
        )
    if token is not None and not (token.isascii() and token.replace("-", "").replace("_", "").isalnum()):
        raise UsageError("a token is part of an address: only letters, digits, - and _; let one be made: --token auto")
    if not is_loopback(address) and token is None:
        raise UsageError(
            f"{address} can be reached by other machines, and whoever opens the page sees the run; add --token auto, "
            "or leave --address out and forward the port: ssh -L 8080:127.0.0.1:PORT HOST"
        )
    return Access(address=address, token=token)


def is_loopback(address: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
