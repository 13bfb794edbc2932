"""Access to the live page: from this machine only, or with a token.

Same-origin rules keep other sites from reading the page. A site could still use a host name that resolves to
127.0.0.1 (DNS rebinding), so without a token only loopback host names are answered. Pure.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass

from stagewright.errors import UsageError

MIN_TOKEN_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where the page is served and who may read it."""

    address: str
    """The address to listen on."""
    token: str | None = None
    """What a viewer must present; None: nothing."""

    def accepts_token(self, offered: str | None) -> bool:
        """Whether a viewer has the token; compared in constant time."""
        if self.token is None:
            return True
        return hmac.compare_digest((offered or "").encode(), self.token.encode())

    def accepts_host(self, host: str | None) -> bool:
        """Whether a request's Host header is acceptable."""
        if self.token is not None:
            return True
        name = (host or "").rpartition(":")[0] if (host or "").rpartition(":")[2].isdigit() else host or ""
        return is_loopback(name.strip("[]"))


def choose_access(address: str, token: str | None) -> Access:
    """Check the requested access; the token ``auto`` is replaced by a random one."""
    if token == "auto":
        token = secrets.token_urlsafe(24)
    if token is not None and len(token) < MIN_TOKEN_LENGTH:
        raise UsageError(
            f"a token of {len(token)} characters can be guessed; use at least {MIN_TOKEN_LENGTH}, or --token auto"
        )
    if token is not None and not (token.isascii() and token.replace("-", "").replace("_", "").isalnum()):
        raise UsageError("a token is part of a URL: use only letters, digits, - and _, or --token auto")
    if not is_loopback(address) and token is None:
        raise UsageError(
            f"{address} can be reached from other machines, so anyone could read the run; add --token auto, "
            "or leave --address out and forward the port: ssh -L 8080:127.0.0.1:PORT HOST"
        )
    return Access(address=address, token=token)


def is_loopback(address: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
