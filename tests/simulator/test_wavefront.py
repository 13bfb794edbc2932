"""The wavefront gives what the list of nodes gives."""

from __future__ import annotations

import time

import numpy as np
import pytest

from made_profiles import equal_units, make_costs
from stagewright.cluster.cluster import Link, Links
from stagewright.simulator.action_graph import FORWARD, training_graph
from stagewright.simulator.simulate import predict, step_seconds
from stagewright.simulator.step_times import pipeline_times
from stagewright.simulator.wavefront import simulate_wavefront
from stagewright.spec.plan import Mesh


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 2), (3, 5), (5, 9), (8, 31)])
def test_equal_to_the_order(schedule: str, p: int, m: int) -> None:
    generator = np.random.default_rng(p * m)
    candidates = 7
    forward, backward = generator.random((2, p, candidates))
    ahead, back = generator.random((2, max(p - 1, 0), candidates))
    last = generator.random((p, candidates))
    order = training_graph(schedule, tuple(range(p)), m)
    duration = np.zeros((order.num_nodes, candidates))
    for node in range(order.num_nodes):
        stage, is_forward = order.stage[node], order.kind[node] == FORWARD
        if order.is_p2p[node]:
            duration[node] = ahead[stage] if is_forward else back[stage - 1]
        elif is_forward:
            duration[node] = forward[stage]
        else:
            duration[node] = last[stage] if order.microbatch[node] == m - 1 else backward[stage]
    _, end = order.times(duration)
    found = simulate_wavefront(schedule, m, forward, backward, ahead, back, backward_last_s=last, history=True)
    np.testing.assert_allclose(found.step_s, end.max(axis=0), rtol=1e-12)
    assert found.forward_end_s is not None
    for node in np.flatnonzero(~order.is_p2p & (order.kind == FORWARD)):
        np.testing.assert_allclose(found.forward_end_s[order.stage[node], order.microbatch[node]], end[node])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_messages_of_a_large_pipeline_are_those_of_the_order(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(intra_host=Link(bandwidth_bytes_per_s=20.0, latency_s=0.1))
    costs = make_costs(equal_units(5), mesh=Mesh(pipeline=5), microbatches=9, schedule=schedule, links=links)
    listed = predict(costs)
    monkeypatch.setattr("stagewright.simulator.step_times._MAX_NODES", 0)
    found = predict(costs)
    assert found.step_s == pytest.approx(listed.step_s)
    assert step_seconds(costs) == pytest.approx(listed.step_s)
    for ours, theirs in zip(found.workers, listed.workers, strict=True):
        assert (ours.send_s, ours.receive_s) == pytest.approx((theirs.send_s, theirs.receive_s))
        assert ours.send_s > 0
    assert len(found.segments) == len(listed.segments) == 5 * 9 * 2 + 4 * 9 * 2 * 2
    for ours, theirs in zip(found.segments, listed.segments, strict=True):
        assert (ours.worker, ours.stream, ours.name, ours.stage, ours.microbatch) == (
            (theirs.worker, theirs.stream, theirs.name, theirs.stage, theirs.microbatch)
        )
        assert (ours.start_s, ours.end_s) == pytest.approx((theirs.start_s, theirs.end_s))


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 3), ("zbv", 6)])
def test_rows_of_each_worker(schedule: str, stages: int) -> None:
    costs = make_costs(equal_units(6), mesh=Mesh(pipeline=3), microbatches=6, schedule=schedule, stages=stages)
    times = pipeline_times(costs)
    for worker in range(3):
        assert times.actions_of(worker).tolist() == np.flatnonzero(times.worker == worker).tolist()
        assert times.sent_by(worker).tolist() == np.flatnonzero(times.sender == worker).tolist()
        assert times.received_by(worker).tolist() == np.flatnonzero(times.receiver == worker).tolist()
    alone = pipeline_times(make_costs(equal_units(1), mesh=Mesh(), microbatches=2))
    assert len(alone.actions_of(0)) == 4
    assert len(alone.sent_by(0)) == 0


def test_a_long_pipeline_is_a_matter_of_seconds() -> None:
    """The benchmark has the figure; this only sees that nothing is quadratic."""
    begin = time.process_time()
    found = simulate_wavefront("1f1b", 512, np.ones(256), np.ones(256), np.zeros(255), np.zeros(255))
    assert found.step_s == 2 * (512 + 255)
    assert time.process_time() - begin < 20
