"""How coordinator and ranks talk: a fixed set of messages, each JSON fields and a block of bytes. Nothing is executed.

    frame      JSON length u32 │ block length u32 │ JSON │ block │ HMAC-SHA256, of a counter and all before it

    coordinator                                rank (an agent on a host, or a local process)
      prepare ───────────────────────────────►   listening
      connect ───────────────────────────────►   connected
      probe   ───────────────────────────────►   probed
      run     ───────────────────────────────►   trials … steps … done      alive, once a second
      stop, finish ──────────────────────────►   (fault, whenever)

Over a network both sides first prove that they know the token, and every frame carries a code made with a key of that
meeting: a stranger can neither start a run nor change one. The content is not secret, so nothing secret is sent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from stagewright.errors import RunError, UsageError
from stagewright.fabric.ranks.connections import receive_exactly

__all__ = ["Channel", "Frame", "check_token", "meet_agent", "meet_coordinator"]

TO_RANK = frozenset({"prepare", "connect", "probe", "run", "stop", "finish"})
TO_COORDINATOR = frozenset({"listening", "connected", "probed", "trials", "steps", "done", "alive", "fault"})
_LENGTHS = struct.Struct("<II")
_COUNTER = struct.Struct("<Q")
_MOST_JSON = 16 * 2**20
_MOST_BLOCK = 256 * 2**20
_MAC_BYTES = 32
_NONCE_BYTES = 32
_MAGIC = b"SWC1"
_MEET_S = 10.0


class Frame(NamedTuple):
    """One message."""

    kind: str
    fields: dict[str, Any]
    block: bytes


class Channel:
    """One side of a control connection; `send` may be called from any thread."""

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
            self.socket.sendall(
                frame + self._code(b"<" if self._accepts is TO_COORDINATOR else b">", self._sent, frame)
            )
            self._sent += 1

    def receive(self) -> Frame:
        """The next message; what is not in the fixed set, too long or not signed is an error."""
        lengths = receive_exactly(self.socket, _LENGTHS.size)
        json_bytes, block_bytes = _LENGTHS.unpack(lengths)
        if json_bytes > _MOST_JSON or block_bytes > _MOST_BLOCK:
            raise RunError(
                f"a message of {json_bytes} + {block_bytes} bytes is too long; is the other side stagewright?"
            )
        body = receive_exactly(self.socket, json_bytes + block_bytes)
        expected = self._code(b">" if self._accepts is TO_COORDINATOR else b"<", self._received, lengths + body)
        if expected and not hmac.compare_digest(receive_exactly(self.socket, _MAC_BYTES), expected):
            raise RunError("a message was not signed by the other side; it was changed on its way")
        self._received += 1
        try:
            fields = json.loads(body[:json_bytes])
            kind = fields.pop("kind")
        except (ValueError, KeyError, AttributeError):
            raise RunError("a message is not JSON with a kind") from None
        if kind not in self._accepts:
            raise RunError(f"a message of kind {kind!r} is not in the fixed set")
        return Frame(kind, fields, body[json_bytes:])

    def close(self) -> None:
        self.socket.close()

    def _code(self, direction: bytes, counter: int, content: bytes) -> bytes:
        if self._key is None:
            return b""
        return hmac.new(self._key, direction + _COUNTER.pack(counter) + content, hashlib.sha256).digest()


def check_token(token: str) -> bytes:
    """The shared token as bytes; a short one could be guessed."""
    if len(token) < 16:
        raise UsageError(
            f"the token has {len(token)} characters, but needs at least 16; "
            "make one with: python -c 'import secrets; print(secrets.token_hex())'"
        )
    return token.encode()


def meet_agent(connection: socket.socket, token: bytes) -> Channel:
    """The coordinator's side: both prove that they know the token."""
    connection.settimeout(_MEET_S)
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_MAGIC + mine)
    answer = receive_exactly(connection, _NONCE_BYTES + _MAC_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"agent" + mine + theirs)):
        raise UsageError("the agent has another token; give both sides the same --token-file")
    connection.sendall(_proof(token, b"coordinator" + mine + theirs))
    connection.settimeout(None)
    return Channel(connection, _proof(token, b"key" + mine + theirs), accepts=TO_COORDINATOR)


def meet_coordinator(connection: socket.socket, token: bytes) -> Channel:
    """The agent's side."""
    connection.settimeout(_MEET_S)
    hello = receive_exactly(connection, len(_MAGIC) + _NONCE_BYTES)
    if not hello.startswith(_MAGIC):
        raise RunError("someone connected who is not a coordinator")
    theirs, mine = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(mine + _proof(token, b"agent" + theirs + mine))
    proof = receive_exactly(connection, _MAC_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"coordinator" + theirs + mine)):
        raise RunError("a coordinator with another token was turned away")
    connection.settimeout(None)
    return Channel(connection, _proof(token, b"key" + theirs + mine), accepts=TO_RANK)


def _proof(token: bytes, content: bytes) -> bytes:
    return hmac.new(token, content, hashlib.sha256).digest()
