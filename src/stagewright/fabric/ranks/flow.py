"""One message at one rank: its transfers by connection, its buffers and its progress."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stagewright.fabric.collectives.collective import Collective
from stagewright.fabric.collectives.program import Program, Transfer, compile_program, expected, payload

HEADER = struct.Struct("<IHHI")  # before each slice: trial, message, 0, size
SMALL_BYTES = 16 * 1024  # fits into a socket buffer, so a send never waits
_VARIANTS_UP_TO = 4 * 2**20  # larger messages always carry the same payload, to save memory


class Flow:
    """One message at this rank: program, buffers, progress."""

    def __init__(
        self,
        message: int,
        collective: Collective,
        group: Sequence[int],
        rank: int,
        num_bytes: int,
        *,
        streams: int,
        seed: int,
        slice_bytes: int,
    ) -> None:
        self.message = message
        self.num_bytes = num_bytes
        program = compile_program(collective, group.index(rank), num_bytes, streams=streams, slice_bytes=slice_bytes)
        self.program: Program = program
        variants = range(2 if num_bytes <= _VARIANTS_UP_TO else 1)
        self.inputs = [payload(collective, program, num_bytes, seed, variant) for variant in variants]
        self.results = [expected(collective, program, num_bytes, seed, variant) for variant in variants]
        self.array: npt.NDArray[Any] = self.inputs[0].copy()
        view = memoryview(self.array.data).cast("B") if len(self.array) else memoryview(b"")
        # Transfers by connection, in order.
        self.sends: dict[tuple[int, int], list[tuple[Transfer, memoryview]]] = {}
        self.receives: dict[tuple[int, int], list[tuple[Transfer, memoryview, npt.NDArray[Any] | None]]] = {}
        for transfer in program.sends:
            part = view[transfer.offset : transfer.offset + transfer.size]
            self.sends.setdefault((group[transfer.peer], transfer.stream), []).append((transfer, part))
        item = program.item_bytes
        for transfer in program.receives:
            part = view[transfer.offset : transfer.offset + transfer.size]
            target = self.array[transfer.offset // item : (transfer.offset + transfer.size) // item]
            self.receives.setdefault((group[transfer.peer], transfer.stream), []).append(
                (transfer, part, target if transfer.reduce else None)
            )
        self._blockers = [transfer.blockers for transfer in program.sends]
        self.sent_s = [0.0] * program.num_steps
        self.received_s = [0.0] * program.num_steps
        self.largest_step = _largest_step(program)
        self.operations: list[Operation] | None = None
        self.reset(0)

    def reset(self, trial: int) -> None:
        """Restart with the payload of a trial."""
        np.copyto(self.array, self.inputs[trial % len(self.inputs)])
        self.blocked = self._blockers.copy()
        self.sends_left = len(self.program.sends)
        self.receives_left = len(self.program.receives)
        self.next_send = dict.fromkeys(self.sends, 0)
        self.next_receive = dict.fromkeys(self.receives, 0)

    def is_correct(self, trial: int) -> bool:
        """Check the buffer against the expected result."""
        values, checked = self.results[trial % len(self.results)]
        if checked is None:
            return bool(np.array_equal(self.array, values))
        return bool(np.array_equal(self.array[checked], values[checked]))


class Operation(NamedTuple):
    """One complete send or receive of a small message."""

    link: Link
    step: int
    size: int
    view: memoryview
    """The part of the buffer."""
    target: npt.NDArray[Any] | None
    """Of a reducing receive."""
    arrived: npt.NDArray[Any] | None
    """Of a receive: its payload in the link's scratch space."""
    sends: bool


def _largest_step(program: Program) -> int:
    """Return the most bytes that one connection carries in one step, in either direction."""
    totals: dict[tuple[bool, int, int, int], int] = {}
    for sends, transfers in ((True, program.sends), (False, program.receives)):
        for transfer in transfers:
            key = (sends, transfer.step, transfer.peer, transfer.stream)
            totals[key] = totals.get(key, 0) + transfer.size
    return max(totals.values(), default=0)


class Link:
    """One connection and its partly sent and partly received slices."""

    __slots__ = ("got", "header", "incoming", "key", "out", "peer", "scratch", "socket", "stalled")

    def __init__(self, key: tuple[int, int], connection: socket.socket, scratch_bytes: int) -> None:
        self.key = key
        self.peer = key[0]
        self.socket = connection
        self.header = memoryview(bytearray(HEADER.size))
        self.got = 0  # bytes of header and payload received of the incoming slice
        self.incoming: tuple[Flow, Transfer, memoryview, npt.NDArray[Any] | None] | None = None
        self.out: tuple[Flow, Transfer, memoryview, bytes, int] | None = None  # …, header, bytes sent
        self.stalled = False  # the send buffer is full
        self.scratch = memoryview(bytearray(max(scratch_bytes, SMALL_BYTES) + HEADER.size))
