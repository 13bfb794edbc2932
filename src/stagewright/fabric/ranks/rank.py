"""One rank: follows the coordinator's commands, sends and receives, and reports the times of each trial.

    python -m stagewright.fabric.ranks.rank DESCRIPTOR HOST       a local rank; the descriptor is its control connection

A second thread receives the coordinator's commands and sends a heartbeat every second. If the coordinator is gone, it
shuts down all connections, so that nothing waits forever.
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
from dataclasses import asdict
from typing import Any

from stagewright.errors import RunError, StagewrightError, UsageError
from stagewright.fabric.collectives.algorithms import collective
from stagewright.fabric.collectives.program import SLICE_BYTES
from stagewright.fabric.ranks.connections import Connections, congestion_control, listen
from stagewright.fabric.ranks.flow import Flow
from stagewright.fabric.ranks.probe import MAX_PAIR_RANKS, probe_pairs
from stagewright.fabric.ranks.sockets_engine import SocketEngine
from stagewright.fabric.ranks.tcp_info import tcp_info
from stagewright.fabric.ranks.torch_engine import TorchEngine, check_sizes
from stagewright.fabric.ranks.trial_log import TrialLog
from stagewright.fabric.ranks.wire import TO_RANK, Channel, Frame
from stagewright.fabric.traffic.workload import Workload

ALIVE_S = 1.0
_MAX_STREAMS = 64
_STOP = 1
_FINISH = Frame("finish", {}, b"")


def find_peers(workload: Workload, rank: int, *, all_pairs: bool) -> set[int]:
    """Return the ranks that a rank connects to: partners in messages and barriers, or all if pairs are probed."""
    n = workload.num_ranks
    if all_pairs:
        return set(range(n)) - {rank}
    peers = set()
    distance = 1
    while distance < n:
        peers |= {(rank + distance) % n, (rank - distance) % n}
        distance *= 2
    for message in workload.messages:
        for group in message.groups:
            if rank in group:
                position = group.index(rank)
                for move in collective(message.algorithm, len(group)).moves:
                    if position in (move.source, move.destination):
                        peers.add(group[move.destination if move.source == position else move.source])
    return peers - {rank}


class Rank:
    """A rank that serves one coordinator until it finishes."""

    def __init__(self, channel: Channel, host: str, token: bytes) -> None:
        self._channel = channel
        self._host = host
        self._token = token
        self._commands: queue.Queue[Frame] = queue.Queue()
        self._stop = threading.Event()
        self._gone = threading.Event()
        self._connections: Connections | None = None
        self._listener: socket.socket | None = None
        self._engine: SocketEngine | TorchEngine | None = None

    def serve(self) -> None:
        """Execute the coordinator's commands; report failures to it."""
        listening = threading.Thread(target=self._listen, name="control", daemon=True)
        listening.start()
        try:
            while (command := self._commands.get()).kind != "finish":
                try:
                    getattr(self, f"_{command.kind}")(command.fields)
                except Exception as error:  # report every failure to the coordinator
                    self._send("fault", {"error": _sentence(error)})
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
        """Receive commands and send heartbeats, in the second thread."""
        last_s = 0.0
        while not self._gone.is_set():
            try:
                if time.monotonic() - last_s >= ALIVE_S:
                    last_s = time.monotonic()
                    self._channel.send("alive")
                if not select.select([self._channel.socket], [], [], ALIVE_S)[0]:
                    continue
                command = self._channel.receive()
            except (OSError, ValueError, StagewrightError):
                break
            if command.kind == "stop":
                self._stop.set()
                if command.fields.get("now"):
                    self._shut_down()
            else:
                self._commands.put(command)
        self._shut_down()
        self._commands.put(_FINISH)

    def _shut_down(self) -> None:
        self._stop.set()
        if self._connections is not None:
            self._connections.shut_down()
        if isinstance(self._engine, TorchEngine) and not self._gone.is_set():
            # Gloo waits for its peers until its timeout; only ending the process stops that.
            threading.Timer(2.0, os._exit, (1,)).start()

    def _send(self, kind: str, fields: Mapping[str, Any] | None = None, block: bytes = b"") -> None:
        try:
            self._channel.send(kind, fields, block)
        except OSError:
            self._gone.set()

    def _prepare(self, fields: dict[str, Any]) -> None:
        """Set this rank's number and workload."""
        self._workload = Workload.from_dict(fields["workload"])
        self._rank = int(fields["rank"])
        self._streams = int(fields["streams"])
        self._backend = str(fields["engine"])
        self._options = {key: fields[key] for key in ("congestion", "buffer_bytes") if fields.get(key) is not None}
        self._session = bytes.fromhex(fields["session"])
        self._spin_s = float(fields["spin_s"])
        self._timeout_s = float(fields["timeout_s"])
        if not 0 <= self._rank < self._workload.num_ranks or not 1 <= self._streams <= _MAX_STREAMS:
            raise UsageError(f"rank {self._rank} with {self._streams} streams is invalid")
        if self._backend not in ("sockets", "gloo", "nccl"):
            raise UsageError(f"unknown engine {self._backend!r}")
        if len(self._session) != 16:
            raise UsageError(f"a session id has 16 bytes, got {len(self._session)}")
        self._all_pairs = self._workload.num_ranks <= MAX_PAIR_RANKS
        if self._backend != "sockets":
            check_sizes(self._workload)
        self._listener = listen(self._host, self._workload.num_ranks * self._streams)
        self._send(
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
        """Connect to the other ranks and allocate the buffers."""
        assert self._listener is not None
        addresses = [(str(host), int(port)) for host, port in fields["addresses"]]
        workload = self._workload
        answer: dict[str, Any] = {"congestion": None}
        if self._backend == "sockets":
            connections = Connections(self._rank)
            self._connections = connections
            connections.open(
                self._listener,
                addresses,
                find_peers(workload, self._rank, all_pairs=self._all_pairs),
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
            answer["congestion"] = next(
                (congestion_control(connection) for connection in connections.sockets.values()), None
            )
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
        self._send("connected", answer)

    def _probe(self, fields: dict[str, Any]) -> None:
        """Probe latency and rate to each other rank."""
        probes = []
        if self._connections is not None and isinstance(self._engine, SocketEngine) and self._all_pairs:
            probes = probe_pairs(self._connections, self._engine, self._workload.num_ranks)
        self._send("probed", {"pairs": [asdict(probe) for probe in probes]})

    def _run(self, fields: dict[str, Any]) -> None:
        """Run all trials."""
        log = TrialLog(self._workload.num_ranks, self._send, keep_steps=bool(fields.get("steps")))
        error: BaseException | None = None
        gc.collect()
        gc.disable()
        try:
            self._trials(log)
        except (RunError, OSError) as failure:
            error = failure
        finally:
            gc.enable()
            log.flush()
        if error is not None:
            raise RunError(_sentence(error))
        links = []
        if self._connections is not None:
            for (peer, stream), connection in sorted(self._connections.sockets.items()):
                ends = {"source": self._rank, "destination": peer, "stream": stream}
                links.append({**ends, **asdict(tcp_info(connection))})
        self._send("done", {"links": links})

    def _trials(self, log: TrialLog) -> None:
        workload, engine = self._workload, self._engine
        assert engine is not None
        delay_s = workload.delays[self._rank]
        limit_s = workload.time_limit_s
        begin = time.perf_counter()
        for number in range(-workload.warmup, workload.trials):
            trial = number + workload.warmup
            late = limit_s is not None and time.perf_counter() - begin > limit_s
            flags = _STOP if self._stop.is_set() or (late and number > 0 and self._rank == 0) else 0
            for flow in self._flows:
                if flow is not None:
                    flow[0].reset(trial)
            if engine.barrier(trial, flags) & _STOP:
                return
            if workload.overlap and isinstance(engine, SocketEngine):
                self._trial_overlapped(engine, trial, number, delay_s, log)
            else:
                self._trial_serial(engine, trial, number, delay_s, log)
            log.flush_if_due()

    def _trial_serial(
        self, engine: SocketEngine | TorchEngine, trial: int, number: int, delay_s: float, log: TrialLog
    ) -> None:
        workload = self._workload
        before = engine.retransmits()
        for index, (message, entry) in enumerate(zip(workload.messages, self._flows, strict=True)):
            if index:
                engine.barrier(trial)
            if message.gap_s:
                time.sleep(message.gap_s)
            _clear(engine)
            start = time.perf_counter()
            if delay_s and entry is not None:
                time.sleep(delay_s)
            launched = time.perf_counter()
            if entry is not None:
                if isinstance(engine, SocketEngine):
                    engine.run(entry[0], trial)
                else:
                    engine.run_message(entry[0], message, entry[1])
            end = time.perf_counter()
            after = engine.retransmits()
            if number >= 0:
                flow = None if entry is None else entry[0]
                log.add(number, index, flow, trial, start, launched, end, after - before, engine)
            before = after

    def _trial_overlapped(self, engine: SocketEngine, trial: int, number: int, delay_s: float, log: TrialLog) -> None:
        workload = self._workload
        before = engine.retransmits()
        _clear(engine)
        start = launch = time.perf_counter()
        flows: dict[int, Flow] = {}  # by message, as are the times of its start, launch and end
        starts, launches = {}, {}
        for index, (message, entry) in enumerate(zip(workload.messages, self._flows, strict=True)):
            launch += message.gap_s
            if entry is not None:
                flows[index], starts[index] = entry[0], launch
                launches[index] = launch = launch + delay_s
        ended = engine.run_overlapped([*flows.values()], [*launches.values()], trial)
        ends = dict(zip(flows, ended, strict=True))
        retransmits = engine.retransmits() - before
        if number < 0:
            return
        for index in range(len(workload.messages)):
            begin, launched, end = (moments.get(index, start) for moments in (starts, launches, ends))
            # Overlapped messages share connections: retransmissions are attributed to the first message.
            count = retransmits if index == min(flows, default=None) else 0
            log.add(number, index, flows.get(index), trial, begin, launched, end, count, engine)


def _clear(engine: SocketEngine | TorchEngine) -> None:
    for peer in range(len(engine.receive_wait_s)):
        engine.receive_wait_s[peer] = engine.send_wait_s[peer] = 0.0


def _sentence(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, StagewrightError | OSError) else f"{type(error).__name__}: {text}"


def main(descriptor: int, host: str) -> None:
    """Run a local rank: its inherited control connection needs no authentication, its data connections do."""
    connection = socket.socket(fileno=descriptor)
    token = connection.recv(64, socket.MSG_WAITALL)  # before any frame, from the parent
    Rank(Channel(connection, None, accepts=TO_RANK), host, token).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
