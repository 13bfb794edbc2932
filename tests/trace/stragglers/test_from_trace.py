"""Operations of a trace whose ranks compete for cores."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import stragglers
from stagewright.spec.plan import Mesh
from stagewright.trace.events import StepScheduling, Trace, TraceEvent
from stagewright.trace.stragglers.blame import find_culprit
from stagewright.trace.stragglers.from_trace import job_of_trace
from stagewright.trace.stragglers.job import Job

COMPUTE = ("forward", "backward", "optimizer", "host")


def _scheduled(trace: Trace, *, cpu_s: float, runqueue_s: Mapping[int, float], loading_s: float = 0.0) -> Trace:
    """Return the trace with the same scheduling in all steps of a rank."""
    workers = []
    for worker in trace.workers:
        waited_s = runqueue_s.get(worker.rank, 0.0)
        step = StepScheduling(cpu_s=cpu_s, runqueue_s=waited_s, loading_runqueue_s=loading_s)
        workers.append(replace(worker, scheduling=dict.fromkeys(trace.steps, step)))
    return replace(trace, workers=tuple(workers))


def _slow(trace: Trace, rank: int, factor: float) -> Trace:
    """Return the trace of data-parallel replicas with a slower forward and backward of one rank."""

    def longer(event: TraceEvent) -> float:
        return (factor - 1) * event.seconds if event.kind in ("forward", "backward") else 0.0

    workers = []
    for worker in trace.workers:
        events, late_s = [], dict.fromkeys(trace.steps, 0.0)
        for event in worker.events:
            before_s = late_s[event.step]
            if worker.rank == rank and event.kind != "step":
                late_s[event.step] += longer(event)
            events.append(replace(event, start_s=event.start_s + before_s, end_s=event.end_s + late_s[event.step]))
        workers.append(replace(worker, events=tuple(events)))
    return replace(trace, workers=tuple(workers))


def _total_s(job: Job, replica: int, kinds: tuple[str, ...]) -> np.ndarray:
    return np.sum([times[replica] for op, times in job.durations.items() if op.kind in kinds], axis=0)


def test_waiting_for_a_core_is_not_compute() -> None:
    trace = stragglers.simulate_job(Mesh.parse("data=2"), 3, None)
    before = job_of_trace(trace)

    job = job_of_trace(_scheduled(trace, cpu_s=0.01, runqueue_s={0: 0.02, 1: 0.005}, loading_s=0.001))

    assert _total_s(job, 0, COMPUTE) == pytest.approx(_total_s(before, 0, COMPUTE) - 0.019)
    assert _total_s(job, 1, COMPUTE) == pytest.approx(_total_s(before, 1, COMPUTE) - 0.004)
    assert _total_s(job, 0, ("data-loading",)) == pytest.approx(_total_s(before, 0, ("data-loading",)) - 0.001)
    assert job.contention == pytest.approx(
        0.0125 / np.mean([end - begin for begin, end in trace.spans.values()]), rel=0.01
    )


def test_at_least_the_time_on_a_core_is_compute() -> None:
    """A rank also waits for a core after a message, when it does not compute."""
    trace = stragglers.simulate_job(Mesh.parse("data=2"), 3, None)

    job = job_of_trace(_scheduled(trace, cpu_s=0.03, runqueue_s={0: 10.0}))

    assert _total_s(job, 0, COMPUTE) == pytest.approx(np.full(stragglers.NUM_STEPS, 0.03))


def test_ranks_with_a_host_each_are_blamed_for_waiting_for_its_cores() -> None:
    trace = _scheduled(stragglers.simulate_job(Mesh.parse("data=2"), 3, None), cpu_s=0.01, runqueue_s={0: 0.02})
    apart = replace(trace, workers=tuple(replace(worker, host=f"{worker.rank}") for worker in trace.workers))

    job, before = job_of_trace(apart), job_of_trace(stragglers.simulate_job(Mesh.parse("data=2"), 3, None))

    assert _total_s(job, 0, COMPUTE) == pytest.approx(_total_s(before, 0, COMPUTE))
    assert job.contention == 0


@pytest.mark.parametrize(("runqueue_s", "named"), [(0.0, True), (0.02, False)])
def test_a_host_with_too_few_cores_explains_small_differences(runqueue_s: float, named: bool) -> None:
    slow = _slow(stragglers.simulate_job(Mesh.parse("data=4"), 3, None), 2, 1.1)
    trace = _scheduled(slow, cpu_s=0.0, runqueue_s=dict.fromkeys(range(4), runqueue_s))

    culprit = find_culprit(job_of_trace(trace))

    assert (culprit is not None) == named


def test_a_rank_that_only_waits_for_a_core_is_no_culprit() -> None:
    slow = _slow(stragglers.simulate_job(Mesh.parse("data=4"), 3, None), 2, 1.5)
    lost_s = 0.5 * 3 * stragglers.FORWARD_S
    found = find_culprit(job_of_trace(_scheduled(slow, cpu_s=0.0, runqueue_s={2: 0.0})))

    assert found is not None
    assert found.ranks == (2,)
    assert find_culprit(job_of_trace(_scheduled(slow, cpu_s=0.0, runqueue_s={2: lost_s}))) is None
