"""One real run for all tests of traces, and `runs`, where those made by hand are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages, recomputed, with a codec on the link: every kind of event but those of other axes."""
    from stagewright.cluster.device import usable_cores
    from stagewright.engine.jobs.compare import run_plan
    from stagewright.spec.plan import Mesh, ModelSpec, Plan

    cores = sorted(usable_cores())
    plan = Plan(
        model=ModelSpec(name="digits-vit"),
        batch=12,
        microbatches=3,
        mesh=Mesh(pipeline=2),
        devices=tuple(f"cpu:{cores[rank % len(cores)]}" for rank in range(2)),
        recompute="always",
        codec="block8",
        steps=2,
        warmup=0,
    )
    return Path(run_plan(plan, tmp_path_factory.mktemp("trace")).run)
