"""A quick check whether the Hugging Face hub is reachable; its client would retry for half a minute."""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request


def offline_by_choice() -> bool:
    """Whether the user disabled the network with HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def unreachable() -> bool:
    """Whether the hub's host name can't be resolved; False behind a proxy, where that means nothing."""
    from huggingface_hub import constants

    if urllib.request.getproxies():
        return False
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return True
    return False


def offline() -> bool:
    """Whether only local files are available."""
    return offline_by_choice() or unreachable()
