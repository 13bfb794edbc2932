"""One file of the PyTorch profiler as spans: what the device computed and communicated, and what the host did.

                     with a GPU                                        CPU only
    compute          kernels, memory copies on the device              operators
    communication    kernels of NCCL and DeepEP                        gloo:… of the backend's threads
    copy             copies between host and device                    –
    host             operators and CUDA calls that don't synchronize   –
    data loading     enumerate(DataLoader)#…                           the same
    step             ProfilerStep#N                                    the same

A step on a GPU ends when the last kernel that it launched has ended. Reading a file executes nothing from it.
"""

from __future__ import annotations

import bisect
import gzip
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stagewright.errors import UsageError
from stagewright.files.json_values import MAX_FILE_BYTES, parse_json
from stagewright.trace.kineto.flops import COUNTED_OPERATORS, operator_flops
from stagewright.trace.kineto.groups import Group, Groups, listed_ranks
from stagewright.trace.kineto.intervals import Interval, merge, subtract

MAX_UNPACKED_BYTES = 4 * MAX_FILE_BYTES
"""Size above which a trace is refused."""

CHECKPOINT_SPAN, GC_SPAN = "stagewright: checkpoint", "stagewright: garbage collection"
"""Annotations of `sw.attach` for what the profiler does not see."""

Phase: TypeAlias = Literal["forward", "backward", "optimizer"]

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cpu_op", "cuda_runtime", "cuda_driver")
_COLLECTIVES = (
    *(("all_reduce", "all-reduce"), ("allreduce", "all-reduce"), ("reduce_scatter", "reduce-scatter")),
    *(("reducescatter", "reduce-scatter"), ("all_gather", "all-gather"), ("allgather", "all-gather")),
    *(("all_to_all", "all-to-all"), ("alltoall", "all-to-all"), ("broadcast", "broadcast"), ("barrier", "barrier")),
    *(("gather", "gather"), ("scatter", "scatter"), ("reduce", "reduce")),
)
_EXPERT = re.compile(r"\bep::(?:internode|intranode)\w*::(\w+)|deep_ep\w*::\w*::(\w+)")
_HOST_COMMUNICATION = re.compile(r"^(c10d::|_c10d_functional|nccl:|gloo:|record_param_comms)|wait_tensor")
_SIZES = {"float": 4, "float32": 4, "int": 4, "long": 8, "double": 8, "bfloat16": 2, "half": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSpan:
    """A kernel, or an operator on a CPU."""

    start_s: float
    end_s: float
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationSpan:
    """A collective, send or receive, from its start on this rank to its end."""

    start_s: float
    end_s: float
    name: str
    """all-reduce, …; send, receive."""
    group: str
    """Identity of its process group, the same on all of its ranks; empty if unknown."""
    group_ranks: tuple[int, ...]
    axis: str
    """data, tensor, pipeline, expert, …; empty if the group's description names none."""
    peer: int | None
    bytes: int | None
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """What one rank did, in seconds of its host's clock."""

    path: Path
    rank: int
    world_size: int
    host: str
    on_device: bool
    """Whether it computed on a GPU."""
    steps: Mapping[int, Interval]
    compute: Sequence[ComputeSpan]
    communication: Sequence[CommunicationSpan]
    copies: Sequence[Interval]
    host_work: Sequence[Interval]
    marks: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    """data-loading, checkpoint, garbage-collection."""
    flops: float = 0.0
    """Of matrix products and attention in all steps, where shapes were recorded."""


def read_profile(path: Path, default_rank: int) -> RankProfile:
    """Read a file; the rank is the one that it states, else the given one."""
    content = _read(path)
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise UsageError(f"{path} is not a profiler trace: it has no list of traceEvents")
    about = content if isinstance(content, dict) else {}
    job = about.get("distributedInfo")
    job = job if isinstance(job, dict) else {}
    base = about.get("baseTimeNanoseconds", 0)
    base_s = base * 1e-9 if isinstance(base, int | float) and math.isfinite(base) else 0.0
    spans = sorted(_complete(events, path), key=lambda event: (event["ts"], -event["dur"]))
    if not spans:
        raise UsageError(f"{path} has no events with a duration; record it with torch.profiler")
    reader = _Reader(spans, base_s, Groups.of(job))
    rank = job.get("rank")
    size = job.get("world_size")
    return RankProfile(
        path=path,
        rank=rank if isinstance(rank, int) and rank >= 0 else default_rank,
        world_size=size if isinstance(size, int) and size > 0 else 1,
        host=str(about.get("host_name") or ""),
        on_device=reader.on_device,
        steps=reader.steps(),
        compute=reader.compute,
        communication=reader.communication,
        copies=merge(reader.copies),
        host_work=merge(reader.host_work),
        marks={name: merge(spans) for name, spans in reader.marks.items()},
        flops=sum(
            operator_flops(event["name"], event["args"].get("Input Dims"))
            for event in spans
            if event["name"].startswith(COUNTED_OPERATORS)
        ),
    )


class _Reader:
    """Sort the events of a file into spans."""

    def __init__(self, events: Sequence[dict[str, Any]], base_s: float, groups: Groups) -> None:
        self._base_s, self._groups = base_s, groups
        self.on_device = any(event.get("cat") in _DEVICE for event in events)
        self.compute: list[ComputeSpan] = []
        self.communication: list[CommunicationSpan] = []
        self.copies: list[Interval] = []
        self.host_work: list[Interval] = []
        self.marks: dict[str, list[Interval]] = {"data-loading": [], "checkpoint": [], "garbage-collection": []}
        self._host_steps: dict[int, Interval] = {}
        self._last_end_s = {"launch": list[float](), "end": list[float]()}
        self._backward, self._optimizer = _phase_spans(events)
        launches = {
            str(event["args"]["correlation"]): event
            for event in events
            if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
        }
        waits: list[Interval] = []
        operators: list[tuple[Phase, Interval]] = []
        called: list[tuple[Phase, int | None]] = []  # of c10d, in the order in which Gloo's threads execute them
        for event in events:
            name, category, span = event["name"], event.get("cat"), self._span(event)
            if category == "user_annotation":
                self._annotate(name, span)
            if category in _DEVICE:
                launch = launches.get(str(event["args"].get("correlation")), event)
                self._add_kernel(event, span, self._phase(launch), launch)
            elif self.on_device:
                if category in _HOST and "Synchronize" not in name and not _HOST_COMMUNICATION.search(name):
                    self.host_work.append(span)
            elif name.startswith("gloo:"):
                kind = name.removeprefix("gloo:")
                phase, peer = called.pop(0) if called else (self._phase(event), None)
                self.communication.append(self._communication(event, kind, span, phase, peer))
            elif category == "cpu_op":
                if name.startswith("c10d::"):
                    is_message = name in ("c10d::send", "c10d::recv_")
                    peer = _concrete_peer(event["args"]) if is_message else None
                    called.append((self._phase(event), None if peer is None else groups.global_peer(peer)))
                if _HOST_COMMUNICATION.search(name):
                    waits.append(span)
                else:
                    operators.append((self._phase(event), span))
        waiting = merge([*waits, *(span for marked in self.marks.values() for span in marked)])
        phases: tuple[Phase, ...] = ("forward", "backward", "optimizer")
        for phase in phases:
            busy = subtract(merge(span for started_in, span in operators if started_in == phase), waiting)
            self.compute += [ComputeSpan(start_s=start, end_s=end, phase=phase) for start, end in busy]
        self.compute.sort(key=lambda span: span.start_s)
        self.communication.sort(key=lambda span: span.start_s)

    def steps(self) -> dict[int, Interval]:
        """Return the steps; the whole file is one where the profiler had no schedule."""
        if not self._host_steps:
            spans = [(span.start_s, span.end_s) for span in self.compute]
            spans += [(span.start_s, span.end_s) for span in self.communication]
            return {0: (min(start for start, _ in spans), max(end for _, end in spans))} if spans else {}
        if not self.on_device:
            return dict(sorted(self._host_steps.items()))
        steps: dict[int, Interval] = {}
        launched = sorted(zip(self._last_end_s["launch"], self._last_end_s["end"], strict=True))
        times = [launch for launch, _ in launched]
        begin_s = -math.inf
        for number, (start_s, end_s) in sorted(self._host_steps.items()):
            own = launched[bisect.bisect_left(times, start_s) : bisect.bisect_left(times, end_s)]
            start_s = max(start_s, begin_s)
            begin_s = max([end_s, *(end for _, end in own)])
            steps[number] = (start_s, begin_s)
        return steps

    def _span(self, event: Mapping[str, Any]) -> Interval:
        start = event["ts"] * 1e-6 + self._base_s
        return start, start + event["dur"] * 1e-6

    def _phase(self, event: Mapping[str, Any]) -> Phase:
        """Return the phase in which the host started an event."""
        where = _thread(event)
        if _contains(self._optimizer.get(where, ()), event["ts"]):
            return "optimizer"
        return "backward" if _contains(self._backward.get(where, ()), event["ts"]) else "forward"

    def _annotate(self, name: str, span: Interval) -> None:
        if name.startswith("ProfilerStep#") and name[13:].isdigit():
            self._host_steps[int(name[13:])] = span
        elif name.startswith("enumerate(DataLoader)"):
            self.marks["data-loading"].append(span)
        elif name == CHECKPOINT_SPAN:
            self.marks["checkpoint"].append(span)
        elif name == GC_SPAN:
            self.marks["garbage-collection"].append(span)

    def _add_kernel(self, event: dict[str, Any], span: Interval, phase: Phase, launch: Mapping[str, Any]) -> None:
        self._last_end_s["launch"].append(self._span(launch)[0])
        self._last_end_s["end"].append(span[1])
        name, args = event["name"], event["args"]
        expert = _EXPERT.search(name)
        if "nccl" in name.lower() or "Collective name" in args:
            kind = str(args.get("Collective name") or name)
            self.communication.append(self._communication(event, kind, span, phase, _device_peer(args, kind)))
        elif expert is not None:
            self.communication.append(self._communication(event, "all_to_all", span, phase, None))
        elif event.get("cat") == "gpu_memcpy" and "DtoD" not in name:
            self.copies.append(span)
        else:
            self.compute.append(ComputeSpan(start_s=span[0], end_s=span[1], phase=phase))

    def _communication(
        self, event: Mapping[str, Any], kind: str, span: Interval, phase: Phase, peer: int | None
    ) -> CommunicationSpan:
        args = event["args"]
        name = _collective_name(kind)
        group_name = str(args.get("Process Group Name") or "")
        is_message = name in ("send", "receive")
        unnamed = self._groups.messages if is_message else self._groups.collectives
        group = self._groups.by_name.get(group_name, Group()) if group_name or self.on_device else unnamed
        described = str(args.get("Process Group Description") or group.described)
        ranks = listed_ranks(args.get("Process Group Ranks")) or group.ranks
        size = args.get("In msg nelems")
        item = _SIZES.get(str(args.get("dtype", "")).lower())
        axis = "pipeline" if is_message else Group(described=described).axis(name)
        return CommunicationSpan(
            start_s=span[0],
            end_s=span[1],
            name=name,
            group=",".join(map(str, ranks)) or group_name,
            group_ranks=ranks,
            axis=axis,
            peer=peer,
            bytes=size * item if isinstance(size, int) and size >= 0 and item is not None else None,
            phase=phase,
        )


def _read(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > MAX_UNPACKED_BYTES:
            raise UsageError(f"{path} has {size} bytes, but at most {MAX_UNPACKED_BYTES} are read; profile fewer steps")
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                content = file.read(MAX_UNPACKED_BYTES + 1)
            if len(content) > MAX_UNPACKED_BYTES:
                raise UsageError(f"{path} unpacks to more than {MAX_UNPACKED_BYTES} bytes; profile fewer steps")
        else:
            content = path.read_bytes()
        return parse_json(content)
    except (OSError, EOFError) as error:
        raise UsageError(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None


def _complete(events: Sequence[object], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events with a duration; UsageError for one whose times are no numbers."""
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        ts, dur, name = event.get("ts"), event.get("dur", 0), event.get("name")
        if isinstance(ts, str):  # some versions write exact decimals as text
            try:
                ts = float(ts)
            except ValueError:
                ts = None
        if not isinstance(name, str):
            continue
        if not all(isinstance(t, int | float) and math.isfinite(t) for t in (ts, dur)) or dur < 0:
            raise UsageError(f"{path} has an event {name[:80]!r} from {event.get('ts')!r} of duration {dur!r}")
        event["ts"], event["dur"] = ts, dur
        if not isinstance(event.get("args"), dict):
            event["args"] = {}
        yield event


def _phase_spans(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Interval]], dict[str, list[Interval]]]:
    """Return for each thread when it was in backward and in the optimizer step, in the file's unit of time."""
    backward: dict[str, list[Interval]] = {}
    optimizer: dict[str, list[Interval]] = {}
    for event in events:
        if event["name"].startswith("autograd::engine::evaluate_function"):
            spans = backward
        elif event["name"].startswith("Optimizer.step#"):
            spans = optimizer
        else:
            continue
        spans.setdefault(_thread(event), []).append((event["ts"], event["ts"] + event["dur"]))
    return {k: merge(v) for k, v in backward.items()}, {k: merge(v) for k, v in optimizer.items()}


def _thread(event: Mapping[str, Any]) -> str:
    return f"{event.get('pid')} {event.get('tid')}"


def _contains(intervals: Sequence[Interval], moment: float) -> bool:
    index = bisect.bisect_right(intervals, (moment, math.inf)) - 1
    return index >= 0 and intervals[index][0] <= moment < intervals[index][1]


def _collective_name(kind: str) -> str:
    lower = kind.lower()
    if lower.startswith("recv"):
        return "receive"
    if lower.startswith("send") and "sendrecv" not in lower:
        return "send"
    for part, name in _COLLECTIVES:
        if part in lower:
            return name
    return "receive" if "sendrecv" in lower else kind[:40]


def _device_peer(args: Mapping[str, Any], kind: str) -> int | None:
    key = "Dst Rank" if _collective_name(kind) == "send" else "Src Rank"
    peer = args.get(key)
    return peer if isinstance(peer, int) and peer >= 0 else None


def _concrete_peer(args: Mapping[str, Any]) -> int | None:
    """Return the peer of c10d's send and receive, whose third argument it is; needs record_shapes=True."""
    values = args.get("Concrete Inputs")
    if isinstance(values, list) and len(values) > 2 and str(values[2]).isdigit():
        return int(values[2])
    return None
