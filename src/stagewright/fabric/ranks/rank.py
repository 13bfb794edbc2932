"""One rank: obeys a coordinator, sends and receives, and tells what each trial took.

    python -m stagewright.fabric.ranks.rank DESCRIPTOR HOST       a local rank; the descriptor is its control connection

A second thread listens to the coordinator, says once a second that this rank is alive, and where the coordinator is
gone breaks off every connection, so that nothing waits for ever.
"""

from __future__ import annotations

import gc
import os
import platform
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from stagewright.errors import RunError, StagewrightError, UsageError
from stagewright.fabric.collectives.algorithms import collective
from stagewright.fabric.collectives.program import SLICE_BYTES
from stagewright.fabric.ranks.connections import Connections, congestion_control, listen
from stagewright.fabric.ranks.probe import MOST_PAIR_RANKS, probe_pairs
from stagewright.fabric.ranks.sockets_engine import Flow, SocketEngine
from stagewright.fabric.ranks.tcp_info import tcp_info
from stagewright.fabric.ranks.torch_engine import TorchEngine, check_sizes
from stagewright.fabric.ranks.wire import TO_RANK, Channel, Frame
from stagewright.fabric.traffic.workload import Workload
from stagewright.fabric.trials import row_type, step_type

__all__ = ["ALIVE_S", "Rank", "peers_of"]

ALIVE_S = 1.0
_FLUSH_S = 0.5
_MOST_STREAMS = 64
_MOST_STEP_ROWS = 200_000  # of step times that a rank keeps
_STOP = 1
_GOODBYE = Frame("finish", {}, b"")


def peers_of(workload: Workload, rank: int, *, all_pairs: bool) -> set[int]:
    """Whom a rank has a connection to: partners in messages and barriers, everybody where pairs are probed."""
    n = workload.num_ranks
    if all_pairs:
        return set(range(n)) - {rank}
    found = set()
    distance = 1
    while distance < n:
        found |= {(rank + distance) % n, (rank - distance) % n}
        distance *= 2
    for message in workload.messages:
        for group in message.groups:
            if rank in group:
                at = group.index(rank)
                for move in collective(message.algorithm, len(group)).moves:
                    if at in (move.source, move.destination):
                        found.add(group[move.destination if move.source == at else move.source])
    return found - {rank}


class Rank:
    """Serves one coordinator until it says goodbye."""

    def __init__(self, channel: Channel, host: str, token: bytes) -> None:
        self._channel = channel
        self._host = host
        self._token = token
        self._orders: queue.Queue[Frame] = queue.Queue()
        self._stop = threading.Event()
        self._gone = threading.Event()
        self._connections: Connections | None = None
        self._listener: socket.socket | None = None
        self._engine: SocketEngine | TorchEngine | None = None

    def serve(self) -> None:
        """Do what the coordinator says, one order after another; a failure is told and ends it."""
        listening = threading.Thread(target=self._listen, name="control", daemon=True)
        listening.start()
        try:
            while (order := self._orders.get()).kind != "finish":
                try:
                    getattr(self, f"_{order.kind}")(order.fields)
                except Exception as error:  # the coordinator must hear of it, whatever it is
                    self._tell("fault", {"error": _sentence(error)})
        finally:
            self._gone.set()
            if isinstance(self._engine, TorchEngine):
                self._engine.close()
            if self._connections is not None:
                self._connections.close()
            if self._listener is not None:
                self._listener.close()
            self._channel.close()

    def _listen(self) -> None:
        """The other thread: orders in, signs of life out."""
        last_s = 0.0
        while not self._gone.is_set():
            try:
                if time.monotonic() - last_s >= ALIVE_S:
                    last_s = time.monotonic()
                    self._channel.send("alive")
                if not select.select([self._channel.socket], [], [], ALIVE_S)[0]:
                    continue
                order = self._channel.receive()
            except (OSError, ValueError, StagewrightError):
                break
            if order.kind == "stop":
                self._stop.set()
                if order.fields.get("now"):
                    self._break_off()
            else:
                self._orders.put(order)
        self._break_off()
        self._orders.put(_GOODBYE)

    def _break_off(self) -> None:
        self._stop.set()
        if self._connections is not None:
            self._connections.break_off()
        if isinstance(self._engine, TorchEngine) and not self._gone.is_set():
            # Gloo waits for its peers until its time-out; nothing but the end of the process ends that.
            threading.Timer(2.0, os._exit, (1,)).start()

    def _tell(self, kind: str, fields: Mapping[str, Any] | None = None, block: bytes = b"") -> None:
        try:
            self._channel.send(kind, fields, block)
        except OSError:
            self._gone.set()

    def _prepare(self, fields: dict[str, Any]) -> None:
        """Who this rank is and what it will send."""
        self._workload = Workload.from_dict(fields["workload"])
        self._rank = int(fields["rank"])
        self._streams = int(fields["streams"])
        self._backend = str(fields["engine"])
        self._options = {key: fields[key] for key in ("congestion", "buffer_bytes") if fields.get(key) is not None}
        self._session = bytes.fromhex(fields["session"])
        self._spin_s = float(fields["spin_s"])
        self._timeout_s = float(fields["timeout_s"])
        if not 0 <= self._rank < self._workload.num_ranks or not 1 <= self._streams <= _MOST_STREAMS:
            raise UsageError(f"rank {self._rank} with {self._streams} streams can't run")
        if self._backend not in ("sockets", "gloo", "nccl"):
            raise UsageError(f"unknown engine {self._backend!r}")
        if len(self._session) != 16:
            raise UsageError(f"a session has 16 bytes, not {len(self._session)}")
        self._all_pairs = self._workload.num_ranks <= MOST_PAIR_RANKS
        if self._backend != "sockets":
            check_sizes(self._workload)
        self._listener = listen(self._host, self._workload.num_ranks * self._streams)
        self._tell(
            "listening",
            {
                "host": self._host,
                "port": self._listener.getsockname()[1],
                "name": platform.node(),
                "system": f"{platform.system()} {platform.release()}",
                "cores": os.cpu_count() or 1,
            },
        )

    def _connect(self, fields: dict[str, Any]) -> None:
        """Open the connections to the others and make room for the payloads."""
        assert self._listener is not None
        addresses = [(str(host), int(port)) for host, port in fields["addresses"]]
        workload = self._workload
        told: dict[str, Any] = {"congestion": None}
        if self._backend == "sockets":
            connections = Connections(self._rank)
            self._connections = connections
            connections.open(
                self._listener,
                addresses,
                peers_of(workload, self._rank, all_pairs=self._all_pairs),
                streams=self._streams,
                session=self._session,
                token=self._token,
                options=self._options,
            )
            self._engine = SocketEngine(
                connections,
                workload.num_ranks,
                scratch_bytes=SLICE_BYTES + 64,
                spin_s=self._spin_s,
                buffer_bytes=self._options.get("buffer_bytes"),
            )
            told["congestion"] = next((congestion_control(one) for one in connections.sockets.values()), None)
        else:
            self._engine = TorchEngine(
                self._backend, workload, self._rank, addresses, self._listener, self._host, self._timeout_s
            )
        self._flows: list[tuple[Flow, tuple[int, ...]] | None] = []
        for number, message in enumerate(workload.messages):
            group = next((group for group in message.groups if self._rank in group), None)
            if group is None:
                self._flows.append(None)
                continue
            flow = Flow(
                number,
                collective(message.algorithm, len(group)),
                group,
                self._rank,
                message.num_bytes,
                streams=self._streams,
                seed=workload.seed,
                slice_bytes=SLICE_BYTES,
            )
            self._flows.append((flow, group))
        self._tell("connected", told)

    def _probe(self, fields: dict[str, Any]) -> None:
        """What lies between this rank and each other."""
        found = []
        if self._connections is not None and isinstance(self._engine, SocketEngine) and self._all_pairs:
            found = probe_pairs(self._connections, self._engine, self._workload.num_ranks)
        self._tell("probed", {"pairs": [probe.to_dict() for probe in found]})

    def _run(self, fields: dict[str, Any]) -> None:
        """All trials."""
        journal = _Journal(self._workload.num_ranks, self._tell, keep_steps=bool(fields.get("steps")))
        error: BaseException | None = None
        gc.collect()
        gc.disable()
        try:
            self._trials(journal)
        except (RunError, OSError) as failure:
            error = failure
        finally:
            gc.enable()
            journal.flush(last=True)
        if error is not None:
            raise RunError(_sentence(error))
        links = []
        if self._connections is not None:
            for (peer, stream), connection in sorted(self._connections.sockets.items()):
                info = tcp_info(connection)
                links.append(
                    {
                        "source": self._rank,
                        "destination": peer,
                        "stream": stream,
                        "retransmits": info.retransmits,
                        "segments": info.segments,
                        "rtt_s": info.rtt_s,
                        "min_rtt_s": info.min_rtt_s,
                        "rto_s": info.rto_s,
                    }
                )
        self._tell("done", {"links": links})

    def _trials(self, journal: _Journal) -> None:
        workload, engine = self._workload, self._engine
        assert engine is not None
        delay_s = workload.delays[self._rank]
        limit_s = workload.time_limit_s
        begun = time.perf_counter()
        for number in range(-workload.warmup, workload.trials):
            trial = number + workload.warmup
            late = limit_s is not None and time.perf_counter() - begun > limit_s
            flags = _STOP if self._stop.is_set() or (late and number > 0 and self._rank == 0) else 0
            for flow in self._flows:
                if flow is not None:
                    flow[0].reset(trial)
            if engine.barrier(trial, flags) & _STOP:
                return
            if workload.overlap and isinstance(engine, SocketEngine):
                self._trial_overlapped(engine, trial, number, delay_s, journal)
            else:
                self._trial_serial(engine, trial, number, delay_s, journal)
            journal.flush_sometimes()

    def _trial_serial(
        self, engine: SocketEngine | TorchEngine, trial: int, number: int, delay_s: float, journal: _Journal
    ) -> None:
        workload = self._workload
        before = engine.retransmits()
        for index, (message, found) in enumerate(zip(workload.messages, self._flows, strict=True)):
            if index:
                engine.barrier(trial)
            if message.gap_s:
                time.sleep(message.gap_s)
            _clear(engine)
            start = time.perf_counter()
            if delay_s and found is not None:
                time.sleep(delay_s)
            launched = time.perf_counter()
            if found is not None:
                if isinstance(engine, SocketEngine):
                    engine.run(found[0], trial)
                else:
                    engine.run_message(found[0], message, found[1])
            end = time.perf_counter()
            after = engine.retransmits()
            if number >= 0:
                flow = None if found is None else found[0]
                journal.add(number, index, flow, trial, start, launched, end, after - before, engine)
            before = after

    def _trial_overlapped(
        self, engine: SocketEngine, trial: int, number: int, delay_s: float, journal: _Journal
    ) -> None:
        workload = self._workload
        before = engine.retransmits()
        _clear(engine)
        start = at = time.perf_counter()
        starts, launches, flows, numbers = [], [], [], []
        for index, (message, found) in enumerate(zip(workload.messages, self._flows, strict=True)):
            at += message.gap_s
            if found is not None:
                starts.append(at)
                at += delay_s
                launches.append(at)
                flows.append(found[0])
                numbers.append(index)
        ended = engine.run_overlapped(flows, launches, trial)
        retransmits = engine.retransmits() - before
        if number < 0:
            return
        for index in range(len(workload.messages)):
            if index not in numbers:
                journal.add(number, index, None, trial, start, start, start, 0, engine)
                continue
            place = numbers.index(index)
            # Segments sent again can't be told apart by message here: they are noted at the first.
            again = retransmits if place == 0 else 0
            journal.add(number, index, flows[place], trial, starts[place], launches[place], ended[place], again, engine)


class _Journal:
    """Rows that were measured, sent to the coordinator between trials."""

    def __init__(self, num_ranks: int, tell: Any, *, keep_steps: bool) -> None:
        self._rows = np.zeros(4096, dtype=row_type(num_ranks))
        self._steps = np.zeros(8192, dtype=step_type())
        self._num_rows = self._num_steps = self._steps_told = 0
        self._keep_steps = keep_steps
        self._tell = tell
        self._flushed_s = time.perf_counter()

    def add(
        self,
        number: int,
        message: int,
        flow: Flow | None,
        trial: int,
        start: float,
        launched: float,
        end: float,
        retransmits: int,
        engine: SocketEngine | TorchEngine,
    ) -> None:
        if self._num_rows == len(self._rows):
            self.flush()
        wrong = flow is not None and not flow.is_right(trial)
        self._rows[self._num_rows] = (
            number,
            message,
            wrong,
            flow is not None,
            retransmits,
            start,
            end - start,
            launched - start,
            engine.receive_wait_s,
            engine.send_wait_s,
        )
        self._num_rows += 1
        if flow is None or not self._keep_steps or isinstance(engine, TorchEngine):
            return
        num_steps = flow.program.num_steps
        if self._num_steps + num_steps > len(self._steps):
            self.flush()
        if self._steps_told + num_steps > _MOST_STEP_ROWS or num_steps > len(self._steps):
            return
        for step in range(num_steps):
            sent, received = flow.sent_s[step], flow.received_s[step]
            self._steps[self._num_steps] = (
                number,
                message,
                step,
                sent - start if sent >= start else np.nan,
                received - start if received >= start else np.nan,
            )
            self._num_steps += 1
        self._steps_told += num_steps

    def flush_sometimes(self) -> None:
        if time.perf_counter() - self._flushed_s > _FLUSH_S:
            self.flush()

    def flush(self, *, last: bool = False) -> None:
        if self._num_rows:
            self._tell("trials", {"rows": self._num_rows}, self._rows[: self._num_rows].tobytes())
        if self._num_steps:
            self._tell("steps", {"rows": self._num_steps}, self._steps[: self._num_steps].tobytes())
        self._num_rows = self._num_steps = 0
        self._flushed_s = time.perf_counter()
        gc.collect(0)


def _clear(engine: SocketEngine | TorchEngine) -> None:
    for peer in range(len(engine.receive_wait_s)):
        engine.receive_wait_s[peer] = engine.send_wait_s[peer] = 0.0


def _sentence(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, StagewrightError | OSError) else f"{type(error).__name__}: {text}"


def main(descriptor: int, host: str) -> None:
    """A local rank: its control connection was inherited, so it needs no proof; the data connections get one."""
    connection = socket.socket(fileno=descriptor)
    token = connection.recv(64, socket.MSG_WAITALL)  # before any frame, from the parent
    Rank(Channel(connection, None, accepts=TO_RANK), host, token).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
