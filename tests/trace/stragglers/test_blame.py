"""Culprits of simulated jobs; benchmarks/stragglers.py counts over hundreds of them."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import stragglers
from stagewright.spec.plan import Mesh
from stagewright.trace.breakdown import breakdown
from stagewright.trace.stragglers.blame import find_culprit
from stagewright.trace.stragglers.from_trace import job_of_trace
from stagewright.trace.stragglers.job import Job, Simulator


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


def _noisy(job: Job, seed: int) -> Job:
    """Return the job with times that vary by half, and one in 30 that takes 5 times as long: too few cores."""
    noise = np.random.default_rng(seed)
    for times in job.durations.values():
        times *= noise.lognormal(0.0, 0.4, times.shape) * np.where(noise.random(times.shape) < 0.03, 5.0, 1.0)
    return job


@pytest.mark.parametrize("mesh", ["data=2", "data=4", "data=2,pipeline=2", "pipeline=2"])
def test_noise_that_all_ranks_have_is_no_culprit(mesh: str) -> None:
    jobs = [job_of_trace(stragglers.simulate_job(Mesh.parse(mesh), seed, None)) for seed in range(6)]

    assert [find_culprit(_noisy(job, seed)) for seed, job in enumerate(jobs)] == [None] * 6


def test_a_slow_rank_is_found_in_noise() -> None:
    found = []
    for seed in range(8):
        fault = stragglers.Fault(cause="worker", ranks=(seed % 4,), factor=2.0)
        culprit = find_culprit(_noisy(job_of_trace(stragglers.simulate_job(Mesh.parse("data=4"), seed, fault)), seed))
        found.append(culprit is not None and (culprit.cause, culprit.ranks) == ("worker", (seed % 4,)))

    assert sum(found) >= 7


def test_garbage_collection_on_one_stage_is_named() -> None:
    fault = stragglers.Fault(cause="garbage collector", ranks=(1,), factor=6.0)
    culprit = find_culprit(job_of_trace(stragglers.simulate_job(Mesh.parse("pipeline=2"), 4, fault)))

    assert culprit is not None
    assert (culprit.cause, culprit.ranks) == ("garbage collector", (1,))


def test_one_collection_in_many_steps_is_no_culprit() -> None:
    fault = stragglers.Fault(cause="garbage collector", ranks=(1,), factor=3.0)
    job = job_of_trace(stragglers.simulate_job(Mesh.parse("data=2"), 4, fault))
    for op, times in job.durations.items():
        if op.kind == "garbage-collection":
            times[1, np.argmax(times[1]) + 1 :] = 0.0
            times[1, : np.argmax(times[1])] = 0.0

    assert find_culprit(job) is None


def test_a_starved_rank_is_blamed_and_not_its_link() -> None:
    """A process that gets little time also handles its messages late."""
    job = job_of_trace(stragglers.simulate_job(Mesh.parse("data=2,pipeline=2"), 6, None))
    for op, times in job.durations.items():
        if op.kind.startswith("receive ") or (op.stage == 1 and op.kind in ("forward", "backward")):
            times[1] = times[1] * 1.6 + 0.02 * op.kind.startswith("receive ")

    culprit = find_culprit(job)

    assert culprit is not None
    assert (culprit.cause, culprit.ranks) == ("worker", (3,))


@pytest.mark.parametrize(("factor", "named"), [(1.2, False), (2.0, True)])
def test_stages_of_one_pipeline_may_differ(factor: float, named: bool) -> None:
    fault = stragglers.Fault(cause="worker", ranks=(1,), factor=factor)
    culprit = find_culprit(job_of_trace(stragglers.simulate_job(Mesh.parse("pipeline=2"), 2, fault)))

    assert (culprit is not None) == named
