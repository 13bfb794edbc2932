"""The events of one rank in one step, from its spans: every instant of the step belongs to exactly one class.

    compute  >  exposed communication  >  host–device copy  >  data loading, checkpoint, garbage collection
             >  launch (the host prepares work and the device has none)  >  the rest, which is idle

    spans       ▕kernel▏▕kernel▏  ▕kernel▏      ▕all-reduce▏▕optimizer▏
                        ▕all-reduce, overlapped▏
    events      ▕forward        ▕launch▏ ▏      ▕collective▏▕optimizer▏     nested, as in our own runs

A run of kernels of one phase is one event, and what interrupts it is nested in it. In a pipeline a run also ends where
a message is sent or has arrived; the runs that fit between the messages are the micro-batches (`microbatches.py`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stagewright.trace.events import EventKind, Stream, TraceEvent
from stagewright.trace.kineto.intervals import Interval, clip, intersect, merge, subtract
from stagewright.trace.kineto.microbatches import Message, Run, number_microbatches
from stagewright.trace.kineto.profile_file import CommunicationSpan, Phase, RankProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpans:
    """What a rank did in one step, with the identities that only a look at all ranks gives."""

    step: int
    begin_s: float
    end_s: float
    stage: int | None
    """Position in the pipeline; None without one."""
    calls: Mapping[int, str]
    """Identity of each collective call, by `id` of its span."""
    axes: Mapping[int, str]
    """Mesh axis of each collective, by `id` of its span."""
    messages: Mapping[int, Message]
    """By `id` of the span of each send and receive."""


def rank_events(profile: RankProfile, spans: StepSpans) -> list[TraceEvent]:
    """Return the events of a step, which cover it without gaps."""
    begin_s, end_s = spans.begin_s, spans.end_s
    compute = [s for s in profile.compute if s.end_s > begin_s and s.start_s < end_s]
    phases: dict[Phase, list[Interval]] = {
        phase: clip(merge((s.start_s, s.end_s) for s in compute if s.phase == phase), begin_s, end_s)
        for phase in ("optimizer", "backward", "forward")
    }
    computing: list[Interval] = []
    segments: list[tuple[Interval, Phase]] = []
    for phase, intervals in phases.items():  # phases overlap where kernels run concurrently
        own = subtract(intervals, computing)
        segments += [(interval, phase) for interval in own]
        computing = merge([*computing, *own])
    segments.sort()
    communication = [s for s in profile.communication if s.end_s > begin_s and s.start_s < end_s]
    events = [_event(spans, "step", "compute", begin_s, end_s)]
    events += [event for span in communication if (event := _overlapped(span, spans)) is not None]
    all_communication = merge((s.start_s, s.end_s) for s in communication)
    exposed = subtract(clip(all_communication, begin_s, end_s), computing)
    details = [_exposed_event(span, part, spans) for span, part in _owners(exposed, communication)]
    covered = merge([*computing, *exposed])
    for kind, host_intervals in _host_classes(profile):
        own = intersect(subtract([(begin_s, end_s)], covered), host_intervals)
        details += [_event(spans, kind, "compute", start, end) for start, end in own]
        covered = merge([*covered, *own])
    breaks = sorted(
        message.span.start_s if message.span.name == "send" else message.span.end_s
        for message in spans.messages.values()
    )
    events += _actions(segments, breaks, spans)
    rest: EventKind = "idle" if profile.on_device else "launch"  # a CPU's host is the device: Python between operators
    details += [_event(spans, rest, "compute", *gap) for gap in subtract([(begin_s, end_s)], covered)]
    return sorted([*events, *details], key=lambda event: (event.start_s, -event.end_s))


def _host_classes(profile: RankProfile) -> Iterator[tuple[EventKind, Sequence[Interval]]]:
    yield "copy", profile.copies
    yield "garbage-collection", profile.marks.get("garbage-collection", ())
    yield "data-loading", profile.marks.get("data-loading", ())
    yield "checkpoint", profile.marks.get("checkpoint", ())
    yield "launch", profile.host_work


def _owners(
    exposed: Sequence[Interval], spans: Sequence[CommunicationSpan]
) -> Iterator[tuple[CommunicationSpan, Interval]]:
    """Give each exposed piece of time to the earliest communication under way; to a send only if nothing else is."""
    starts = [span.start_s for span in spans]
    longest_s = max((span.end_s - span.start_s for span in spans), default=0.0)
    for start, end in exposed:
        while start < end:
            near = spans[bisect.bisect_left(starts, start - longest_s) : bisect.bisect_right(starts, start)]
            active = [span for span in near if span.end_s > start]
            owner = min(active, key=lambda span: (span.name == "send", span.start_s))
            stop = min(end, owner.end_s)
            if owner.name == "send":  # until something else begins
                index = bisect.bisect_right(starts, start)
                stop = min([stop, *(s.start_s for s in spans[index:] if s.start_s < stop and s.name != "send")])
            yield owner, (start, stop)
            start = stop


def _actions(segments: Sequence[tuple[Interval, Phase]], breaks: Sequence[float], spans: StepSpans) -> list[TraceEvent]:
    """Return one event for each run of compute of one phase; micro-batches are numbered where messages tell them."""
    runs: list[Run] = []
    for (start, end), phase in segments:
        same = runs and runs[-1][0] == phase
        if same and bisect.bisect_right(breaks, runs[-1][2]) == bisect.bisect_right(breaks, start):
            runs[-1] = (phase, runs[-1][1], end, runs[-1][3] + end - start)
        else:
            runs.append((phase, start, end, end - start))
    numbers = number_microbatches(runs, spans.messages.values())
    return [
        _event(spans, phase, "compute", start, end, microbatch=numbers.get(index))
        for index, (phase, start, end, _) in enumerate(runs)
    ]


def _overlapped(span: CommunicationSpan, spans: StepSpans) -> TraceEvent | None:
    """Return a collective as a whole: what overlaps with compute is shown, but blocks nobody."""
    start, end = max(span.start_s, spans.begin_s), min(span.end_s, spans.end_s)
    if id(span) in spans.messages or span.name in ("send", "receive"):
        return None
    return _event(spans, "collective", "collective", start, end, span=span)


def _exposed_event(span: CommunicationSpan, part: Interval, spans: StepSpans) -> TraceEvent:
    message = spans.messages.get(id(span))
    if message is None:
        return _event(spans, "collective", "compute", *part, span=span)
    kind: Literal["send", "receive"] = "send" if span.name == "send" else "receive"
    event = _event(spans, kind, kind, *part, microbatch=message.microbatch)
    return replace(event, peer=message.peer, note=message.content, bytes=span.bytes)


def _event(
    spans: StepSpans,
    kind: EventKind,
    stream: Stream,
    start_s: float,
    end_s: float,
    *,
    microbatch: int | None = None,
    span: CommunicationSpan | None = None,
) -> TraceEvent:
    note = None
    if span is not None:
        axis = spans.axes.get(id(span), "")
        note = f"{span.name}, {axis}" if axis else span.name
    return TraceEvent(
        step=spans.step,
        kind=kind,
        stream=stream,
        stage=None if kind == "step" else spans.stage,
        microbatch=microbatch,
        start_s=start_s,
        end_s=end_s,
        bytes=None if span is None else span.bytes,
        peer=None,
        note=note,
        call=None if span is None else spans.calls.get(id(span)),
    )
