"""Devices of different speeds: replicas with unequal shares equal the baseline, and workers measure their speeds."""

from __future__ import annotations

from typing import Any

import pytest
from parity_jobs import assert_parity


@pytest.mark.parametrize(
    "options",
    [{}, {"shard": True, "microbatches": 2}, {"zero": 2, "microbatches": 2}, {"training": False, "microbatches": 2}],
    ids=["ddp", "fsdp", "zero2", "inference"],
)
def test_replicas_with_unequal_shares(pool_of: Any, options: dict[str, Any]) -> None:
    """With dropout: its masks belong to samples, whichever replica has them."""
    results = pool_of(2).run("unequal_jobs:parity", "vit", "data=2", speeds=(1.0, 0.34), **options)
    assert_parity(results)
    assert [sum(result["samples"]) for result in results] == [6, 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_replicas_of_a_pipeline(pool_of: Any, name: str) -> None:
    speeds = (1.0, 1.0, 0.5, 0.25)
    results = pool_of(4).run("unequal_jobs:parity", name, "data=2,pipeline=2", speeds=speeds, microbatches=2)
    assert_parity(results)
    assert [sum(result["samples"]) for result in results] == [6, 6, 2, 2]


def test_workers_measure_their_speeds(pool_of: Any) -> None:
    """A worker three times as slow gets a smaller stage, and all workers agree on it."""
    first, second = pool_of(2).run("unequal_jobs:measured", "pipeline=2", slower=3.0)
    assert first == second
    assert first["speeds"] == (1.0, pytest.approx(0.333))
    place = first["calls"].index(first["cuts"][0])
    alike, _ = pool_of(2).run("unequal_jobs:measured", "pipeline=2", slower=1.01)
    assert alike["speeds"] == ()
    assert place > alike["calls"].index(alike["cuts"][0])
