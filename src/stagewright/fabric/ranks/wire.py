"""The control protocol of coordinator and ranks: a fixed set of messages of JSON fields and a block of bytes.

    frame      JSON length u32 │ block length u32 │ JSON │ block │ HMAC-SHA256, of a counter and all before it

    coordinator                                rank (an agent on a host, or a local process)
      prepare ───────────────────────────────►   listening
      connect ───────────────────────────────►   connected
      probe   ───────────────────────────────►   probed
      run     ───────────────────────────────►   trials … steps … done      alive, every second
      stop, finish ──────────────────────────►   (fault, at any time)

Over a network, both sides first authenticate with the token, and every frame carries a MAC with a session key: nobody
else can start or change a run. The content is not encrypted and contains no secrets. Nothing received is executed.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from stagewright.errors import RunError, UsageError
from stagewright.fabric.ranks.connections import keyed_digest, receive_exactly
from stagewright.files.json_values import parse_json

TO_RANK = frozenset({"prepare", "connect", "probe", "run", "stop", "finish"})
TO_COORDINATOR = frozenset({"listening", "connected", "probed", "trials", "steps", "done", "alive", "fault"})
_LENGTHS = struct.Struct("<II")
_COUNTER = struct.Struct("<Q")
_MAX_JSON_BYTES = 16 * 2**20
_MAX_BLOCK_BYTES = 256 * 2**20
_MAC_BYTES = 32
_NONCE_BYTES = 32
_MAGIC = b"SWC1"
MEET_S = 5.0
"""Time limit of a whole handshake."""


class Frame(NamedTuple):
    """One message."""

    kind: str
    fields: dict[str, Any]
    block: bytes


class Channel:
    """One end of a control connection; `send` is thread-safe."""

    def __init__(self, connection: socket.socket, key: bytes | None, *, accepts: frozenset[str]) -> None:
        self.socket = connection
        self._key = key
        self._accepts = accepts
        self._sent = 0
        self._received = 0
        self._lock = threading.Lock()

    def send(self, kind: str, fields: Mapping[str, Any] | None = None, block: bytes = b"") -> None:
        text = json.dumps({"kind": kind, **(fields or {})}).encode()
        with self._lock:
            frame = _LENGTHS.pack(len(text), len(block)) + text + block
            self.socket.sendall(frame + self._mac(b"<" if self._accepts is TO_COORDINATOR else b">", self._sent, frame))
            self._sent += 1

    def receive(self) -> Frame:
        """Receive the next message; raise RunError if it is unknown, too long or has a wrong MAC."""
        lengths = receive_exactly(self.socket, _LENGTHS.size)
        json_bytes, block_bytes = _LENGTHS.unpack(lengths)
        if json_bytes > _MAX_JSON_BYTES or block_bytes > _MAX_BLOCK_BYTES:
            raise RunError(f"a message of {json_bytes} + {block_bytes} bytes is too long; is the peer stagewright?")
        body = receive_exactly(self.socket, json_bytes + block_bytes)
        expected = self._mac(b">" if self._accepts is TO_COORDINATOR else b"<", self._received, lengths + body)
        if expected and not hmac.compare_digest(receive_exactly(self.socket, _MAC_BYTES), expected):
            raise RunError("a message has a wrong MAC: it was changed in transit")
        self._received += 1
        try:
            fields = parse_json(body[:json_bytes])
            kind = fields.pop("kind")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise RunError("a message is not a JSON object with a kind") from None
        if not isinstance(kind, str) or kind not in self._accepts:
            raise RunError(f"unknown message kind {kind!r}")
        return Frame(kind, fields, body[json_bytes:])

    def close(self) -> None:
        self.socket.close()

    def _mac(self, direction: bytes, counter: int, content: bytes) -> bytes:
        if self._key is None:
            return b""
        return keyed_digest(self._key, direction + _COUNTER.pack(counter) + content)


def check_token(token: str) -> bytes:
    """Return the shared token as bytes; reject short tokens, which could be guessed."""
    if len(token) < 16:
        raise UsageError(
            f"the token has {len(token)} characters, but needs at least 16; "
            "make one with: python -c 'import secrets; print(secrets.token_hex())'"
        )
    return token.encode()


def authenticate_agent(connection: socket.socket, token: bytes) -> Channel:
    """Authenticate with an agent: both ends prove that they know the token."""
    until_s = time.monotonic() + MEET_S
    connection.settimeout(MEET_S)
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_MAGIC + own_nonce)
    answer = receive_exactly(connection, _NONCE_BYTES + _MAC_BYTES, until_s)
    peer_nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, keyed_digest(token, b"agent" + own_nonce + peer_nonce)):
        raise UsageError("the agent has another token; use the same --token-file on both hosts")
    connection.sendall(keyed_digest(token, b"coordinator" + own_nonce + peer_nonce))
    connection.settimeout(None)
    return Channel(connection, keyed_digest(token, b"key" + own_nonce + peer_nonce), accepts=TO_COORDINATOR)


class CoordinatorHandshake:
    """The agent's end of the authentication with one peer, fed with bytes as they arrive."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._received = b""
        self._nonces: bytes | None = None
        self.key: bytes | None = None
        """The key of the session, once the peer has proved that it has the token."""

    @property
    def num_missing(self) -> int:
        """Bytes to receive next; more would belong to the first message."""
        wanted = len(_MAGIC) + _NONCE_BYTES if self._nonces is None else _MAC_BYTES
        return wanted - len(self._received)

    def receive(self, content: bytes) -> bytes:
        """Take the peer's next bytes and return the answer; RunError for any other program and another token."""
        self._received += content
        if not _MAGIC.startswith(self._received[: len(_MAGIC)]) and self._nonces is None:
            raise RunError("the peer is not a coordinator")
        if self.num_missing > 0:
            return b""
        received, self._received = self._received, b""
        if self._nonces is None:
            own_nonce = secrets.token_bytes(_NONCE_BYTES)
            self._nonces = received[len(_MAGIC) : len(_MAGIC) + _NONCE_BYTES] + own_nonce
            return own_nonce + keyed_digest(self._token, b"agent" + self._nonces)
        if not hmac.compare_digest(received[:_MAC_BYTES], keyed_digest(self._token, b"coordinator" + self._nonces)):
            raise RunError("the coordinator has another token")
        self.key = keyed_digest(self._token, b"key" + self._nonces)
        return b""
