"""The coordinator: starts or meets the ranks, leads them through a run, and gathers what they measured.

    hosts given      agents that listen there, met over TCP with the shared token
    in a lab         one local process in each namespace
    otherwise        local processes on the loopback device

Where a rank dies (its connection ends, or it is silent for some seconds), the others are stopped at once, the trials
that all had finished are kept, and the dead one is named.
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
from stagewright.fabric.ranks.wire import TO_COORDINATOR, Channel, Frame, meet_agent
from stagewright.fabric.traffic.workload import Workload
from stagewright.fabric.trials import TrialTable, row_type, step_type

__all__ = ["Coordinator", "Measured", "Place", "Settings"]

SILENT_S = 6.0  # without a sign of life a rank is taken for dead
_STOP_S = 3.0  # the others have this long to hand in what they have
_PREPARE_S = 60.0
_LISTEN_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank runs."""

    name: str
    """For messages: the host as it was typed, a namespace, "local"."""
    host: str = "127.0.0.1"
    """The address at which the other ranks find it."""
    port: int | None = None
    """Of an agent; None: a local process is started."""
    namespace: str | None = None
    """The network namespace of a local process; None: this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a run is carried out."""

    engine: str = "sockets"
    """sockets, gloo or nccl."""
    streams: int = 1
    """Connections for each pair of ranks."""
    congestion: str | None = None
    """Congestion control of the data connections; None: the host's."""
    buffer_bytes: int | None = None
    """Send and receive buffers of the data connections; None: the kernel's choice."""
    probe: bool = True
    """Whether pairs are probed first."""
    steps: bool = True
    """Whether the times of single steps are kept."""
    token: bytes = b""
    """What agents share."""
    meet_s: float = 5.0
    """How long an agent may take to answer."""
    hang_s: float = 60.0
    """Without any trial for this long, the run has failed."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """What came of a run."""

    trials: TrialTable
    """Trials that all ranks finished."""
    steps: list[npt.NDArray[Any]]
    """Step times of each rank, as far as they were kept."""
    pairs: list[PairProbe]
    """What lies between pairs; empty where it was not probed."""
    links: list[dict[str, Any]]
    """The connections' state at the end."""
    hosts: list[dict[str, Any]]
    """What each rank told of its host."""
    wall_s: float = 0.0
    """Time of all trials, on the coordinator's clock."""
    error: str | None = None
    """Who died and why, in one sentence; None where all went well."""
    dead: list[int] = field(default_factory=list)
    """The ranks that are to blame for that."""


@dataclass(slots=True, kw_only=True)
class _Member:
    rank: int
    place: Place
    channel: Channel
    process: subprocess.Popen[bytes] | None = None
    heard_s: float | None = None  # None: it has not said its first word; to start takes its time
    state: str = "new"  # done, fault or dead in the end
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[bytes] = field(default_factory=list)
    num_rows: int = 0
    steps: list[bytes] = field(default_factory=list)
    error: str | None = None


class Coordinator:
    """A context manager around one set of ranks."""

    def __init__(self, workload: Workload, places: Sequence[Place], settings: Settings) -> None:
        if len(places) != workload.num_ranks:
            raise UsageError(
                f"the workload has {workload.num_ranks} ranks, but there are {len(places)} places for them"
            )
        self._workload = workload
        self._settings = settings
        self._places = places
        self._members: list[_Member] = []
        self._selector = selectors.DefaultSelector()
        self._token = settings.token or secrets.token_bytes(64)

    def __enter__(self) -> Coordinator:
        try:
            for rank, place in enumerate(self._places):
                self._members.append(self._meet(rank, place))
        except BaseException:
            self.close()
            raise
        for member in self._members:
            member.channel.socket.settimeout(SILENT_S)  # one that is stopped in the middle of a message ends the wait
            self._selector.register(member.channel.socket, selectors.EVENT_READ, member)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, progress: Callable[[int, int], None] | None = None) -> Measured:
        """Prepare, connect, probe, run; what was finished is returned even where a rank died."""
        workload, settings = self._workload, self._settings
        session = secrets.token_hex(16)
        local = sum(place.port is None for place in self._places)
        # Spinning pays where each rank has a core to itself, and costs the others theirs where not.
        spin_s = 50e-6 if local * 2 <= (os.cpu_count() or 1) else 0.0
        measured = Measured(trials=TrialTable.join([], 0), steps=[], pairs=[], links=[], hosts=[])
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
            self._tell_all("connect", {"addresses": addresses})
            for host, told in zip(hosts, self._gather("connected", _PREPARE_S + settings.hang_s), strict=True):
                host["congestion"] = told["congestion"]
            if settings.probe and settings.engine == "sockets" and workload.num_ranks > 1:
                self._tell_all("probe")
                answers = self._gather("probed", _PREPARE_S + settings.hang_s)
                measured.pairs = [PairProbe.from_dict(pair) for answer in answers for pair in answer["pairs"]]
            self._begin = time.monotonic()
            self._tell_all("run", {"steps": settings.steps})
            done = self._gather("done", None, progress)
            measured.links = [link for answer in done for link in answer["links"]]
        except (RunError, OSError) as error:
            measured.error = str(error)
            self._wind_down()
            self._blame(measured)
        except KeyboardInterrupt:
            measured.error = "interrupted"
            self._wind_down()
        measured.wall_s = time.monotonic() - self._begin
        num_messages = len(workload.messages)
        kind = row_type(workload.num_ranks)
        blocks = [np.frombuffer(b"".join(member.rows), dtype=kind) for member in self._members]
        measured.trials = TrialTable.join(blocks, num_messages)
        measured.steps = [np.frombuffer(b"".join(member.steps), dtype=step_type()) for member in self._members]
        return measured

    def close(self) -> None:
        """Say goodbye; local processes that do not leave are ended."""
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

    def _meet(self, rank: int, place: Place) -> _Member:
        if place.port is not None:
            try:
                connection = _call(place.host, place.port, self._settings.meet_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel = meet_agent(connection, self._settings.token)
            except (OSError, RunError) as error:
                why = getattr(error, "strerror", None) or str(error)
                raise UsageError(
                    f"no agent answers at {place.name} ({place.host}:{place.port}): {why}; "
                    "start one there with: stagewright fabric agent --token-file FILE"
                ) from None
            return _Member(rank=rank, place=place, channel=channel)
        ours, theirs = socket.socketpair()
        words = [sys.executable, "-m", "stagewright.fabric.ranks.rank", str(theirs.fileno()), place.host]
        if place.namespace is not None:
            words = ["ip", "netns", "exec", place.namespace, *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            words,
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        theirs.close()
        ours.sendall(self._token[:64].ljust(64, b"\0"))
        return _Member(rank=rank, place=place, channel=Channel(ours, None, accepts=TO_COORDINATOR), process=process)

    def _tell_all(self, kind: str, fields: dict[str, Any] | None = None) -> None:
        for member in self._members:
            member.channel.send(kind, fields)

    def _gather(
        self, kind: str, limit_s: float | None, progress: Callable[[int, int], None] | None = None
    ) -> list[dict[str, Any]]:
        """Everybody's answer; a fault, a death or silence is a `RunError`."""
        until_s = None if limit_s is None else time.monotonic() + limit_s
        moved_s, seen = time.monotonic(), 0
        while any(kind not in member.answers for member in self._members):
            before = time.monotonic()
            self._listen(_LISTEN_S)
            now = time.monotonic()
            self._forgive(now - before - _LISTEN_S)
            finished = min(member.num_rows for member in self._members) // len(self._workload.messages)
            if finished != seen:
                moved_s, seen = now, finished
            if progress is not None:
                progress(finished, self._workload.trials)
            for member in self._members:
                if member.state in ("dead", "fault"):
                    raise RunError(member.error or f"rank {member.rank} failed")
                if member.heard_s is not None and now - member.heard_s > SILENT_S:
                    member.state, member.error = "dead", _silence(member)
                    raise RunError(member.error)
            if until_s is not None and now > until_s:
                late = [member.rank for member in self._members if kind not in member.answers]
                raise RunError(f"rank {', '.join(map(str, late))} did not answer {kind!r} within {limit_s:.0f} s")
            if until_s is None and now - moved_s > self._settings.hang_s:
                raise RunError(f"no trial was finished for {self._settings.hang_s:.0f} s, after {seen} trials")
        return [member.answers[kind] for member in self._members]

    def _forgive(self, stalled_s: float) -> None:
        """While this process itself was not let run, nobody could be heard."""
        if stalled_s > 1.0:
            for member in self._members:
                if member.heard_s is not None:
                    member.heard_s += stalled_s

    def _listen(self, timeout_s: float) -> None:
        """Take what has arrived."""
        for key, _ in self._selector.select(timeout_s):
            member: _Member = key.data
            try:
                frame = member.channel.receive()
            except (OSError, RunError) as error:
                self._selector.unregister(member.channel.socket)
                if member.state not in ("fault",) and "done" not in member.answers:
                    member.state = "dead"
                    member.error = self._obituary(member, error)
                continue
            member.heard_s = time.monotonic()
            self._take(member, frame)

    def _take(self, member: _Member, frame: Frame) -> None:
        if frame.kind == "trials":
            member.rows.append(frame.block)
            member.num_rows += int(frame.fields["rows"])
        elif frame.kind == "steps":
            member.steps.append(frame.block)
        elif frame.kind == "fault":
            member.state = "fault"
            member.error = f"rank {member.rank} ({member.place.name}): {frame.fields.get('error')}"
        elif frame.kind != "alive":
            member.answers[frame.kind] = frame.fields

    def _obituary(self, member: _Member, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return _silence(member)
        why = ""
        if member.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = member.process.wait(1.0)
                why = f" (killed by signal {-code})" if code < 0 else f" (exit code {code})"
        return f"rank {member.rank} ({member.place.name}) died{why or ': its connection ended'}"

    def _wind_down(self) -> None:
        """Stop the others and take what they still hand in."""
        for member in self._members:
            with contextlib.suppress(OSError):
                member.channel.send("stop", {"now": True})
        until_s = time.monotonic() + _STOP_S
        while time.monotonic() < until_s and any(
            member.state not in ("dead", "fault") and "done" not in member.answers for member in self._members
        ):
            self._listen(0.1)

    def _blame(self, measured: Measured) -> None:
        """The dead are to blame; ranks that lost their connection to them are not."""
        dead = [member for member in self._members if member.state == "dead"]
        if dead:
            measured.dead = [member.rank for member in dead]
            measured.error = "; ".join(member.error or "" for member in dead)


def _silence(member: _Member) -> str:
    return (
        f"rank {member.rank} ({member.place.name}) has been silent for {SILENT_S:.0f} s: "
        "stopped, unplugged, or its host is down"
    )


def _call(host: str, port: int, limit_s: float) -> socket.socket:
    """A connection to an agent; one that is about to start is waited for."""
    until_s = time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection((host, port), timeout=limit_s)
        except ConnectionRefusedError:
            if time.monotonic() + 0.2 > until_s:
                raise
            time.sleep(0.2)
