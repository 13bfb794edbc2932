"""The coordinator: starts or contacts the ranks, runs the workload on them and collects their measurements.

    hosts given      agents on these hosts, over TCP with the shared token
    in a lab         one local process in each namespace
    otherwise        local processes on the loopback device

If a rank dies (its connection ends, or no heartbeat arrives for some seconds), the coordinator stops the others, keeps
the trials that all ranks finished and names the dead rank.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.errors import RunError, UsageError
from stagewright.fabric.ranks.probe import PairProbe
from stagewright.fabric.ranks.wire import TO_COORDINATOR, Channel, Frame, authenticate_agent
from stagewright.fabric.traffic.workload import Workload
from stagewright.fabric.trials import TrialTable, row_type, step_type
from stagewright.files.json_values import from_json

SILENT_S = 6.0  # without a heartbeat a rank counts as dead
_STOP_S = 3.0  # time for the others to send their remaining rows
_PREPARE_S = 60.0
_LISTEN_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocation:
    """Host and namespace of a rank."""

    name: str
    """For error messages: the host as given, a namespace, "local"."""
    host: str = "127.0.0.1"
    """Address for the other ranks."""
    port: int | None = None
    """Port of the agent; None: start a local process."""
    namespace: str | None = None
    """Network namespace of a local process; None: the current one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run."""

    engine: str = "sockets"
    """sockets, gloo or nccl."""
    streams: int = 1
    """Connections per pair of ranks."""
    congestion: str | None = None
    """Congestion control of the data connections; None: the host's default."""
    buffer_bytes: int | None = None
    """Send and receive buffers of the data connections; None: the kernel's default."""
    probe: bool = True
    """Whether to probe all pairs first."""
    steps: bool = True
    """Whether to record the times of single steps."""
    token: bytes = b""
    """Secret shared with the agents."""
    contact_s: float = 5.0
    """Timeout for contacting an agent."""
    hang_s: float = 60.0
    """The run fails if no trial finishes for this long."""


@dataclass(slots=True, kw_only=True)
class Measurements:
    """Measurements of a run."""

    trials: TrialTable
    """Trials that all ranks finished."""
    steps: list[npt.NDArray[Any]]
    """Recorded step times of each rank."""
    pairs: list[PairProbe]
    """Probes of all pairs; empty if not probed."""
    links: list[dict[str, Any]]
    """State of the connections at the end."""
    hosts: list[dict[str, Any]]
    """Each rank's description of its host."""
    wall_s: float = 0.0
    """Duration of all trials, on the coordinator's clock."""
    error: str | None = None
    """Which rank failed and why, in one sentence."""
    dead: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Member:
    rank: int
    location: RankLocation
    channel: Channel
    process: subprocess.Popen[bytes] | None = None
    heartbeat_s: float | None = None
    """None: no heartbeat yet, the rank is still starting."""
    state: str = "new"
    """In the end done, fault or dead."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[bytes] = field(default_factory=list)
    num_rows: int = 0
    steps: list[bytes] = field(default_factory=list)
    error: str | None = None


class Coordinator:
    """A context manager around one set of ranks."""

    def __init__(self, workload: Workload, locations: Sequence[RankLocation], settings: Settings) -> None:
        if len(locations) != workload.num_ranks:
            raise UsageError(f"the workload has {workload.num_ranks} ranks, got {len(locations)} locations for them")
        self._workload = workload
        self._settings = settings
        self._locations = locations
        self._members: list[_Member] = []
        self._selector = selectors.DefaultSelector()
        self._token = settings.token or secrets.token_bytes(64)

    def __enter__(self) -> Coordinator:
        try:
            for rank, location in enumerate(self._locations):
                self._members.append(self._contact(rank, location))
        except BaseException:
            self.close()
            raise
        for member in self._members:
            member.channel.socket.settimeout(SILENT_S)  # a rank may stop in the middle of a message
            self._selector.register(member.channel.socket, selectors.EVENT_READ, member)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, progress: Callable[[int, int], None] | None = None) -> Measurements:
        """Prepare, connect, probe and run; return the finished trials even if a rank dies."""
        workload, settings = self._workload, self._settings
        session = secrets.token_hex(16)
        local = sum(location.port is None for location in self._locations)
        # Spinning helps only if each rank has a core of its own.
        spin_s = 50e-6 if local * 2 <= (os.cpu_count() or 1) else 0.0
        measured = Measurements(trials=TrialTable.join([], 0), steps=[], pairs=[], links=[], hosts=[])
        self._begin = time.monotonic()
        try:
            for member in self._members:
                member.channel.send(
                    "prepare",
                    {
                        "workload": workload.to_dict(),
                        "rank": member.rank,
                        "streams": settings.streams,
                        "engine": settings.engine,
                        "congestion": settings.congestion,
                        "buffer_bytes": settings.buffer_bytes,
                        "session": session,
                        "spin_s": spin_s,
                        "timeout_s": settings.hang_s,
                    },
                )
            hosts = self._gather("listening", _PREPARE_S)
            measured.hosts = hosts
            addresses = [(answer["host"], answer["port"]) for answer in hosts]
            self._send_all("connect", {"addresses": addresses})
            for host, answer in zip(hosts, self._gather("connected", _PREPARE_S + settings.hang_s), strict=True):
                host["congestion"] = answer["congestion"]
            if settings.probe and settings.engine == "sockets" and workload.num_ranks > 1:
                self._send_all("probe")
                answers = self._gather("probed", _PREPARE_S + settings.hang_s)
                measured.pairs = [from_json(PairProbe, pair) for answer in answers for pair in answer["pairs"]]
            self._begin = time.monotonic()
            self._send_all("run", {"steps": settings.steps})
            done = self._gather("done", None, progress)
            measured.links = [link for answer in done for link in answer["links"]]
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            measured.error = f"a rank sent an invalid answer: {type(error).__name__}: {error}; is it another version?"
            self._stop_ranks()
        except (RunError, OSError) as error:
            measured.error = str(error)
            self._stop_ranks()
            self._set_dead(measured)
        except KeyboardInterrupt:
            measured.error = "interrupted"
            self._stop_ranks()
        measured.wall_s = time.monotonic() - self._begin
        num_messages = len(workload.messages)
        kind = row_type(workload.num_ranks)
        blocks = [_rows(member.rows, kind) for member in self._members]
        measured.trials = TrialTable.join(blocks, num_messages)
        measured.steps = [_rows(member.steps, step_type()) for member in self._members]
        return measured

    def close(self) -> None:
        """Finish all ranks; kill local processes that do not exit."""
        for member in self._members:
            with contextlib.suppress(OSError):
                member.channel.send("finish")
        for member in self._members:
            if member.process is not None:
                try:
                    member.process.wait(2.0)
                except subprocess.TimeoutExpired:
                    member.process.kill()
                    member.process.wait()
            member.channel.close()
        self._selector.close()
        self._members = []

    def _contact(self, rank: int, location: RankLocation) -> _Member:
        if location.port is not None:
            try:
                connection = _dial(location.host, location.port, self._settings.contact_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel = authenticate_agent(connection, self._settings.token)
            except (OSError, RunError) as error:
                why = getattr(error, "strerror", None) or str(error)
                raise UsageError(
                    f"no agent answers at {location.name} ({location.host}:{location.port}): {why}; "
                    "start one there with: stagewright fabric agent --token-file FILE"
                ) from None
            return _Member(rank=rank, location=location, channel=channel)
        parent, child = socket.socketpair()
        words = [sys.executable, "-m", "stagewright.fabric.ranks.rank", str(child.fileno()), location.host]
        if location.namespace is not None:
            words = ["ip", "netns", "exec", location.namespace, *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            words,
            pass_fds=[child.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # the coordinator handles Ctrl-C
        )
        child.close()
        parent.sendall(self._token[:64].ljust(64, b"\0"))
        return _Member(
            rank=rank, location=location, channel=Channel(parent, None, accepts=TO_COORDINATOR), process=process
        )

    def _send_all(self, kind: str, fields: dict[str, Any] | None = None) -> None:
        for member in self._members:
            member.channel.send(kind, fields)

    def _gather(
        self, kind: str, limit_s: float | None, progress: Callable[[int, int], None] | None = None
    ) -> list[dict[str, Any]]:
        """Collect every rank's answer; raise RunError on a fault, a death or a missing heartbeat."""
        until_s = None if limit_s is None else time.monotonic() + limit_s
        progress_s, seen = time.monotonic(), 0
        while any(kind not in member.answers for member in self._members):
            before = time.monotonic()
            self._listen(_LISTEN_S)
            now = time.monotonic()
            self._extend_deadlines(now - before - _LISTEN_S)
            finished = min(member.num_rows for member in self._members) // len(self._workload.messages)
            if finished != seen:
                progress_s, seen = now, finished
            if progress is not None:
                progress(finished, self._workload.trials)
            for member in self._members:
                if member.state in ("dead", "fault"):
                    raise RunError(member.error or f"rank {member.rank} failed")
                if member.heartbeat_s is not None and now - member.heartbeat_s > SILENT_S:
                    member.state, member.error = "dead", _silence(member)
                    raise RunError(member.error)
            if until_s is not None and now > until_s:
                late = [member.rank for member in self._members if kind not in member.answers]
                raise RunError(f"rank {', '.join(map(str, late))} did not reply {kind!r} within {limit_s:.0f} s")
            if until_s is None and now - progress_s > self._settings.hang_s:
                raise RunError(f"no trial finished for {self._settings.hang_s:.0f} s, after {seen} trials")
        return [member.answers[kind] for member in self._members]

    def _extend_deadlines(self, stalled_s: float) -> None:
        """Do not count time in which this process itself was not scheduled."""
        if stalled_s > 1.0:
            for member in self._members:
                if member.heartbeat_s is not None:
                    member.heartbeat_s += stalled_s

    def _listen(self, timeout_s: float) -> None:
        """Receive available messages."""
        for key, _ in self._selector.select(timeout_s):
            member: _Member = key.data
            try:
                frame = member.channel.receive()
            except (OSError, RunError) as error:
                self._selector.unregister(member.channel.socket)
                if member.state not in ("fault",) and "done" not in member.answers:
                    member.state = "dead"
                    member.error = self._describe_death(member, error)
                continue
            member.heartbeat_s = time.monotonic()
            self._handle(member, frame)

    def _handle(self, member: _Member, frame: Frame) -> None:
        if frame.kind == "trials":
            member.rows.append(frame.block)
            member.num_rows += int(frame.fields["rows"])
        elif frame.kind == "steps":
            member.steps.append(frame.block)
        elif frame.kind == "fault":
            member.state = "fault"
            member.error = f"rank {member.rank} ({member.location.name}): {frame.fields.get('error')}"
        elif frame.kind != "alive":
            member.answers[frame.kind] = frame.fields

    def _describe_death(self, member: _Member, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return _silence(member)
        why = ""
        if member.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = member.process.wait(1.0)
                why = f" (killed by signal {-code})" if code < 0 else f" (exit code {code})"
        return f"rank {member.rank} ({member.location.name}) died{why or ': its connection closed'}"

    def _stop_ranks(self) -> None:
        """Stop the other ranks and collect their remaining rows."""
        for member in self._members:
            with contextlib.suppress(OSError):
                member.channel.send("stop", {"now": True})
        until_s = time.monotonic() + _STOP_S
        while time.monotonic() < until_s and any(
            member.state not in ("dead", "fault") and "done" not in member.answers for member in self._members
        ):
            self._listen(0.1)

    def _set_dead(self, measured: Measurements) -> None:
        """Report the dead ranks, not those that lost their connection to them."""
        dead = [member for member in self._members if member.state == "dead"]
        if dead:
            measured.dead = [member.rank for member in dead]
            measured.error = "; ".join(member.error or "" for member in dead)


def _rows(blocks: Sequence[bytes], kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the complete rows that a rank has sent."""
    content = b"".join(blocks)
    return np.frombuffer(content[: len(content) // kind.itemsize * kind.itemsize], dtype=kind)


def _silence(member: _Member) -> str:
    return (
        f"rank {member.rank} ({member.location.name}) sent no heartbeat for {SILENT_S:.0f} s: "
        "it is stopped, unplugged, or its host is down"
    )


def _dial(host: str, port: int, limit_s: float) -> socket.socket:
    """Connect to an agent; retry while it is starting."""
    until_s = time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection((host, port), timeout=limit_s)
        except ConnectionRefusedError:
            if time.monotonic() + 0.2 > until_s:
                raise
            time.sleep(0.2)
