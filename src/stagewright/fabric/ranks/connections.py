"""Connections between ranks: one TCP connection per pair and stream, used in both directions.

    hello of the connecting side     "SWF1" │ session 16 B │ rank u16 │ stream u16 │ HMAC-SHA256 with the token
    answer                           "SWF1" │ HMAC-SHA256 of "answer" and the hello

The lower rank listens, the higher connects. A peer that does not know the token is rejected before any payload.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from stagewright.errors import RunError, UsageError

_MAGIC = b"SWF1"
_HELLO = struct.Struct("<4s16sHH")
_PROOF_BYTES = 32
_CONNECT_S = 20.0
_MAX_UNAUTHENTICATED = 256
"""Connections that have not shown the token yet."""


def listen(host: str, backlog: int) -> socket.socket:
    """Open a socket that accepts other ranks."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(max(16, backlog))
    except OSError as error:
        listener.close()
        raise RunError(f"cannot listen on {host}: {error.strerror}") from None
    return listener


class Connections:
    """Sockets of one rank by (peer, stream)."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sockets: dict[tuple[int, int], socket.socket] = {}

    def open(
        self,
        listener: socket.socket,
        addresses: Sequence[tuple[str, int]],
        peers: Iterable[int],
        *,
        streams: int,
        session: bytes,
        token: bytes,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Connect to lower ranks and accept connections of higher ranks."""
        wanted = sorted(set(peers))
        waiting = {(peer, stream) for peer in wanted if peer > self.rank for stream in range(streams)}
        until_s = time.monotonic() + _CONNECT_S
        hellos: dict[tuple[int, int], bytes] = {}
        for peer, stream in product((peer for peer in wanted if peer < self.rank), range(streams)):
            connection = self.sockets[peer, stream] = _connect(addresses[peer], peer, until_s, options)
            hello = hellos[peer, stream] = _HELLO.pack(_MAGIC, session, self.rank, stream)
            connection.settimeout(max(0.1, until_s - time.monotonic()))
            connection.sendall(hello + keyed_digest(token, hello))
        for (peer, stream), hello in hellos.items():
            answer = receive_exactly(self.sockets[peer, stream], len(_MAGIC) + _PROOF_BYTES)
            if not hmac.compare_digest(answer, _MAGIC + keyed_digest(token, b"answer" + hello)):
                raise RunError(f"rank {peer} at {addresses[peer][0]} has another token or is another program")
        for key, connection in _accept_peers(listener, waiting, self.rank, until_s, session, token):
            _configure(connection, options)
            self.sockets[key] = connection
        for connection in self.sockets.values():
            connection.settimeout(None)

    def shut_down(self) -> None:
        """Shut down all connections, from any thread, which ends all waits on them."""
        for connection in self.sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for connection in self.sockets.values():
            connection.close()
        self.sockets.clear()


def _connect(
    address: tuple[str, int], peer: int, until_s: float, options: Mapping[str, object] | None
) -> socket.socket:
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    _configure(connection, options)
    connection.settimeout(max(0.1, until_s - time.monotonic()))
    try:
        connection.connect((host, port))
    except OSError as error:
        connection.close()
        raise RunError(f"cannot connect to rank {peer} at {host}:{port}: {error.strerror or error}") from None
    return connection


def _configure(connection: socket.socket, options: Mapping[str, object] | None) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    values = options or {}
    buffer_bytes = values.get("buffer_bytes")
    if isinstance(buffer_bytes, int):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    congestion = values.get("congestion")
    if isinstance(congestion, str):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        except OSError as error:
            raise RunError(f"cannot use congestion control {congestion!r} here: {error.strerror}") from None


def check_congestion(name: str) -> None:
    """Raise UsageError if this host's kernel does not offer a congestion control; list those that it offers."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        try:
            trial.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            available = ""
            with contextlib.suppress(OSError):
                available = (
                    Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii").strip()
                )
            offer = f"use one of {', '.join(available.split())}" if available else "omit --congestion"
            raise UsageError(f"cannot use congestion control {name!r} here: {error.strerror}; {offer}") from None


def congestion_control(connection: socket.socket) -> str:
    """Return the congestion control of a connection."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def _accept_peers(
    listener: socket.socket, waiting: set[tuple[int, int]], rank: int, until_s: float, session: bytes, token: bytes
) -> Iterator[tuple[tuple[int, int], socket.socket]]:
    """Yield (rank, stream) and connection of each expected peer; a peer without the token does not delay others."""
    received: dict[socket.socket, bytes] = {}
    try:
        while waiting:
            left_s = until_s - time.monotonic()
            ready = select.select([listener, *received], [], [], left_s)[0] if left_s > 0 else []
            if not ready:
                missing = sorted({peer for peer, _ in waiting})
                raise RunError(
                    f"rank {rank} got no connection from rank {', '.join(map(str, missing))} within "
                    f"{_CONNECT_S:.0f} s; is there a firewall between the hosts?"
                )
            for connection in ready:
                if connection is listener:
                    if len(received) >= _MAX_UNAUTHENTICATED:
                        oldest = next(iter(received))
                        del received[oldest]
                        oldest.close()
                    accepted, _ = listener.accept()
                    received[accepted] = b""
                elif connection in received:
                    key = _receive_hello(connection, received, session, token, waiting)
                    if key is not None:
                        waiting.discard(key)
                        yield key, connection
    finally:
        for connection in received:
            connection.close()


def _receive_hello(
    connection: socket.socket,
    received: dict[socket.socket, bytes],
    session: bytes,
    token: bytes,
    waiting: set[tuple[int, int]],
) -> tuple[int, int] | None:
    """Receive more of a hello; return (rank, stream) once it is complete and valid, close any other connection."""
    size = _HELLO.size + _PROOF_BYTES
    with contextlib.suppress(OSError):
        part = connection.recv(size - len(received[connection]))
        received[connection] += part
        if part and len(received[connection]) < size:
            return None
        raw = received.pop(connection)
        hello, proof = raw[: _HELLO.size], raw[_HELLO.size :]
        if len(raw) == size and hmac.compare_digest(proof, keyed_digest(token, hello)):
            magic, peer_session, rank, stream = _HELLO.unpack(hello)
            if magic == _MAGIC and peer_session == session and (rank, stream) in waiting:
                connection.sendall(_MAGIC + keyed_digest(token, b"answer" + hello))
                return rank, stream
    received.pop(connection, None)
    connection.close()
    return None


def keyed_digest(token: bytes, content: bytes) -> bytes:
    """Return the HMAC-SHA256 of a content with the token."""
    return hmac.new(token, content, hashlib.sha256).digest()


def receive_exactly(connection: socket.socket, size: int, until_s: float | None = None) -> bytes:
    """Receive exactly ``size`` bytes; raise RunError if the connection ends first, TimeoutError after ``until_s``."""
    parts = bytearray()
    while len(parts) < size:
        if until_s is not None:
            connection.settimeout(max(1e-3, until_s - time.monotonic()))
        part = connection.recv(min(size - len(parts), 2**20))
        if not part:
            raise RunError(f"the peer closed the connection after {len(parts)} of {size} bytes")
        parts += part
        if until_s is not None and time.monotonic() > until_s and len(parts) < size:
            raise TimeoutError("timed out")
    return bytes(parts)
