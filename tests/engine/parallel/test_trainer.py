"""Training equals the single-device baseline under every strategy; so does evaluation during training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stagewright.engine.parallel.parallelize import parallelize
from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh, ModelSpec, Plan

SCHEDULES = ["gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"]


def assert_same(results: dict[str, Any], expected: dict[str, Any], *, tolerance: float = 1e-5) -> None:
    """Compare losses, evaluations and the final state."""
    np.testing.assert_allclose(results["losses"], expected["losses"], rtol=tolerance)
    np.testing.assert_allclose(results["evaluations"], expected["evaluations"], rtol=tolerance)
    assert list(results["state"]) == list(expected["state"])
    for name, value in expected["state"].items():
        np.testing.assert_allclose(results["state"][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_training_equals_the_baseline(pool_of: Any, schedule: str) -> None:
    """Five AdamW steps with dropout and partial batches, and an evaluation after each."""
    (expected,) = pool_of(1).run("training_jobs:training", "serial")
    results = pool_of(2).run("training_jobs:training", "pipeline=2", schedule)
    for result in results:
        assert_same(result, expected)
        assert result["training"]
    assert sum(result["results"] for result in results) == 7 * 5
    assert expected["losses"][0] > expected["losses"][2]


def test_evaluation_equals_the_plain_model_in_eval_mode(pool_of: Any) -> None:
    """Batch norm's running statistics and no dropout, before any step and on two workers."""
    (expected,) = pool_of(1).run("training_jobs:plain", norm=True)
    for result in pool_of(2).run("training_jobs:training", "pipeline=2", "zbv", norm=True, sizes=()):
        assert result["before"] == pytest.approx(expected["loss"], rel=1e-5)


def test_batch_norm_in_a_pipeline(pool_of: Any) -> None:
    sizes = (12, 12, 8)
    (expected,) = pool_of(1).run("training_jobs:training", "serial", norm=True, sizes=sizes)
    for result in pool_of(2).run("training_jobs:training", "pipeline=2", norm=True, sizes=sizes):
        assert_same(result, expected)


@pytest.mark.parametrize("sharding", [{}, {"shard": True}, {"zero": 1}, {"zero": 2}], ids=str)
def test_data_parallel_training_equals_the_baseline(pool_of: Any, sharding: dict[str, Any]) -> None:
    """Two replicas of two micro-batches match four on one device; in the last step one replica has no sample."""
    (expected,) = pool_of(1).run("training_jobs:training", "serial", sizes=(12, 12, 12, 4, 1))
    results = pool_of(2).run(
        "training_jobs:training", "data=2", "1f1b", 2, sizes=(12, 12, 12, 4, 1), optimizer="adamw", **sharding
    )
    for result in results:
        assert_same(result, expected)
    assert [result["results"] for result in results] == [4 * 5, 3 * 5]


@pytest.mark.parametrize(
    ("mesh", "shard", "tensors"),
    [
        ("pipeline=2", False, 1),
        ("tensor=2", False, 2),  # the parts, and on a CPU, which is its own host, what is made of them
        ("data=2", True, 1),
    ],
)
def test_the_full_state_is_gathered_tensor_by_tensor(pool_of: Any, mesh: str, shard: bool, tensors: int) -> None:
    results = pool_of(2).run("training_jobs:gathering", mesh, shard=shard)
    for result in results:
        limit = (tensors + 1.5) * result["largest"]  # Gloo's thread may still hold the one before, as large as this
        assert 0 < result["most"] < limit < result["total"] / 4
        assert 0 < result["most_written"] < limit, "a checkpoint, or an exported file"
        assert (result["names"], result["places"], result["shared"]) == (True, ["cpu"], False)
        assert result["num_tensors"][0] == result["num_names"]
    assert sum(result["num_tensors"][1] for result in results) == results[0]["num_names"], "each has one owner"


@pytest.mark.long
def test_data_and_pipeline_parallel_training_equals_the_baseline(pool_of: Any) -> None:
    """Four workers; in the last step one pipeline has no sample."""
    sizes = (12, 12, 12, 4, 1)
    (expected,) = pool_of(1).run("training_jobs:training", "serial", sizes=sizes)
    for result in pool_of(4).run("training_jobs:training", "data=2,pipeline=2", "1f1b", 2, sizes=sizes):
        assert_same(result, expected)
    (expected,) = pool_of(1).run("training_jobs:training", "serial", name="vit", optimizer="sgd")
    more = {"name": "vit", "optimizer": "sgd", "recompute": "always"}
    for result in pool_of(4).run("training_jobs:training", "tensor=2,pipeline=2", "1f1b", 4, **more):
        assert_same(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "gather", "microbatches", "name"),
    [
        ("1f1b", "step", 2, "small"),
        ("1f1b", "microbatch", 2, "small"),
        ("zbv", "step", 4, "language"),  # no dropout: micro-batches of both sides differ
    ],
)
def test_fsdp_in_a_pipeline_equals_the_baseline(
    pool_of: Any, schedule: str, gather: str, microbatches: int, name: str
) -> None:
    """Four workers with two replicas, and an evaluation after each step; in the last, one pipeline has no sample."""
    more = {"sizes": (12, 12, 12, 4, 1), "name": name, "optimizer": "adamw" if name == "small" else "sgd"}
    (expected,) = pool_of(1).run("training_jobs:training", "serial", "1f1b", 4, **more)
    more |= {"shard": True, "fsdp_gather": gather}
    for result in pool_of(4).run("training_jobs:training", "data=2,pipeline=2", schedule, microbatches, **more):
        assert_same(result, expected)


@pytest.mark.slow
def test_hsdp_equals_the_baseline(pool_of: Any) -> None:
    """Two groups of two replicas, with one micro-batch each; in the last step, three replicas have no sample."""
    sizes = (12, 12, 1)
    (expected,) = pool_of(1).run("training_jobs:training", "serial", "1f1b", 4, sizes=sizes)
    more = {"sizes": sizes, "shard": True, "fsdp_shards": 2}
    for result in pool_of(4).run("training_jobs:training", "data=4", "1f1b", 1, **more):
        assert_same(result, expected)


def test_parallelize_in_a_user_script(tmp_path: Path) -> None:
    """``parallelize`` under torchrun, with automatic cuts, gives the losses of the plain loop."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    both = subprocess.run(torchrun, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert both.returncode == 0, both.stderr
    lines = [json.loads((tmp_path / f"losses-{rank}.json").read_text()) for rank in range(2)]
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 3))
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    expected.append(nn.functional.cross_entropy(model(x[:5]), y[:5]).item())
    assert lines == [pytest.approx(expected, rel=1e-5)] * 2


def test_too_few_workers_are_rejected() -> None:
    plan = Plan(model=ModelSpec(name="mine"), batch=8, mesh=Mesh(pipeline=2), microbatches=4)
    with pytest.raises(UsageError, match=r"the plan needs 2 workers \(pipeline=2\), but 1 were started"):
        parallelize(nn.Linear(2, 2), (torch.ones(2, 2), torch.ones(2)), plan=plan, loss=nn.functional.mse_loss)


SCRIPT = """
import json
import os

import torch
from torch import nn
from stagewright.engine.parallel.parallelize import parallelize
from stagewright.spec.plan import Mesh, ModelSpec, Plan

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 3))
x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
plan = Plan(
    model=ModelSpec(name="mine"), batch=8, mesh=Mesh(pipeline=2), microbatches=4, split="parameters", units="leaf",
    devices=("cpu:0", "cpu:0"),
)
trainer = parallelize(
    model, (x, y), plan=plan, loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
)
losses = [trainer.step((x, y)).loss for _ in range(3)]
losses.append(trainer.evaluate((x[:5], y[:5])).loss)
with open(f"losses-{os.environ['RANK']}.json", "w") as file:  # lines of two workers may mix on one screen
    json.dump(losses, file)
"""


@pytest.mark.parametrize(
    ("mesh", "schedule", "options"),
    [
        ("serial", "1f1b", {}),
        ("pipeline=2", "1f1b", {"norm": True}),
        ("pipeline=2", "zbv", {}),
        ("pipeline=2", "interleaved", {"codec": "bf16"}),
        ("data=2,pipeline=2", "1f1b", {}),
    ],
)
def test_predictions_of_a_stream(pool_of: Any, mesh: str, schedule: str, options: dict[str, Any]) -> None:
    """The plain model's outputs in order, for all sizes; little read ahead, train and eval modes unchanged."""
    workers = Mesh.parse(mesh).num_workers
    results = pool_of(workers).run("training_jobs:predicting", mesh, schedule, count=9, **options)
    (expected,) = pool_of(1).run("training_jobs:plain_results", (12, 12, 5, 1) * 2 + (12,), norm="norm" in options)
    last = [result for result in results if result["has_outputs"]]
    for index, whole in enumerate(expected):
        rows = np.concatenate([chunk for result in last for chunk in result["results"][index]])
        np.testing.assert_allclose(rows, whole, rtol=1e-4, atol=5e-2 if "codec" in options else 1e-5)
    for result in results:
        assert result["has_outputs"] or not any(result["results"])
        assert result["ahead"] <= 4, "batches read before their turn"
        assert result["turns"] == {(True, True)}


def test_a_stream_that_ends(pool_of: Any) -> None:
    sizes = (12, 1, 12, 7)
    first, last = pool_of(2).run("training_jobs:finite", "pipeline=2", sizes)
    assert (first, last) == ([0] * 4, list(sizes))
    assert pool_of(2).run("training_jobs:finite", "pipeline=2", ()) == [[], []]
    assert [
        sum(result) for result in zip(*pool_of(2).run("training_jobs:finite", "data=2", sizes), strict=True)
    ] == list(sizes)


def test_a_stream_left_before_its_end_breaks_a_pipeline(pool_of: Any) -> None:
    """Transfers in flight would be mistaken for those of the next step."""
    for said in pool_of(2).run("training_jobs:left_early", "pipeline=2"):
        assert "a stream was left before its end" in said
    assert pool_of(1).run("training_jobs:left_early", "serial") == [""]


def test_a_stream_of_invalid_batches_is_rejected(pool_of: Any) -> None:
    with pytest.raises(AssertionError, match=r"a batch is a stagewright.zoo.Batch, or a tuple of the model's"):
        pool_of(1).run("training_jobs:refused")
