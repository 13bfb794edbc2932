"""Culprits of simulated jobs; benchmarks/stragglers.py counts over hundreds of them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import stragglers
from stagewright.spec.plan import Mesh
from stagewright.trace.breakdown import breakdown
from stagewright.trace.stragglers.blame import find_culprit
from stagewright.trace.stragglers.from_trace import job_of_trace
from stagewright.trace.stragglers.job import Simulator


@pytest.mark.parametrize("cause", stragglers.CAUSES)
def test_an_injected_fault_is_named_with_rank_and_cause(cause: str) -> None:
    trial = stragglers.run_trial(1, cause)

    assert trial.cost >= stragglers.MIN_COST
    assert trial.found is not None
    assert (trial.found.cause, set(trial.found.ranks)) == (cause, set(trial.fault.ranks))
    assert trial.found.share == pytest.approx(trial.cost, rel=0.3)


def test_clean_jobs_have_no_culprit() -> None:
    assert [stragglers.run_trial(10_000 + seed, None).found for seed in range(5)] == [None] * 5


def test_the_operations_of_a_trace_simulate_to_its_step() -> None:
    trace = stragglers.simulate_job(Mesh.parse("data=2,pipeline=2"), 3, None)
    job = job_of_trace(trace)

    simulated = Simulator.of(job).step_times(job.durations)

    recorded = [end - begin for begin, end in trace.spans.values()]
    assert simulated == pytest.approx(recorded, rel=0.02)
    share = breakdown(trace, 0)[0]
    assert sum(share.parts().values()) == pytest.approx(share.step_s)


def test_rare_stalls_of_compute_are_pauses() -> None:
    trace = stragglers.simulate_job(Mesh.parse("data=4"), 5, None)
    job = job_of_trace(trace)
    for op, times in job.durations.items():
        if op.kind == "forward":
            times[2, 7] += 1.0

    culprit = find_culprit(job)

    assert culprit is not None
    assert (culprit.cause, culprit.ranks) == ("pauses", (2,))
