"""Whether the Hugging Face hub can be asked at all; its own client would retry for half a minute."""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request


def offline_by_choice() -> bool:
    """Whether the user switched the network off with HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def unreachable() -> bool:
    """Whether the hub's name does not even resolve; behind a proxy that says nothing, so False."""
    from huggingface_hub import constants

    if urllib.request.getproxies():
        return False
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return True
    return False


def offline() -> bool:
    """Whether only what is already on this machine can be had."""
    return offline_by_choice() or unreachable()
