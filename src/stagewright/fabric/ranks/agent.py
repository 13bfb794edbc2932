"""The agent: a server on a host that runs a rank for each coordinator that has the token, one at a time.

A child process serves each coordinator and dies with the agent, so a run leaves nothing behind for the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from stagewright.errors import RunError, UsageError
from stagewright.fabric.ranks.rank import Rank
from stagewright.fabric.ranks.wire import MEET_S, TO_RANK, Channel, CoordinatorHandshake

DEFAULT_PORT = 7651
_MAX_PEERS = 32
_PR_SET_PDEATHSIG = 1


class _Peer(NamedTuple):
    """A connection that has not shown the token yet."""

    handshake: CoordinatorHandshake
    address: str
    until_s: float


def serve_agent(
    host: str, port: int, token: bytes, *, once: bool = False, report: Callable[[str], None] = lambda line: None
) -> None:
    """Serve until interrupted, or one coordinator; `report` receives a line per event."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_MAX_PEERS)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --listen") from None
    with listener:
        report(f"waiting for a coordinator on {host}:{listener.getsockname()[1]}")
        while True:
            channel, address = _meet(listener, token, report)
            report(f"coordinator {address} connected")
            child = os.fork()
            if child == 0:
                _serve(channel, listener, token)
            channel.close()
            os.waitpid(child, 0)
            report(f"coordinator {address} disconnected")
            if once:
                return


def _meet(listener: socket.socket, token: bytes, report: Callable[[str], None]) -> tuple[Channel, str]:
    """Return the first coordinator that shows the token; others neither delay it nor stay longer than `MEET_S`."""
    peers: dict[socket.socket, _Peer] = {}

    def reject(connection: socket.socket, why: object) -> None:
        report(f"rejected {peers.pop(connection).address}: {why}")
        selector.unregister(connection)
        connection.close()

    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            selector.select(min((peer.until_s - time.monotonic() for peer in peers.values()), default=None))
            for connection in [connection for connection, peer in peers.items() if peer.until_s <= time.monotonic()]:
                reject(connection, f"it did not show the token within {MEET_S:.0f} s")
            for key, _ in selector.select(0):
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if ready is listener:
                    if len(peers) >= _MAX_PEERS:
                        reject(next(iter(peers)), f"more than {_MAX_PEERS} peers wait")
                    accepted, address = listener.accept()
                    accepted.settimeout(MEET_S)
                    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    peers[accepted] = _Peer(CoordinatorHandshake(token), str(address[0]), time.monotonic() + MEET_S)
                    selector.register(accepted, selectors.EVENT_READ)
                    continue
                if ready not in peers:
                    continue  # it was rejected a moment ago
                handshake = peers[ready].handshake
                try:
                    content = ready.recv(handshake.num_missing)
                    if not content:
                        raise RunError("it closed the connection")
                    ready.sendall(handshake.receive(content))
                except (OSError, RunError) as error:
                    reject(ready, error)
                    continue
                if handshake.key is not None:
                    address = peers.pop(ready).address
                    for other in list(peers):
                        reject(other, "another coordinator has connected")
                    ready.settimeout(None)
                    return Channel(ready, handshake.key, accepts=TO_RANK), address


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
