"""The agent: a server on a host that runs a rank for each coordinator that knows the token, one at a time.

A child process serves each coordinator and dies with the agent, so a run leaves nothing behind for the next.
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
from stagewright.fabric.ranks.wire import Channel, authenticate_coordinator

DEFAULT_PORT = 7651
_PR_SET_PDEATHSIG = 1


def serve_agent(
    host: str, port: int, token: bytes, *, once: bool = False, report: Callable[[str], None] = lambda line: None
) -> None:
    """Serve until interrupted, or one coordinator; `report` receives a line per event."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(4)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --listen") from None
    with listener:
        report(f"waiting for a coordinator on {host}:{listener.getsockname()[1]}")
        while True:
            connection, address = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                channel = authenticate_coordinator(connection, token)
            except (OSError, RunError) as error:
                report(f"rejected {address[0]}: {error}")
                with contextlib.suppress(OSError):
                    connection.close()
                continue
            report(f"coordinator {address[0]} connected")
            child = os.fork()
            if child == 0:
                _serve(channel, listener, token)
            connection.close()
            os.waitpid(child, 0)
            report(f"coordinator {address[0]} disconnected")
            if once:
                return


def _serve(channel: Channel, listener: socket.socket, token: bytes) -> NoReturn:
    """Run a rank in the child process."""
    status = 1
    try:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        listener.close()
        # The other ranks reach this rank at the address that the coordinator used.
        Rank(channel, channel.socket.getsockname()[0], token).serve()
        status = 0
    except KeyboardInterrupt:
        status = 130
    finally:
        os._exit(status)
