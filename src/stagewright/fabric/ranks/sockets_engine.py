"""The sockets engine: runs collectives over TCP connections and records when each step was sent and received.

    slice on the wire     trial u32 │ message u16 │ 0 │ size u32 │ payload       12 bytes before each slice
    barrier               trial u32 │ 0xFFFF │ flags │ round u32                  log2(n) rounds (dissemination barrier)

One thread. Only the wait for the next required slice blocks. Sends fill the kernel's buffers; receives write to the
buffer directly (or to scratch space if they are reduced). If only one connection can deliver data, the wait is the
receive itself: one system call instead of two. Small messages run step by step with blocking calls.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

import numpy as np

from stagewright.errors import RunError
from stagewright.fabric.ranks.connections import Connections
from stagewright.fabric.ranks.flow import HEADER, SMALL_BYTES, Flow, Link, Operation
from stagewright.fabric.ranks.tcp_info import retransmits

_BARRIER = 0xFFFF
_NO_WAIT = socket.MSG_DONTWAIT
_WAIT_ALL = socket.MSG_WAITALL
_LARGE_BUFFER_BYTES = 64 * 1024  # a smaller requested buffer may not hold a small message


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
        self._small_bytes = SMALL_BYTES if buffer_bytes is None or buffer_bytes >= _LARGE_BUFFER_BYTES else -1
        self.receive_wait_s = [0.0] * num_ranks
        self.send_wait_s = [0.0] * num_ranks
        self._links = {key: Link(key, connection, scratch_bytes) for key, connection in connections.sockets.items()}
        self._active: list[Flow] = []
        self._trial = 0

    def retransmits(self) -> int:
        """Return the segments that this rank has retransmitted so far, over all connections."""
        return sum(retransmits(link.socket) for link in self._links.values())

    def barrier(self, trial: int, flags: int = 0) -> int:
        """Wait for all ranks; return the bitwise OR of all flags."""
        distance, number = 1, 0
        while distance < self.num_ranks:
            destination = self._links[(self.rank + distance) % self.num_ranks, 0]
            source = self._links[(self.rank - distance) % self.num_ranks, 0]
            destination.socket.sendall(HEADER.pack(trial, _BARRIER, flags, number))
            got = source.socket.recv_into(source.header, HEADER.size, socket.MSG_WAITALL)
            if got != HEADER.size:
                raise self._lost(source)
            peer_trial, message, peer_flags, peer_number = HEADER.unpack(source.header)
            if (peer_trial, message, peer_number) != (trial, _BARRIER, number):
                raise RunError(
                    f"rank {self.rank} is at the barrier of trial {trial}, but rank {source.peer} sent trial "
                    f"{peer_trial}, message {message}: the ranks are out of step"
                )
            flags |= peer_flags
            distance *= 2
            number += 1
        return flags

    def run(self, flow: Flow, trial: int) -> None:
        """Run one message to completion."""
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
        """Run a small message step by step with blocking calls; a send that fits into the buffers never waits."""
        if flow.operations is None:
            flow.operations = self._operations(flow)
        clock, message = time.perf_counter, flow.message
        now = clock()
        for link, step, size, view, target, arrived, sends in flow.operations:
            if sends:
                try:
                    link.socket.sendall(HEADER.pack(trial, message, 0, size) + view)
                except OSError:
                    raise self._lost(link) from None
                flow.sent_s[step] = now = clock()
                continue
            total = HEADER.size + size
            try:
                got = link.socket.recv_into(link.scratch, total, _WAIT_ALL)
            except OSError:
                raise self._lost(link) from None
            if got != total:
                raise self._lost(link)
            after = clock()
            self.receive_wait_s[link.peer] += after - now
            flow.received_s[step] = now = after
            if HEADER.unpack_from(link.scratch) != (trial, message, 0, size):
                link.header[:] = link.scratch[: HEADER.size]
                self._trial = trial
                raise self._out_of_step(link, flow, size)
            assert arrived is not None
            if target is not None:
                np.add(target, arrived, out=target)
            else:
                view[:] = link.scratch[HEADER.size : total]

    def _operations(self, flow: Flow) -> list[Operation]:
        """List the operations by step, sends first, which avoids deadlocks."""
        operations = []
        for key, sends in flow.sends.items():
            for transfer, view in sends:
                operations.append(Operation(self._links[key], transfer.step, transfer.size, view, None, None, True))
        dtype = flow.array.dtype
        for key, receives in flow.receives.items():
            link = self._links[key]
            for transfer, view, target in receives:
                count = transfer.size // dtype.itemsize
                arrived = np.frombuffer(link.scratch, dtype=dtype, count=count, offset=HEADER.size)
                operations.append(Operation(link, transfer.step, transfer.size, view, target, arrived, False))
        return sorted(operations, key=lambda operation: (operation.step, not operation.sends))

    def run_overlapped(self, flows: Sequence[Flow], launches_s: Sequence[float], trial: int) -> list[float]:
        """Run several messages, each from its launch time on; return their end times (`perf_counter`)."""
        self._trial = trial
        self._active = []
        ended = [0.0] * len(flows)
        numbers = {id(flow): index for index, flow in enumerate(flows)}
        links = list(self._links.values())
        launched = 0
        while launched < len(flows) or self._active:
            now = time.perf_counter()
            while launched < len(flows) and launches_s[launched] <= now:
                self._active.append(flows[launched])
                launched += 1
            stalled = [link for link in links if self._push(link)]
            moved = self._pull_all(links, None)
            for flow in [active for active in self._active if not active.sends_left and not active.receives_left]:
                ended[numbers[id(flow)]] = time.perf_counter()
                self._active.remove(flow)
                moved = True
            if not moved and (launched < len(flows) or self._active):
                until_s = launches_s[launched] if launched < len(flows) else None
                self._wait([link for link in links if self._awaits(link)], stalled, until_s)
        return ended

    def _push(self, link: Link) -> bool:
        """Send on a connection as much as possible; return True if the kernel's buffer is full."""
        key, sock = link.key, link.socket
        while True:
            if link.out is None:
                for flow in self._active:
                    queue = flow.sends.get(key)
                    if queue is None:
                        continue
                    index = flow.next_send[key]
                    if index < len(queue) and not flow.blocked[queue[index][0].index]:
                        transfer, view = queue[index]
                        header = HEADER.pack(self._trial, flow.message, 0, transfer.size)
                        link.out = (flow, transfer, view, header, 0)
                        break
                else:
                    return False
            flow, transfer, view, header, done = link.out
            try:
                if done < HEADER.size:
                    done += sock.sendmsg((header[done:] if done else header, view), (), _NO_WAIT)
                else:
                    done += sock.send(view[done - HEADER.size :], _NO_WAIT)
            except BlockingIOError:
                link.stalled = True
                return True
            except OSError:
                raise self._lost(link) from None
            link.stalled = False
            if done == HEADER.size + transfer.size:
                link.out = None
                flow.next_send[key] += 1
                flow.sends_left -= 1
                flow.sent_s[transfer.step] = time.perf_counter()
            else:
                link.out = (flow, transfer, view, header, done)

    def _pull_all(self, links: Sequence[Link], only: Flow | None) -> bool:
        """Receive from all connections without waiting; return False if nothing arrived."""
        moved = False
        for link in links:
            try:
                while self._pull(link, only, _NO_WAIT):
                    moved = True
            except BlockingIOError:
                pass
        return moved

    def _pull_waiting(self, link: Link, flow: Flow) -> None:
        """Wait for the next bytes of one connection and receive them."""
        begin = time.perf_counter()
        if self.spin_s:
            until = begin + self.spin_s
            while time.perf_counter() < until:
                try:
                    self._pull(link, flow, _NO_WAIT)
                except BlockingIOError:
                    continue
                self.receive_wait_s[link.peer] += time.perf_counter() - begin
                return
        self._pull(link, flow, 0)
        self.receive_wait_s[link.peer] += time.perf_counter() - begin

    def _pull(self, link: Link, only: Flow | None, flags: int) -> bool:
        """Read once from a connection; return True if more may follow for the active flows."""
        incoming = link.incoming
        if incoming is None:
            if only is not None:
                index = only.next_receive.get(link.key, -1)
                queue = only.receives.get(link.key, ())
                if not 0 <= index < len(queue):
                    return False
                transfer, view, target = queue[index]
                if target is not None:
                    view = link.scratch[: transfer.size]
                link.incoming = incoming = (only, transfer, view, target)
            else:
                if not self._read_header(link, flags):
                    return False
                incoming = link.incoming
                assert incoming is not None
        flow, transfer, view, target = incoming
        got = link.got
        try:
            if got < HEADER.size:
                more = link.socket.recvmsg_into((link.header[got:] if got else link.header, view), 0, flags)[0]
            else:
                more = link.socket.recv_into(view[got - HEADER.size :], 0, flags)
        except BlockingIOError:
            raise
        except OSError:
            raise self._lost(link) from None
        if more == 0:
            raise self._lost(link)
        is_complete = got < HEADER.size <= got + more
        if is_complete and HEADER.unpack(link.header) != (self._trial, flow.message, 0, transfer.size):
            raise self._out_of_step(link, flow, transfer.size)
        link.got = got = got + more
        if got < HEADER.size + transfer.size:
            return True
        link.got, link.incoming = 0, None
        if target is not None:
            np.add(target, np.frombuffer(view, dtype=target.dtype), out=target)
        flow.next_receive[link.key] += 1
        flow.receives_left -= 1
        flow.received_s[transfer.step] = time.perf_counter()
        for index in transfer.frees:
            flow.blocked[index] -= 1
        return True

    def _read_header(self, link: Link, flags: int) -> bool:
        """Read which message comes next (overlapped runs); return False if it is not launched here yet."""
        if link.got < HEADER.size:
            if not self._expects(link):
                return False
            more = link.socket.recv_into(link.header[link.got :], 0, flags)
            if more == 0:
                raise self._lost(link)
            link.got += more
            if link.got < HEADER.size:
                return False
        trial, message, _, size = HEADER.unpack(link.header)
        for flow in self._active:
            if flow.message == message and trial == self._trial:
                transfer, view, target = flow.receives[link.key][flow.next_receive[link.key]]
                if transfer.size != size:
                    raise self._out_of_step(link, flow, transfer.size)
                link.incoming = (flow, transfer, link.scratch[:size] if target is not None else view, target)
                return True
        return False

    def _expects(self, link: Link) -> bool:
        """Return whether an active flow still receives on a connection."""
        key = link.key
        return any(flow.next_receive.get(key, 0) < len(flow.receives.get(key, ())) for flow in self._active)

    def _awaits(self, link: Link) -> bool:
        """Return whether reading can progress: not if the next message is not launched here yet."""
        if link.incoming is not None:
            return True
        return link.got < HEADER.size and self._expects(link)

    def _wait(self, incoming: Sequence[Link], outgoing: Sequence[Link], until_s: float | None) -> None:
        """Wait until a connection is ready or until a time, and account the wait to the peers."""
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

    def _out_of_step(self, link: Link, flow: Flow, expected_bytes: int) -> RunError:
        trial, message, _, size = HEADER.unpack(link.header)
        return RunError(
            f"rank {self.rank} expects trial {self._trial}, message {flow.message}, {expected_bytes} bytes from rank "
            f"{link.peer}, which sent trial {trial}, message {message}, {size} bytes: the ranks are out of step"
        )

    def _lost(self, link: Link) -> RunError:
        return RunError(f"rank {self.rank} lost its connection to rank {link.peer}")
