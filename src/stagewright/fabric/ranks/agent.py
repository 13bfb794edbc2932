"""The agent: waits on a host for coordinators that know the token, and is a rank for one after the other.

Each coordinator is served by a child process, which dies with the agent: one run leaves nothing behind for the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Callable
from typing import NoReturn

from stagewright.errors import RunError, UsageError
from stagewright.fabric.ranks.rank import Rank
from stagewright.fabric.ranks.wire import Channel, meet_coordinator

__all__ = ["DEFAULT_PORT", "serve_agent"]

DEFAULT_PORT = 7651
_PR_SET_PDEATHSIG = 1


def serve_agent(
    host: str, port: int, token: bytes, *, once: bool = False, tell: Callable[[str], None] = lambda line: None
) -> None:
    """Serve until interrupted, or after one coordinator; `tell` gets a line for each thing that happens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(4)
    except OSError as error:
        listener.close()
        raise UsageError(f"can't listen at {host}:{port}: {error.strerror}; choose another --listen") from None
    with listener:
        tell(f"waiting for a coordinator at {host}:{listener.getsockname()[1]}")
        while True:
            connection, address = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                channel = meet_coordinator(connection, token)
            except (OSError, RunError) as error:
                tell(f"{address[0]} was turned away: {error}")
                with contextlib.suppress(OSError):
                    connection.close()
                continue
            tell(f"coordinator {address[0]} is here")
            child = os.fork()
            if child == 0:
                _serve(channel, listener, token)
            connection.close()
            os.waitpid(child, 0)
            tell(f"coordinator {address[0]} is gone")
            if once:
                return


def _serve(channel: Channel, listener: socket.socket, token: bytes) -> NoReturn:
    """The child's whole life."""
    status = 1
    try:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        listener.close()
        # Others find this rank where the coordinator found it.
        Rank(channel, channel.socket.getsockname()[0], token).serve()
        status = 0
    except KeyboardInterrupt:
        status = 130
    finally:
        os._exit(status)
