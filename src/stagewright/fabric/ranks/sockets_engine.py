"""The sockets engine: runs collectives over TCP connections and notes when each step was sent and received.

    slice on the wire     trial u32 │ message u16 │ 0 │ size u32 │ payload       12 bytes before each slice
    barrier               trial u32 │ 0xFFFF │ flags │ round u32                  log2(n) rounds: all hear of all

One thread. Nothing blocks but the wait for what must come next: sends go out as far as the kernel takes them, receives
land in the buffer itself (or in a scratch slice where they are added), and where only one connection can bring news,
the wait is the receive itself: one system call instead of two. Small messages go step by step with blocking calls.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stagewright.errors import RunError
from stagewright.fabric.collectives.collective import Collective
from stagewright.fabric.collectives.program import Program, Transfer, compile_program, expected, payload
from stagewright.fabric.ranks.connections import Connections
from stagewright.fabric.ranks.tcp_info import retransmits

__all__ = ["Flow", "SocketEngine"]

_HEADER = struct.Struct("<IHHI")
_BARRIER = 0xFFFF
_NOW = socket.MSG_DONTWAIT
_ALL = socket.MSG_WAITALL
_SMALL_BYTES = 16 * 1024  # fits into a socket buffer, so that a send never waits
_ROOMY_BYTES = 64 * 1024  # a buffer that was asked for and is smaller may not hold it
_VARIANTS_UP_TO = 4 * 2**20  # larger messages always carry the same payload, to save memory


class Flow:
    """One message at this rank: its program, its buffers, and how far it is."""

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
        # By connection: what is sent and received there, in order.
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
        self.operations: list[_Operation] | None = None
        self.reset(0)

    def reset(self, trial: int) -> None:
        """Back to the start, with the payload of that trial."""
        np.copyto(self.array, self.inputs[trial % len(self.inputs)])
        self.blocked = self._blockers.copy()
        self.sends_left = len(self.program.sends)
        self.receives_left = len(self.program.receives)
        self.next_send = dict.fromkeys(self.sends, 0)
        self.next_receive = dict.fromkeys(self.receives, 0)

    def is_right(self, trial: int) -> bool:
        """Whether the buffer holds what it must."""
        values, checked = self.results[trial % len(self.results)]
        if checked is None:
            return bool(np.array_equal(self.array, values))
        return bool(np.array_equal(self.array[checked], values[checked]))


class _Operation(NamedTuple):
    """Of a small message: one whole send or receive, with everything that it needs."""

    link: _Link
    step: int
    size: int
    view: memoryview  # of the buffer
    target: npt.NDArray[Any] | None  # of a receive that is added
    arrived: npt.NDArray[Any] | None  # of a receive: its payload in the link's scratch
    sends: bool


def _largest_step(program: Program) -> int:
    """The most bytes that one connection gets in one step, either way."""
    totals: dict[tuple[bool, int, int, int], int] = {}
    for sends, transfers in ((True, program.sends), (False, program.receives)):
        for one in transfers:
            key = (sends, one.step, one.peer, one.stream)
            totals[key] = totals.get(key, 0) + one.size
    return max(totals.values(), default=0)


class _Link:
    """One connection, with what is half sent and half received on it."""

    __slots__ = ("found", "got", "header", "key", "out", "peer", "scratch", "socket", "stalled")

    def __init__(self, key: tuple[int, int], connection: socket.socket, scratch_bytes: int) -> None:
        self.key = key
        self.peer = key[0]
        self.socket = connection
        self.header = memoryview(bytearray(_HEADER.size))
        self.got = 0  # bytes of header and payload of the slice that is arriving
        self.found: tuple[Flow, Transfer, memoryview, npt.NDArray[Any] | None] | None = None
        self.out: tuple[Flow, Transfer, memoryview, bytes, int] | None = None  # …, header, bytes sent
        self.stalled = False  # the kernel took no more
        self.scratch = memoryview(bytearray(max(scratch_bytes, _SMALL_BYTES) + _HEADER.size))


class SocketEngine:
    """Runs flows over the connections of one rank."""

    def __init__(
        self,
        connections: Connections,
        num_ranks: int,
        *,
        scratch_bytes: int,
        spin_s: float = 0.0,
        buffer_bytes: int | None = None,
    ) -> None:
        self.rank = connections.rank
        self.num_ranks = num_ranks
        self.spin_s = spin_s
        self._small_bytes = _SMALL_BYTES if buffer_bytes is None or buffer_bytes >= _ROOMY_BYTES else -1
        self.receive_wait_s = [0.0] * num_ranks
        self.send_wait_s = [0.0] * num_ranks
        self._links = {key: _Link(key, one, scratch_bytes) for key, one in connections.sockets.items()}
        self._active: list[Flow] = []
        self._trial = 0

    def retransmits(self) -> int:
        """Segments that this rank has sent again so far, over all connections."""
        return sum(retransmits(link.socket) for link in self._links.values())

    def retransmits_to(self, peer: int) -> int:
        """The same, to one rank."""
        return sum(retransmits(link.socket) for link in self._links.values() if link.peer == peer)

    def barrier(self, trial: int, flags: int = 0) -> int:
        """Wait for all; returns everybody's flags, or-ed."""
        distance, number = 1, 0
        while distance < self.num_ranks:
            to = self._links[(self.rank + distance) % self.num_ranks, 0]
            source = self._links[(self.rank - distance) % self.num_ranks, 0]
            to.socket.sendall(_HEADER.pack(trial, _BARRIER, flags, number))
            got = source.socket.recv_into(source.header, _HEADER.size, socket.MSG_WAITALL)
            if got != _HEADER.size:
                raise self._lost(source)
            there, message, more, their_number = _HEADER.unpack(source.header)
            if (there, message, their_number) != (trial, _BARRIER, number):
                raise RunError(
                    f"rank {self.rank} is at the barrier of trial {trial}, but rank {source.peer} sent trial {there}, "
                    f"message {message}: the ranks lost step"
                )
            flags |= more
            distance *= 2
            number += 1
        return flags

    def run(self, flow: Flow, trial: int) -> None:
        """One message alone, to its end."""
        if flow.largest_step <= self._small_bytes:
            self._run_small(flow, trial)
            return
        self._trial = trial
        self._active = [flow]
        outgoing = [self._links[key] for key in flow.sends]
        incoming = [self._links[key] for key in flow.receives]
        while True:
            stalled = False
            if flow.sends_left:
                for link in outgoing:
                    if self._push(link):
                        stalled = True
            if flow.receives_left:
                left = [link for link in incoming if flow.next_receive[link.key] < len(flow.receives[link.key])]
                if len(left) == 1 and not stalled:
                    self._pull_waiting(left[0], flow)
                elif not self._pull_all(left, flow):
                    self._wait(left, outgoing if stalled else (), None)
            elif flow.sends_left:
                self._wait((), outgoing, None)
            else:
                return

    def _run_small(self, flow: Flow, trial: int) -> None:
        """Step by step, each send and each receive one system call: a send that fits into the buffers never waits."""
        if flow.operations is None:
            flow.operations = self._operations(flow)
        clock, message = time.perf_counter, flow.message
        now = clock()
        for link, step, size, view, target, arrived, sends in flow.operations:
            if sends:
                try:
                    link.socket.sendall(_HEADER.pack(trial, message, 0, size) + view)
                except OSError:
                    raise self._lost(link) from None
                flow.sent_s[step] = now = clock()
                continue
            whole = _HEADER.size + size
            try:
                got = link.socket.recv_into(link.scratch, whole, _ALL)
            except OSError:
                raise self._lost(link) from None
            if got != whole:
                raise self._lost(link)
            after = clock()
            self.receive_wait_s[link.peer] += after - now
            flow.received_s[step] = now = after
            if _HEADER.unpack_from(link.scratch) != (trial, message, 0, size):
                link.header[:] = link.scratch[: _HEADER.size]
                self._trial = trial
                raise self._out_of_step(link, flow, size)
            assert arrived is not None
            if target is not None:
                np.add(target, arrived, out=target)
            else:
                view[:] = link.scratch[_HEADER.size : whole]

    def _operations(self, flow: Flow) -> list[_Operation]:
        """By step, sends first: then nobody waits for somebody who waits."""
        found = []
        for key, sends in flow.sends.items():
            for transfer, view in sends:
                found.append(_Operation(self._links[key], transfer.step, transfer.size, view, None, None, True))
        dtype = flow.array.dtype
        for key, receives in flow.receives.items():
            link = self._links[key]
            for transfer, view, target in receives:
                count = transfer.size // dtype.itemsize
                arrived = np.frombuffer(link.scratch, dtype=dtype, count=count, offset=_HEADER.size)
                found.append(_Operation(link, transfer.step, transfer.size, view, target, arrived, False))
        return sorted(found, key=lambda one: (one.step, not one.sends))

    def run_overlapped(self, flows: Sequence[Flow], launches_s: Sequence[float], trial: int) -> list[float]:
        """Several messages, each from its time on; returns when each had ended. Times are of `perf_counter`."""
        self._trial = trial
        self._active = []
        ended = [0.0] * len(flows)
        numbers = {id(flow): at for at, flow in enumerate(flows)}
        links = list(self._links.values())
        launched = 0
        while launched < len(flows) or self._active:
            now = time.perf_counter()
            while launched < len(flows) and launches_s[launched] <= now:
                self._active.append(flows[launched])
                launched += 1
            stalled = [link for link in links if self._push(link)]
            moved = self._pull_all(links, None)
            for flow in [one for one in self._active if not one.sends_left and not one.receives_left]:
                ended[numbers[id(flow)]] = time.perf_counter()
                self._active.remove(flow)
                moved = True
            if not moved and (launched < len(flows) or self._active):
                until_s = launches_s[launched] if launched < len(flows) else None
                self._wait([link for link in links if self._awaits(link)], stalled, until_s)
        return ended

    def _push(self, link: _Link) -> bool:
        """Send what may be sent on a connection; True where the kernel takes no more."""
        key, sock = link.key, link.socket
        while True:
            if link.out is None:
                for flow in self._active:
                    queue = flow.sends.get(key)
                    if queue is None:
                        continue
                    at = flow.next_send[key]
                    if at < len(queue) and not flow.blocked[queue[at][0].index]:
                        transfer, view = queue[at]
                        header = _HEADER.pack(self._trial, flow.message, 0, transfer.size)
                        link.out = (flow, transfer, view, header, 0)
                        break
                else:
                    return False
            flow, transfer, view, header, done = link.out
            try:
                if done < _HEADER.size:
                    done += sock.sendmsg((header[done:] if done else header, view), (), _NOW)
                else:
                    done += sock.send(view[done - _HEADER.size :], _NOW)
            except BlockingIOError:
                link.stalled = True
                return True
            except OSError:
                raise self._lost(link) from None
            link.stalled = False
            if done == _HEADER.size + transfer.size:
                link.out = None
                flow.next_send[key] += 1
                flow.sends_left -= 1
                flow.sent_s[transfer.step] = time.perf_counter()
            else:
                link.out = (flow, transfer, view, header, done)

    def _pull_all(self, links: Sequence[_Link], only: Flow | None) -> bool:
        """Take what has arrived on any connection; False where there was nothing."""
        moved = False
        for link in links:
            try:
                while self._pull(link, only, _NOW):
                    moved = True
            except BlockingIOError:
                pass
        return moved

    def _pull_waiting(self, link: _Link, flow: Flow) -> None:
        """Wait for the next bytes of one connection, and take them."""
        begin = time.perf_counter()
        if self.spin_s:
            until = begin + self.spin_s
            while time.perf_counter() < until:
                try:
                    self._pull(link, flow, _NOW)
                except BlockingIOError:
                    continue
                self.receive_wait_s[link.peer] += time.perf_counter() - begin
                return
        self._pull(link, flow, 0)
        self.receive_wait_s[link.peer] += time.perf_counter() - begin

    def _pull(self, link: _Link, only: Flow | None, flags: int) -> bool:
        """One read on a connection; True where more may be there for the flows that run."""
        found = link.found
        if found is None:
            if only is not None:
                at = only.next_receive.get(link.key, -1)
                queue = only.receives.get(link.key, ())
                if not 0 <= at < len(queue):
                    return False
                transfer, view, target = queue[at]
                if target is not None:
                    view = link.scratch[: transfer.size]
                link.found = found = (only, transfer, view, target)
            else:
                if not self._read_header(link, flags):
                    return False
                found = link.found
                assert found is not None
        flow, transfer, view, target = found
        got = link.got
        try:
            if got < _HEADER.size:
                more = link.socket.recvmsg_into((link.header[got:] if got else link.header, view), 0, flags)[0]
            else:
                more = link.socket.recv_into(view[got - _HEADER.size :], 0, flags)
        except BlockingIOError:
            raise
        except OSError:
            raise self._lost(link) from None
        if more == 0:
            raise self._lost(link)
        if got < _HEADER.size <= got + more:
            self._check_header(link, flow, transfer)
        link.got = got = got + more
        if got < _HEADER.size + transfer.size:
            return True
        link.got, link.found = 0, None
        if target is not None:
            np.add(target, np.frombuffer(view, dtype=target.dtype), out=target)
        flow.next_receive[link.key] += 1
        flow.receives_left -= 1
        flow.received_s[transfer.step] = time.perf_counter()
        for index in transfer.frees:
            flow.blocked[index] -= 1
        return True

    def _read_header(self, link: _Link, flags: int) -> bool:
        """Overlapped: find out which message comes next; False where that one has not been launched here yet."""
        if link.got < _HEADER.size:
            if not self._expects(link):
                return False
            more = link.socket.recv_into(link.header[link.got :], 0, flags)
            if more == 0:
                raise self._lost(link)
            link.got += more
            if link.got < _HEADER.size:
                return False
        trial, message, _, size = _HEADER.unpack(link.header)
        for flow in self._active:
            if flow.message == message and trial == self._trial:
                transfer, view, target = flow.receives[link.key][flow.next_receive[link.key]]
                if transfer.size != size:
                    raise self._out_of_step(link, flow, transfer.size)
                link.found = (flow, transfer, link.scratch[:size] if target is not None else view, target)
                return True
        return False

    def _expects(self, link: _Link) -> bool:
        """Whether a flow that runs has something to come on a connection."""
        key = link.key
        return any(flow.next_receive.get(key, 0) < len(flow.receives.get(key, ())) for flow in self._active)

    def _awaits(self, link: _Link) -> bool:
        """Whether it helps to read: not where the header of a message that is not launched here yet was read."""
        if link.found is not None:
            return True
        return link.got < _HEADER.size and self._expects(link)

    def _wait(self, incoming: Sequence[_Link], outgoing: Sequence[_Link], until_s: float | None) -> None:
        """Sleep until a connection can be read or written, or until a time; whom it waited for is noted."""
        poll = select.poll()
        masks: dict[int, int] = {}
        for link in incoming:
            masks[link.socket.fileno()] = select.POLLIN
        for link in outgoing:
            if link.stalled:
                number = link.socket.fileno()
                masks[number] = masks.get(number, 0) | select.POLLOUT
        for number, mask in masks.items():
            poll.register(number, mask)
        begin = time.perf_counter()
        timeout = None if until_s is None else max(0.0, (until_s - begin) * 1e3)
        poll.poll(timeout)
        waited = time.perf_counter() - begin
        for link in outgoing:
            if link.stalled:
                self.send_wait_s[link.peer] += waited
        if not any(link.stalled for link in outgoing):
            for link in incoming:
                self.receive_wait_s[link.peer] += waited

    def _check_header(self, link: _Link, flow: Flow, transfer: Transfer) -> None:
        trial, message, _, size = _HEADER.unpack(link.header)
        if (trial, message, size) != (self._trial, flow.message, transfer.size):
            raise self._out_of_step(link, flow, transfer.size)

    def _out_of_step(self, link: _Link, flow: Flow, expected_bytes: int) -> RunError:
        trial, message, _, size = _HEADER.unpack(link.header)
        return RunError(
            f"rank {self.rank} expects trial {self._trial}, message {flow.message}, {expected_bytes} bytes from rank "
            f"{link.peer}, which sent trial {trial}, message {message}, {size} bytes: the ranks lost step"
        )

    def _lost(self, link: _Link) -> RunError:
        return RunError(f"rank {self.rank} lost its connection to rank {link.peer}")
