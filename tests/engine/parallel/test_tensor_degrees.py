"""Tensor degrees that differ between the stages of a pipeline: parity with the baseline, with dropout."""

from __future__ import annotations

from typing import Any

import pytest
from parity_jobs import assert_parity

from stagewright.spec.plan import Mesh


def run(pool_of: Any, name: str, mesh: str, job: str = "degrees", **options: Any) -> list[Any]:
    results: list[Any] = pool_of(Mesh.parse(mesh).num_workers).run(f"unequal_jobs:{job}", name, mesh, **options)
    return results


def test_tied_weights_of_unlike_stages(pool_of: Any) -> None:
    """GPT-2's embedding is on two workers, its head on one; in float64, no rounding could hide a gradient too many."""
    results = run(pool_of, "gpt2", "tensor=2:1", float64=True, microbatches=2, clip=0.01)
    for result in results:
        report = result["report"]
        assert report.equal
        assert max(report.loss, report.gradients, report.outputs, report.updates) <= 1e-8, report
    assert [result["bytes"]["tied"] > 0 for result in results] == [True] * 3
    assert results[0]["held"] == results[2]["held"]


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("llama", "tensor=2:1", {"schedule": "gpipe"}),
        ("llama", "tensor=1:2", {"schedule": "1f1b"}),
        ("gpt2", "tensor=1:2", {"schedule": "gpipe"}),
        ("gpt2", "tensor=1:2:1", {"microbatches": 3}),
        ("gpt2", "tensor=2:1", {"schedule": "interleaved-zero-bubble", "microbatches": 4}),
        ("gpt2", "tensor=2:1", {"schedule": "zbv", "microbatches": 4}),
        ("gpt2", "tensor=2:4", {}),
        ("gpt2", "tensor=4:2", {"training": False}),
        ("vit", "tensor=2:1", {"optimizer_in_backward": True}),
        ("vit", "tensor=1:2", {"training": False}),
        ("bert", "tensor=2:1", {"recompute": "always"}),
        ("mlp", "tensor=2:1", {}),
        ("gpt2", "data=2,tensor=2:1", {}),
        ("vit", "data=2,tensor=1:2", {"speeds": (1.0,) * 3 + (0.4,) * 3}),
        ("llama", "tensor=2:1", {"codec": "block8"}),
        ("llama", "tensor=1:2", {"codec": "feedback(block4)"}),
    ],
    ids=lambda value: ",".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_parity_with_baseline(pool_of: Any, name: str, mesh: str, options: dict[str, Any]) -> None:
    assert_parity(run(pool_of, name, mesh, **{"microbatches": 2, **options}))


def test_degrees_that_do_not_divide_the_heads_are_refused_by_all(pool_of: Any) -> None:
    """Also by the worker that divides nothing: it would wait for the others."""
    assert {error.split(" of ")[0] for error in run(pool_of, "vit", "tensor=3:1", "refused", microbatches=2)} == {
        "tensor=3 does not divide the 4 attention heads"
    }
