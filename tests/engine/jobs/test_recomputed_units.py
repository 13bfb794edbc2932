"""Plans that recompute units by name: every strategy and schedule passes the parity check with less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.engine.jobs.test_compare import on
from tests.engine.support.odd_models import UNUSUAL_PLANS

from stagewright.engine.jobs.compare import run_plan
from stagewright.engine.parallel.model import capture_for
from stagewright.errors import UsageError
from stagewright.spec.plan import ModelSpec

UNITS = ("vit.layers.0", "vit.layers.2")
CUTS = ("vit.layers.0", "vit.layers.1", "vit.layers.2")


def num_recomputed(folder: str, worker: int) -> int:
    """Count the recomputed units of a worker's first step."""
    events = pq.read_table(Path(folder) / "workers" / str(worker) / "events.parquet").to_pylist()
    return sum(event["kind"] == "recompute" and event["step"] == 0 for event in events)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("serial", {"microbatches": 2}),
        ("data=2", {"microbatches": 2}),
        ("data=2", {"shard": True, "microbatches": 2}),
        ("tensor=2", {"microbatches": 2}),
        ("pipeline=2", {"microbatches": 4}),
        pytest.param("serial", {"precision": "bf16-mixed"}, marks=pytest.mark.slow),
        pytest.param("data=2", {"zero": 2, "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("data=2", {"shard": True, "fsdp_gather": "step", "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("tensor=2", {"sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param("pipeline=2", {"microbatches": 4, "schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param("data=2,pipeline=2", {"shard": True, "microbatches": 3}, marks=pytest.mark.slow),
        pytest.param(
            "data=2,pipeline=2", {"shard": True, "fsdp_gather": "microbatch", "microbatches": 3}, marks=pytest.mark.slow
        ),
        pytest.param("tensor=2,pipeline=2", {"microbatches": 3}, marks=pytest.mark.slow),
        *(
            pytest.param("pipeline=2", {"schedule": schedule, "microbatches": 4, "cuts": CUTS}, marks=pytest.mark.slow)
            for schedule in ("interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
        ),
    ],
    ids=str,
)
def test_parity_with_baseline(mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    plan = on(mesh, recompute=UNITS, **options)
    row = run_plan(plan, tmp_path)
    assert row.equal, row.parity
    counts = [num_recomputed(str(row.run), worker) for worker in range(plan.mesh.pipeline)]
    assert sum(counts) == len(UNITS) * plan.microbatches, "each once per micro-batch, with a split backward too"


@pytest.mark.parametrize(("name", "mesh", "options"), UNUSUAL_PLANS)
def test_unusual_models(name: str, mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = ModelSpec(name=f"tests.engine.support.odd_models:{name}")
    units = tuple(call.name for call in capture_for(on(mesh, model=model, **options), model.load()).calls)
    row = run_plan(on(mesh, model=model, recompute=units, **options), tmp_path)
    assert row.equal, row.parity


def test_less_memory(tmp_path: Path) -> None:
    rows = [run_plan(on("serial", recompute=recompute), tmp_path) for recompute in ("none", UNITS, "always")]
    none, units, always = (row.memory[0].activations for row in rows)
    assert always < units < none


def test_unknown_unit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown recomputed unit 'vit.layers.9'; did you mean 'vit.layers"):
        run_plan(on("serial", recompute=("vit.layers.9",)), tmp_path)
