"""Memory over time of pipelines too large to be listed action by action."""

from __future__ import annotations

import pytest

from made_profiles import equal_units, make_costs
from stagewright.simulator.simulate import predict
from stagewright.spec.plan import Mesh

KEPT, CROSSING, PARAMETERS = 1000, 10, 100  # of a made unit


@pytest.mark.parametrize("recompute", ["none", "always"])
def test_a_large_pipeline_holds_what_1f1b_says(recompute: str) -> None:
    """Stage i has min(m, p − i) micro-batches; those that run again have their inputs, and one of them all."""
    p, m = 128, 256
    found = predict(make_costs(equal_units(p), mesh=Mesh(pipeline=p), microbatches=m, recompute=recompute))
    for at, worker in enumerate(found.workers[1:], start=1):  # the first one's inputs are parts of the batch
        held = min(m, p - at)
        each, beside = (KEPT, 0) if recompute == "none" else (CROSSING, KEPT - CROSSING)
        assert worker.memory.activations_bytes == held * each + beside
        assert worker.memory.peak_bytes == max(worker.memory.held_bytes)
        assert worker.memory.held_bytes[-1] - worker.memory.held_bytes[0] == PARAMETERS, "gradients stay"
        assert list(worker.memory.times_s) == sorted(worker.memory.times_s)
