"""Read the profiler's files of a job as one ``Trace``: clocks, process groups, stages and micro-batches.

The stages of a pipeline follow from its messages: the first message of stage 0 in a step is a send, and every other
rank comes after the rank of which it first receives. A group without a description is tensor parallel if it
communicates in forward, else data parallel. Hosts whose clocks differ are aligned at the ends of common collectives.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh
from stagewright.trace.events import Trace, TraceEvent, WorkerTrace
from stagewright.trace.kineto.microbatches import Message
from stagewright.trace.kineto.profile_file import CommunicationSpan, RankProfile, read_profile
from stagewright.trace.kineto.rank_events import StepSpans, rank_events


def read_profiles(paths: Sequence[Path]) -> Trace:
    """Read one file for each rank."""
    profiles = [read_profile(path, rank) for rank, path in enumerate(paths)]
    by_rank: dict[int, RankProfile] = {}
    for profile in profiles:
        if profile.rank in by_rank:
            raise UsageError(
                f"{by_rank[profile.rank].path} and {profile.path} are both of rank {profile.rank}; give one file for "
                "each rank of one job"
            )
        by_rank[profile.rank] = profile
    return trace_of(by_rank)


def trace_of(by_rank: Mapping[int, RankProfile]) -> Trace:
    """Return the trace of all ranks, whose time starts with the first step."""
    shared = set.intersection(*(set(profile.steps) for profile in by_rank.values()))
    if not shared:
        listed = "; ".join(f"rank {rank}: {_listed(profile.steps)}" for rank, profile in by_rank.items())
        raise UsageError(f"the files have no step in common ({listed}); profile the same steps on every rank")
    events: dict[int, list[TraceEvent]] = {rank: [] for rank in by_rank}
    offsets = _clock_offsets(by_rank, shared)
    num_stages, tensor = 1, 1
    for step in sorted(shared):
        own = {
            rank: [s for s in profile.communication if s.end_s > begin_s and s.start_s < end_s]
            for rank, profile in by_rank.items()
            for begin_s, end_s in [profile.steps[step]]
        }
        stages = _stages(own)
        calls, axes = _calls(own), _axes(own, {rank: _first_backward_s(by_rank[rank], step) for rank in own})
        num_stages = max(num_stages, len(set(stages.values())))
        tensor = max(tensor, _tensor_size(own, axes, len(by_rank) // num_stages))
        for rank, profile in by_rank.items():
            begin_s, end_s = profile.steps[step]
            spans = StepSpans(
                step=step,
                begin_s=begin_s,
                end_s=end_s,
                stage=stages.get(rank),
                calls=calls,
                axes=axes,
                messages=_messages(own[rank], rank, stages, len(by_rank)),
            )
            recorded = rank_events(profile, spans)
            offset = offsets[rank]
            events[rank] += [replace(e, start_s=e.start_s + offset, end_s=e.end_s + offset) for e in recorded]
    first_s = min(event.start_s for of_rank in events.values() for event in of_rank if event.kind == "step")
    workers = tuple(
        WorkerTrace(
            rank=rank,
            host=by_rank[rank].host,
            clock_error_s=0.0,
            events=tuple(replace(e, start_s=e.start_s - first_s, end_s=e.end_s - first_s) for e in events[rank]),
        )
        for rank in sorted(by_rank)
    )
    training = any(span.phase == "backward" for profile in by_rank.values() for span in profile.compute)
    names = ", ".join(str(by_rank[rank].path) for rank in sorted(by_rank)[:2]) + (" …" if len(by_rank) > 2 else "")
    return Trace(
        run=names,
        mesh=_mesh(len(by_rank), num_stages, tensor),
        training=training,
        workers=workers,
        num_steps=len(shared),
    )


def _listed(steps: Iterable[int]) -> str:
    numbers = sorted(steps)
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"


def _clock_offsets(by_rank: Mapping[int, RankProfile], steps: Iterable[int]) -> dict[int, float]:
    """Return what to add to each rank's clock; ranks of one host share a clock."""
    reference = min(by_rank)
    first = min(steps)
    ends: dict[int, dict[str, float]] = {}
    for rank, profile in by_rank.items():
        begin_s, end_s = profile.steps[first]
        own = {rank: [s for s in profile.communication if begin_s < s.end_s <= end_s]}
        names = _calls(own)
        ends[rank] = {names[id(s)]: s.end_s for s in own[rank] if id(s) in names}
    offsets = {}
    for rank, profile in by_rank.items():
        common = ends[rank].keys() & ends[reference].keys()
        same_host = profile.host == by_rank[reference].host and profile.host != ""
        if same_host or not common:
            offsets[rank] = 0.0
        else:
            offsets[rank] = statistics.median(ends[reference][call] - ends[rank][call] for call in common)
    return offsets


def _calls(own: Mapping[int, Sequence[CommunicationSpan]]) -> dict[int, str]:
    """Name each collective call, by `id` of its span; the same name on all ranks of its group.

    Without the ranks of the group, calls are matched by their order, if every rank made as many.
    """
    numbered: dict[str, dict[int, list[CommunicationSpan]]] = {}
    for rank, spans in own.items():
        for span in spans:
            if span.name not in ("send", "receive"):
                numbered.setdefault(f"{span.group}|{span.name}", {}).setdefault(rank, []).append(span)
    names: dict[int, str] = {}
    for key, ranks in numbered.items():
        counts = {len(spans) for spans in ranks.values()}
        if len(counts) > 1:
            continue
        for spans in ranks.values():
            names |= {id(span): f"{key}|{number}" for number, span in enumerate(spans)}
    return names


def _first_backward_s(profile: RankProfile, step: int) -> float:
    """Return when the first backward of a step begins; infinity without one."""
    begin_s, end_s = profile.steps[step]
    starts = (s.start_s for s in profile.compute if s.phase == "backward" and begin_s <= s.start_s < end_s)
    return min(starts, default=math.inf)


def _axes(own: Mapping[int, Sequence[CommunicationSpan]], backward_s: Mapping[int, float]) -> dict[int, str]:
    """Return the mesh axis of each collective, by `id` of its span.

    A script may itself reduce its gradients after backward, outside of it: that is not in forward.
    """
    in_forward = {
        span.group
        for rank, spans in own.items()
        for span in spans
        if span.phase == "forward" and span.start_s < backward_s[rank] and span.name in ("all-reduce", "reduce-scatter")
    }
    return {
        id(span): span.axis or ("tensor" if span.group in in_forward else "data")
        for spans in own.values()
        for span in spans
        if span.name not in ("send", "receive")
    }


def _stages(own: Mapping[int, Sequence[CommunicationSpan]]) -> dict[int, int]:
    """Return the position of each rank in its pipeline; empty without messages."""
    before: dict[int, int | None] = {}
    for rank, spans in own.items():
        messages = [span for span in spans if span.name in ("send", "receive")]
        if not messages:
            continue
        first = messages[0]
        before[rank] = None if first.name == "send" else _peer(first, rank, len(own))
    stages: dict[int, int] = {}
    for rank in before:
        position, current, seen = 0, rank, {rank}
        while (previous := before.get(current)) is not None and previous not in seen:
            position, current = position + 1, previous
            seen.add(previous)
        stages[rank] = position
    return stages


def _peer(span: CommunicationSpan, rank: int, num_ranks: int) -> int | None:
    """Return the peer of a message; with two ranks it is the other one."""
    if span.peer is not None:
        return span.peer
    return 1 - rank if num_ranks == 2 and rank in (0, 1) else None


def _messages(
    spans: Sequence[CommunicationSpan], rank: int, stages: Mapping[int, int], num_ranks: int
) -> dict[int, Message]:
    """Number the sends and receives between two ranks in each direction."""
    counts: dict[tuple[str, int | None, str], int] = {}
    messages: dict[int, Message] = {}
    for span in spans:
        if span.name not in ("send", "receive"):
            continue
        peer = _peer(span, rank, num_ranks)
        later = peer is not None and stages.get(peer, 0) > stages.get(rank, 0)
        content = "activation" if (span.name == "send") == later else "gradient"
        key = (span.name, peer, content)
        messages[id(span)] = Message(span=span, peer=peer, content=content, microbatch=counts.get(key, 0))
        counts[key] = counts.get(key, 0) + 1
    return messages


def _tensor_size(own: Mapping[int, Sequence[CommunicationSpan]], axes: Mapping[int, str], default: int) -> int:
    """Return the largest tensor parallel group; all ranks of a stage where groups list no ranks."""
    spans = (span for spans in own.values() for span in spans if axes.get(id(span)) == "tensor")
    return max((len(span.group_ranks) or default for span in spans), default=1)


def _mesh(num_ranks: int, pipeline: int, tensor: int) -> Mesh:
    """Return the mesh of the ranks that were given; data parallel where the groups do not divide them."""
    if num_ranks % (pipeline * tensor) == 0:
        return Mesh(data=num_ranks // (pipeline * tensor), tensor=tensor, pipeline=pipeline)
    return Mesh(data=num_ranks)
