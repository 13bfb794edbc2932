"""Balanced stages with free links take exactly what the closed forms of each schedule say, and hold what they say.

F forward, B the whole backward = I + W its two halves; p workers, m micro-batches, v stages a worker; F, I, W of one
stage.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from made_profiles import equal_units, make_costs
from stagewright.profiler.profile import Amount
from stagewright.simulator.action_graph import BACKWARD, BACKWARD_WEIGHT, FORWARD
from stagewright.simulator.memory import worker_memory
from stagewright.simulator.simulate import step_seconds
from stagewright.simulator.step_times import StepTimes, pipeline_times
from stagewright.spec.plan import Mesh, OptimizerSpec

durations = st.floats(0.01, 10.0)
few = settings(deadline=None, max_examples=60)


@few
@given(p=st.integers(1, 8), m=st.integers(1, 20), forward=durations, backward=durations)
def test_gpipe(p: int, m: int, forward: float, backward: float) -> None:
    profile = equal_units(p, forward, (backward / 2, backward / 2))
    costs = make_costs(profile, mesh=Mesh(pipeline=p), microbatches=m, schedule="gpipe")
    assert step_seconds(costs) == pytest.approx((m + p - 1) * (forward + backward))


@few
@given(p=st.integers(1, 8), more=st.integers(0, 12), forward=durations, backward=durations)
def test_one_forward_one_backward(p: int, more: int, forward: float, backward: float) -> None:
    m = p + more
    costs = make_costs(equal_units(p, forward, (backward, 0.0)), mesh=Mesh(pipeline=p), microbatches=m)
    assert step_seconds(costs) == pytest.approx((m + p - 1) * (forward + backward))


@few
@given(p=st.integers(2, 5), v=st.integers(2, 3), rounds=st.integers(1, 4), forward=durations)
def test_interleaved_divides_the_bubble(p: int, v: int, rounds: int, forward: float) -> None:
    """A stage is one v-th of a worker's part: m·v forwards and backwards, fill and drain of p − 1 small ones."""
    m, backward = p * rounds, 2 * forward
    profile = equal_units(p * v, forward, (backward / 2, backward / 2))
    costs = make_costs(profile, mesh=Mesh(pipeline=p), microbatches=m, schedule="interleaved", stages=p * v)
    assert step_seconds(costs) == pytest.approx((m * v + p - 1) * (forward + backward))


@few
@given(p=st.integers(1, 5), v=st.integers(2, 4), more=st.integers(0, 8), forward=durations, backward=durations)
def test_looped_breadth_first(p: int, v: int, more: int, forward: float, backward: float) -> None:
    """As interleaved, of any number of micro-batches from p on."""
    m = p + more
    profile = equal_units(p * v, forward, (backward, 0.0))
    costs = make_costs(profile, mesh=Mesh(pipeline=p), microbatches=m, schedule="looped-bfs", stages=p * v)
    assert step_seconds(costs) == pytest.approx((m * v + p - 1) * (forward + backward))


def zero_bubble_s(schedule: str, p: int, v: int, m: int, each: float) -> float:
    """A step where F = I = W in every stage. The first stage's inputs need no gradient, so that its I is nothing and
    its W both halves: the sum is the same."""
    profile = equal_units(p * v, each, (each, each))
    return step_seconds(make_costs(profile, mesh=Mesh(pipeline=p), microbatches=m, schedule=schedule, stages=p * v))


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@few
@given(p=st.integers(1, 6), more=st.integers(0, 6), each=durations)
def test_zero_bubble_v_waits_for_the_fill_alone(schedule: str, p: int, more: int, each: float) -> None:
    """Every worker is busy with its 2m·3 actions but for the p − 1 forwards until the first reaches the last worker."""
    m = 2 * p + more
    assert zero_bubble_s(schedule, p, 2, m, each) == pytest.approx((6 * m + p - 1) * each)


@few
@given(p=st.integers(1, 5), v=st.integers(2, 4), rounds=st.integers(1, 3), each=durations)
def test_interleaved_zero_bubble_waits_for_the_fill_alone(p: int, v: int, rounds: int, each: float) -> None:
    m = p * rounds
    found = zero_bubble_s("interleaved-zero-bubble", p, v, m, each)
    assert found == pytest.approx((3 * m * v + p - 1) * each)


@few
@given(p=st.integers(1, 8), m=st.integers(1, 12), steps=st.integers(1, 4), forward=durations)
def test_inference_fills_once(p: int, m: int, steps: int, forward: float) -> None:
    costs = make_costs(
        equal_units(p, forward), mesh=Mesh(pipeline=p), microbatches=m, schedule="gpipe", training=False, steps=steps
    )
    assert step_seconds(costs) == pytest.approx((m * steps + p - 1) * forward / steps)


@few
@given(p=st.integers(1, 8), more=st.integers(0, 12))
def test_what_is_held(p: int, more: int) -> None:
    m = p + more
    profile = equal_units(p)
    one_forward = pipeline_times(make_costs(profile, mesh=Mesh(pipeline=p), microbatches=m))
    gpipe = pipeline_times(make_costs(profile, mesh=Mesh(pipeline=p), microbatches=m, schedule="gpipe"))
    for stage in range(p):
        assert held_microbatches(one_forward, stage) == min(m, p - stage)
        assert held_microbatches(gpipe, stage) == m


def held_microbatches(times: StepTimes, stage: int) -> int:
    """The most micro-batches of a stage between their forward and the end of their backward."""
    of_stage = times.stage == stage
    started = times.end_s[of_stage & (times.kind == FORWARD)]
    done = times.end_s[of_stage & ((times.kind == BACKWARD) | (times.kind == BACKWARD_WEIGHT))]
    changes = np.concatenate([np.ones(len(started)), -np.ones(len(done))])
    order = np.lexsort((changes, np.concatenate([started, done])))
    return int(np.cumsum(changes[order]).max(initial=0))


def test_memory_of_a_worker_by_hand() -> None:
    """Stage 0 of 1F1B on 3 workers holds 3 of 4 micro-batches; parameters, Adam's two states, gradients, receives."""
    profile = equal_units(3, parameter_bytes=Amount(total=100), saved_bytes=Amount(total=1000), crossing_bytes=10)
    costs = make_costs(profile, mesh=Mesh(pipeline=3), microbatches=4, optimizer=OptimizerSpec(name="adam"))
    memory = worker_memory(costs, pipeline_times(costs), 0)
    assert (memory.parameters_bytes, memory.gradients_bytes, memory.optimizer_bytes) == (100, 100, 200)
    # Of each, the 10 bytes of inputs are a part of the batch, which is there as a whole.
    assert memory.activations_bytes == 3 * 990 + 4 * 10
    assert memory.messages_bytes == 2 * 10  # two posted receives of gradients
    # Gradients appear while the first backward frees its thousand, so that the peak is with all activations there.
    assert memory.peak_bytes == 100 + 200 + 20 + 3 * 990 + 4 * 10 + 100
    again = make_costs(
        profile, mesh=Mesh(pipeline=3), microbatches=4, optimizer=OptimizerSpec(name="adam"), recompute="always"
    )
    assert worker_memory(again, pipeline_times(again), 1).activations_bytes == 2 * 10 + 990
    assert worker_memory(again, pipeline_times(again), 0).activations_bytes == 4 * 10 + 990


def test_recomputation_adds_its_forward_and_its_collectives() -> None:
    profile = equal_units(2)
    plain = make_costs(profile, mesh=Mesh(pipeline=2), microbatches=4)
    again = make_costs(profile, mesh=Mesh(pipeline=2), microbatches=4, recompute="always")
    except_last = make_costs(profile, mesh=Mesh(pipeline=2), microbatches=4, recompute="except-last")
    assert step_seconds(plain) == 5 * 3
    assert step_seconds(again) == 5 * 4
    assert step_seconds(plain) < step_seconds(except_last) < step_seconds(again)
