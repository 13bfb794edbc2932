"""Clipping by global norm matches torch's on the plain model under every strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stagewright.spec.plan import Mesh

LIMITS = {"small": 4.0, "language": 0.9}


def check(pool_of: Any, name: str, mesh: str, schedule: str, microbatches: int, **more: Any) -> None:
    limit = LIMITS[name]
    (expected,) = pool_of(1).run("clip_jobs:plain", name=name, clip=limit)
    assert min(expected["norms"]) < limit < max(expected["norms"]), expected["norms"]
    arguments = (mesh, schedule, microbatches)
    for result in pool_of(Mesh.parse(mesh).num_workers).run(
        "clip_jobs:clipped", *arguments, name=name, clip=limit, **more
    ):
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-5)
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-5)
        for key, value in expected["state"].items():
            np.testing.assert_allclose(result["state"][key], value, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.parametrize(
    ("name", "mesh", "schedule", "microbatches", "more"),
    [
        ("small", "serial", "1f1b", 1, {}),
        ("small", "data=2", "1f1b", 2, {}),
        ("language", "data=2", "1f1b", 1, {"shard": True}),
        ("small", "data=2", "1f1b", 2, {"shard": True}),
        ("language", "data=2", "1f1b", 1, {"zero": 1}),
        ("small", "data=2", "1f1b", 2, {"zero": 2}),
        ("language", "tensor=2", "1f1b", 2, {}),
        ("language", "pipeline=2", "1f1b", 4, {}),
        ("small", "pipeline=2", "interleaved", 4, {}),
        ("small", "pipeline=2", "zbv", 4, {}),
    ],
)
def test_matches_torch(
    pool_of: Any, name: str, mesh: str, schedule: str, microbatches: int, more: dict[str, Any]
) -> None:
    """Tied weights, tensor-parallel and FSDP shards, replicas: each element of the gradient counts once."""
    check(pool_of, name, mesh, schedule, microbatches, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("tensor=2,pipeline=2", {}),
        ("data=2,pipeline=2", {}),
        ("data=2,pipeline=2", {"zero": 2}),
        ("data=2,tensor=2", {"shard": True}),
    ],
)
def test_matches_torch_on_meshes(pool_of: Any, mesh: str, more: dict[str, Any]) -> None:
    check(pool_of, "language", mesh, "1f1b", 2, **more)
