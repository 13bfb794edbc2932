from __future__ import annotations

import importlib
from typing import Any

import pytest

from stagewright.spec.plan import Mesh
from stagewright.trace.events import Trace, TraceEvent, WorkerTrace


def event(kind: Any, start_s: float, end_s: float, *, step: int = 0, **fields: Any) -> TraceEvent:
    empty: dict[str, Any] = {
        "stream": "compute",
        "stage": 0,
        "microbatch": None,
        "bytes": None,
        "peer": None,
        "note": None,
    }
    return TraceEvent(step=step, kind=kind, start_s=start_s, end_s=end_s, **{**empty, **fields})


def one_worker(*events: TraceEvent) -> Trace:
    worker = WorkerTrace(rank=0, host="", clock_error_s=0.0, events=events)
    return Trace(run="", mesh=Mesh(), training=True, workers=(worker,), num_steps=1)


def test_parts_cover_the_step_exactly_once() -> None:
    step = (
        event("step", 0.0, 20.0),
        event("receive", 1.0, 3.0, stream="receive"),
        event("decode", 3.0, 3.5),
        event("forward", 3.5, 6.0),
        event("collective", 5.0, 6.0, note="tensor"),  # inside the forward, which waits for it
        event("collective", 5.5, 9.0, stream="collective"),  # overlapped
        event("send", 6.5, 7.0, stream="send"),
        event("backward-input", 7.0, 9.0),
        event("backward-weight", 9.0, 10.0),
        event("recompute", 9.25, 9.5),
        event("send", 10.0, 13.0, stream="send", note="flush"),
        event("optimizer", 13.0, 14.0),
        event("collective", 15.0, 20.0, note="together"),
    )
    (parts,) = importlib.import_module("step_parts").step_parts(one_worker(*step))
    assert parts == {
        "forward_s": 1.5,
        "backward_s": 2.0,
        "weights_s": 0.75,
        "recompute_s": 0.25,
        "optimizer_s": 1.0,
        "codec_s": 0.5,
        "receive_s": 2.0,
        "send_s": 0.5,
        "until_sent_s": 3.0,
        "sums_s": 1.0,
        "at_the_end_s": 5.0,
        "between_s": 1.0 + 0.5 + 1.0,
        "step_s": 20.0,
        "schedule_idle_s": 0.0,
    }


def test_parts_are_means_over_steps() -> None:
    trace = one_worker(
        event("step", 0.0, 4.0),
        event("forward", 0.0, 1.0),
        event("step", 4.0, 10.0, step=1),
        event("forward", 5.0, 9.0, step=1),
    )
    (parts,) = importlib.import_module("step_parts").step_parts(trace)
    assert (parts["step_s"], parts["forward_s"], parts["between_s"]) == (5.0, 2.5, 2.5)
    assert sum(parts.values()) == pytest.approx(2 * parts["step_s"])
