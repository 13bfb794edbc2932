"""Memory over time of pipelines too large to be listed action by action."""

from __future__ import annotations

from dataclasses import replace

import pytest

from made_profiles import equal_units, make_costs, profile_of, unit
from stagewright.profiler.profile import Amount
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


def test_a_gpu_holds_the_batch_also_if_a_copy_of_it_is_saved() -> None:
    """With autocast the first unit saves its inputs in another dtype, smaller than the batch itself."""
    peaks = {}
    for inputs, saved in ((10, 1000), (2000, 1000)):
        first = unit("first", 1.0, (1.0, 1.0), recompute_saved_bytes=inputs, saved_bytes=Amount(total=saved))
        others = equal_units(2).units
        for working in (0, 1):  # only a GPU's profile has temporary memory
            units = [replace(part, forward_working_bytes=working) for part in (first, *others)]
            found = predict(make_costs(profile_of(units), mesh=Mesh(), microbatches=4))
            peaks[inputs, working] = found.workers[0].memory.peak_bytes
    temporary = peaks[10, 1] - peaks[10, 0]
    assert peaks[2000, 1] - peaks[2000, 0] == temporary + 4 * 2000
