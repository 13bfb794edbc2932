"""A model that returns its loss trains under every strategy as on one device; parity works without a loss too."""

from __future__ import annotations

from typing import Any

import numpy as np
import own_loss_jobs
import pytest


@pytest.mark.parametrize(
    ("mesh", "microbatches", "alone"), [("pipeline=2", 4, False), ("pipeline=2", 4, True), ("data=2", 1, False)]
)
def test_training_evaluation_and_results(pool_of: Any, mesh: str, microbatches: int, alone: bool) -> None:
    num_pieces = 4 if mesh == "pipeline=2" else 2
    expected = own_loss_jobs.plain(num_pieces, alone=alone)
    results = pool_of(2).run("own_loss_jobs:trained", mesh, microbatches, alone=alone)
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-5)
        assert result["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
    np.testing.assert_allclose([row for result in results for row in result["logits"]], expected["logits"], atol=1e-5)
    assert expected["losses"][2] < expected["losses"][0]


@pytest.mark.parametrize(("shard", "microbatches"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_a_loss_that_is_constant_for_some_samples(pool_of: Any, shard: bool, microbatches: int) -> None:
    """No replica waits for one whose samples give no gradient."""
    expected = own_loss_jobs.by_hand(2 * microbatches)
    assert expected[2] < expected[0]
    for losses in pool_of(2).run("own_loss_jobs:sometimes_constant", shard, microbatches, time_limit_s=60):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_mean_over_tokens_depends_on_micro_batching() -> None:
    """The loss differs from that of the whole batch, which ``compare`` reports."""
    whole, pieces = own_loss_jobs.plain(1), own_loss_jobs.plain(4)
    assert abs(whole["losses"][0] - pieces["losses"][0]) > 1e-3


def test_a_model_without_a_loss_is_rejected(pool_of: Any) -> None:
    (message,) = pool_of(1).run("own_loss_jobs:refused")
    assert message.startswith("no loss was given, and the model returned a tensor; give loss=function")


def test_parity_of_a_model_that_ends_with_a_norm(pool_of: Any) -> None:
    """The mean square of layer norm outputs is constant, so gradients are rounding errors, which differ by plan."""
    results, _ = pool_of(2).run("own_loss_jobs:headless", square=False)
    assert results["source"] == "stand-in"
    assert results["equal"], results
    assert results["gradients"] < 1e-5
    noise, _ = pool_of(2).run("own_loss_jobs:headless", square=True)
    assert noise["outputs"] < 1e-5
    assert noise["gradients"] > 1e-4
