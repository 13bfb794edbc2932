"""Tensors between processes of one machine that share memory: each writes to slots of its own, the others read them.

    worker 0                               Unix socket                          worker 1
    copy the tensor to slot 3, record ──── "slot 3, 8 MiB" ────────────────►    wait for the event, read slot 3, record
    slot 3 is free again, in stream order  ◄──────────────────── "3 is read"

One socket for each ordered pair of workers, opened at its first use. Messages say what is where, in order; no tensor
goes through them, and no host waits for a GPU. A worker that has ended closes its sockets, which its peers notice. They
have names in no folder, so that a killed worker leaves nothing; processes of other users are turned away.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from stagewright.shared_memory.slots import ReadSlot, SharedMemory, WrittenSlot, view_bytes

_MESSAGE_BYTES = 1 << 16
_LONGEST_WAIT_S = 30.0
_CLOSED = "connection closed by peer: worker"


class SharedMemoryExchange:
    """Writes to and reads from the other workers of one group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, memory: SharedMemory) -> None:
        self.rank, self.size, self._memory = rank, size, memory
        self._store, self._timeout_s = store, timeout.total_seconds()
        self._lock = threading.RLock()
        self._listener: socket.socket | None = None
        self._to: dict[int, socket.socket] = {}
        self._from: dict[int, socket.socket] = {}
        self._slots: list[WrittenSlot] = []
        self._read_slots: dict[tuple[int, int], ReadSlot] = {}
        name = f"stagewright-{secrets.token_hex(16)}"
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(_address(name))
            self._listener.listen(size)
            self._listener.settimeout(self._timeout_s)
            store.set(f"address-{rank}", name)
        except BaseException:
            self.close()
            raise

    def write(self, tensor: torch.Tensor, readers: Sequence[int], most_unread: int | None = None) -> None:
        """Copy a tensor to a slot for these readers, in stream order.

        Returns without waiting, but for a reader that has not read more than ``most_unread`` others: a writer that is
        ahead would hold ever more slots.
        """
        with self._lock, torch.no_grad():
            if most_unread is not None:
                for reader in readers:
                    while sum(reader in slot.unread for slot in self._slots) > most_unread:
                        self._take_answer(self._to[reader], reader)
            slot = self._free_slot(tensor.nbytes)
            if tensor.numel():
                view_bytes(slot.buffer, tensor).copy_(tensor)
            self._memory.record(slot.written)
            slot.unread, slot.last_readers = set(readers), readers
            for reader in readers:
                message: dict[str, Any] = {"slot": slot.number, "bytes": tensor.nbytes}
                if reader not in slot.known_to:
                    message |= slot.described
                    slot.known_to.add(reader)
                self._send(self._socket_to(reader), message, reader)

    @contextlib.contextmanager
    def reading(self, writer: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
        """Wait until a worker has written its next tensor for this one; yields a view of it, valid in the block."""
        with self._lock, torch.no_grad():
            connection = self._socket_from(writer)
            message = self._receive(connection, writer)
            if message["bytes"] != like.nbytes:
                raise RuntimeError(
                    f"worker {writer} of the group sent {message['bytes']} bytes where {like.nbytes} are expected"
                )
            answer = {"slot": message["slot"]}
            slot = self._read_slots.get((writer, message["slot"]))
            if slot is None:
                event, answer["event"] = self._memory.make_event()
                try:
                    buffer, written = self._memory.open(message["buffer"]), self._memory.open_event(message["event"])
                except RuntimeError as error:  # it has ended since
                    raise RuntimeError(f"{_CLOSED} {writer} of its group ({error})") from error
                slot = self._read_slots[writer, message["slot"]] = ReadSlot(buffer, written, event)
            self._memory.wait(slot.written)
            yield view_bytes(slot.buffer, like)
            self._memory.record(slot.read)
            with contextlib.suppress(RuntimeError):  # a writer that has ended needs no answer
                self._send(connection, answer, writer)

    def is_written(self, writer: int) -> bool:
        """Whether `reading` would not wait on the host."""
        with self._lock:
            return _is_readable(self._socket_from(writer))

    def finish(self) -> None:
        """Wait until others have read what was written for them, or have ended; then close.

        A process that ends takes what it has written along.
        """
        end_s = time.monotonic() + min(self._timeout_s, _LONGEST_WAIT_S)
        with self._lock:
            for reader, connection in self._to.items():
                try:
                    while any(reader in slot.unread for slot in self._slots):
                        if not _is_readable(connection, end_s - time.monotonic()):
                            break
                        self._take_answer(connection, reader)
                except RuntimeError:
                    continue  # it has ended
        self.close()

    def close(self) -> None:
        """Close every socket; peers that still read get an error."""
        for connection in (*self._to.values(), *self._from.values()):
            connection.close()
        if self._listener is not None:
            self._listener.close()
        self._memory.close()

    def _free_slot(self, num_bytes: int) -> WrittenSlot:
        """Return the smallest free slot that is large enough, or a new one."""
        for reader, connection in self._to.items():
            while _is_readable(connection):
                self._take_answer(connection, reader)
        free = [slot for slot in self._slots if not slot.unread and slot.buffer.nbytes >= num_bytes]
        if free:
            slot = min(free, key=lambda slot: slot.buffer.nbytes)
            for reader in slot.last_readers:
                self._memory.wait(slot.read[reader])
            return slot
        buffer = self._memory.allocate(max(num_bytes, 1))
        event, described = self._memory.make_event()
        slot = WrittenSlot(len(self._slots), buffer, event, {"buffer": self._memory.export(buffer), "event": described})
        self._slots.append(slot)
        return slot

    def _take_answer(self, connection: socket.socket, reader: int) -> None:
        """Receive that a reader has read a slot."""
        answer = self._receive(connection, reader)
        slot = self._slots[answer["slot"]]
        if "event" in answer:
            slot.read[reader] = self._memory.open_event(answer["event"])
        slot.unread.discard(reader)

    def _socket_to(self, reader: int) -> socket.socket:
        """Return the socket to a reader; connect at its first use."""
        if reader not in self._to:
            name = self._store.get(f"address-{reader}").decode()
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(self._timeout_s)
            connection.connect(_address(name))
            self._to[reader] = connection
            self._send(connection, {"rank": self.rank}, reader)
        return self._to[reader]

    def _socket_from(self, writer: int) -> socket.socket:
        """Return the socket from a writer; accept connections until it has connected."""
        assert self._listener is not None
        while writer not in self._from:
            connection, _ = self._listener.accept()
            if _user_of(connection) != os.geteuid():
                connection.close()
                continue
            connection.settimeout(self._timeout_s)
            self._from[self._receive(connection, writer)["rank"]] = connection
        return self._from[writer]

    @staticmethod
    def _send(connection: socket.socket, message: dict[str, Any], peer: int) -> None:
        try:
            connection.send(json.dumps(message).encode())
        except OSError as error:
            raise RuntimeError(f"{_CLOSED} {peer} of its group ({error})") from error

    @staticmethod
    def _receive(connection: socket.socket, peer: int) -> dict[str, Any]:
        try:
            message = connection.recv(_MESSAGE_BYTES)
        except OSError as error:
            raise RuntimeError(f"{_CLOSED} {peer} of its group ({error})") from error
        if not message:
            raise RuntimeError(f"{_CLOSED} {peer} of its group")
        return json.loads(message)  # type: ignore[no-any-return]


def _address(name: str) -> str:
    """Return the address of a socket in Linux's abstract namespace."""
    return f"\0{name}"


def _is_readable(connection: socket.socket, wait_s: float = 0.0) -> bool:
    """Whether a message has come, or the other end has closed."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(max(0.0, wait_s) * 1e3))


def _user_of(connection: socket.socket) -> int:
    """Return the user of the process at the other end."""
    form = struct.Struct("iII")  # process, user, group
    return int(form.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size))[1])
