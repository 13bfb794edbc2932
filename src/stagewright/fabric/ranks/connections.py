"""The connections between ranks: one TCP connection for each pair and stream, used in both directions.

    hello of the connecting side     "SWF1" │ session 16 B │ rank u16 │ stream u16 │ HMAC-SHA256 with the token
    answer                           "SWF1" │ HMAC-SHA256 of "answer" and the hello

The lower rank listens, the higher connects. Who does not know the token is turned away before a byte of payload.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from stagewright.errors import RunError, UsageError

__all__ = ["Connections", "check_congestion", "congestion_control", "listen", "receive_exactly"]

_MAGIC = b"SWF1"
_HELLO = struct.Struct("<4s16sHH")
_PROOF_BYTES = 32
_CONNECT_S = 20.0


def listen(host: str, backlog: int) -> socket.socket:
    """A socket that waits for other ranks at an address of this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(max(16, backlog))
    except OSError as error:
        listener.close()
        raise RunError(f"can't listen at {host}: {error.strerror}") from None
    return listener


class Connections:
    """The sockets of one rank by (peer, stream)."""

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
        """Connect to the lower peers and wait for the higher ones."""
        wanted = sorted(set(peers))
        waiting = {(peer, stream) for peer in wanted if peer > self.rank for stream in range(streams)}
        until_s = time.monotonic() + _CONNECT_S
        for peer in (peer for peer in wanted if peer < self.rank):
            for stream in range(streams):
                connection = _connect(addresses[peer], peer, until_s, options)
                self.sockets[peer, stream] = connection
                hello = _HELLO.pack(_MAGIC, session, self.rank, stream)
                connection.settimeout(max(0.1, until_s - time.monotonic()))
                connection.sendall(hello + _proof(token, hello))
        for peer in (peer for peer in wanted if peer < self.rank):
            for stream in range(streams):
                connection = self.sockets[peer, stream]
                hello = _HELLO.pack(_MAGIC, session, self.rank, stream)
                answer = receive_exactly(connection, len(_MAGIC) + _PROOF_BYTES)
                if not hmac.compare_digest(answer, _MAGIC + _proof(token, b"answer" + hello)):
                    raise RunError(f"rank {peer} at {addresses[peer][0]} does not know the token, or is someone else")
        while waiting:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([listener], [], [], left_s)[0]:
                missing = sorted({peer for peer, _ in waiting})
                raise RunError(
                    f"rank {self.rank} waited {_CONNECT_S:.0f} s for rank {', '.join(map(str, missing))}, which "
                    "did not connect; is a firewall between the hosts?"
                )
            connection, _ = listener.accept()
            key = _welcome(connection, session, token, waiting)
            if key is None:
                connection.close()
                continue
            _configure(connection, options)
            self.sockets[key] = connection
            waiting.discard(key)
        for connection in self.sockets.values():
            connection.settimeout(None)

    def break_off(self) -> None:
        """End everything that waits on a connection, from any thread."""
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
        raise RunError(f"can't connect to rank {peer} at {host}:{port}: {error.strerror or error}") from None
    return connection


def _configure(connection: socket.socket, options: Mapping[str, object] | None) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wanted = options or {}
    buffer_bytes = wanted.get("buffer_bytes")
    if isinstance(buffer_bytes, int):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    congestion = wanted.get("congestion")
    if isinstance(congestion, str):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        except OSError as error:
            raise RunError(f"can't use congestion control {congestion!r} here: {error.strerror}") from None


def check_congestion(name: str) -> None:
    """UsageError where this host's kernel does not let us use a congestion control; names those that it has."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        try:
            trial.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            known = ""
            with contextlib.suppress(OSError):
                known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii").strip()
            offer = f"use one of {', '.join(known.split())}" if known else "leave --congestion out"
            raise UsageError(f"can't use congestion control {name!r} here: {error.strerror}; {offer}") from None


def congestion_control(connection: socket.socket) -> str:
    """The congestion control that a connection uses."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def _welcome(
    connection: socket.socket, session: bytes, token: bytes, waiting: set[tuple[int, int]]
) -> tuple[int, int] | None:
    """Who connected, if it is one that we wait for and it knows the token."""
    connection.settimeout(2.0)
    try:
        raw = receive_exactly(connection, _HELLO.size + _PROOF_BYTES)
    except (OSError, RunError):
        return None
    hello, proof = raw[: _HELLO.size], raw[_HELLO.size :]
    magic, theirs, rank, stream = _HELLO.unpack(hello)
    if magic != _MAGIC or theirs != session or (rank, stream) not in waiting:
        return None
    if not hmac.compare_digest(proof, _proof(token, hello)):
        return None
    connection.sendall(_MAGIC + _proof(token, b"answer" + hello))
    return rank, stream


def _proof(token: bytes, content: bytes) -> bytes:
    return hmac.new(token, content, hashlib.sha256).digest()


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """That many bytes; an end before them is an error."""
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise RunError(f"the other side closed the connection after {len(parts)} of {size} bytes")
        parts += part
    return bytes(parts)
