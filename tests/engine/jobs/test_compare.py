"""Plans through the launcher, end to end: every strategy passes the parity check, or is rejected with a reason."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagewright.api.compare import strategy_plans
from stagewright.cluster.device import usable_cores
from stagewright.engine.jobs import compare as module
from stagewright.engine.jobs.compare import compare, median_rows, run_plan
from stagewright.errors import RunError, RunTerminated, UsageError
from stagewright.machine import machine
from stagewright.runs.index import RunIndex
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder
from stagewright.simulator.bubble_bound import bubble_bound
from stagewright.spec.plan import Mesh, ModelSpec, Plan

CORES = sorted(usable_cores())
PLAN = Plan(model=ModelSpec(name="digits-vit"), batch=12, steps=2, warmup=0)


def on(mesh: str, **options: Any) -> Plan:
    """Make a plan for a mesh on this machine's cores, shared if there are too few."""
    shape = Mesh.parse(mesh)
    devices = tuple(f"cpu:{CORES[worker % len(CORES)]}" for worker in range(shape.num_workers))
    return replace(PLAN, mesh=shape, devices=devices, **options)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2", {}),
        ("data=2", {"shard": True}),
        ("data=2", {"zero": 2, "batch": 13, "microbatches": 3}),
        ("data=2", {"microbatches": 2, "recompute": "always"}),  # block by block
        pytest.param("tensor=2", {"recompute": "except-last", "microbatches": 2}, marks=pytest.mark.long),
        ("tensor=2", {}),
        ("pipeline=2", {"microbatches": 4, "recompute": "always"}),
        pytest.param("data=2,pipeline=2", {"batch": 13, "microbatches": 3}, marks=pytest.mark.slow),
        pytest.param("data=2,pipeline=2", {"zero": 1, "microbatches": 4}, marks=pytest.mark.slow),
        pytest.param("data=2,pipeline=2", {"zero": 2, "microbatches": 4, "schedule": "zbv"}, marks=pytest.mark.long),
        pytest.param("data=2,pipeline=2", {"shard": True, "microbatches": 3, "batch": 13}, marks=pytest.mark.slow),
        pytest.param(
            "data=2,pipeline=2", {"shard": True, "microbatches": 3, "training": False}, marks=pytest.mark.slow
        ),
        pytest.param("data=2,tensor=2", {"zero": 2, "microbatches": 2, "clip": 0.5}, marks=pytest.mark.long),
        pytest.param("tensor=2,pipeline=2", {"microbatches": 3}, marks=pytest.mark.slow),
        pytest.param("data=2,tensor=2,pipeline=2", {"microbatches": 2, "steps": 1}, marks=pytest.mark.slow),
        pytest.param("pipeline=2", {"microbatches": 3, "training": False}, marks=pytest.mark.slow),
    ],
)
def test_parity_with_baseline(mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    plan = on(mesh, **options)
    row = run_plan(plan, tmp_path)
    assert row.equal, row.parity
    assert row.samples_per_s > 0
    assert len(row.peak_memory_bytes) == plan.mesh.num_workers
    assert min(row.peak_memory_bytes) > 0
    folder = RunFolder(Path(str(row.run)))
    assert folder.result() is not None
    assert folder.plan().cuts == tuple(row.cuts)  # the folder holds the resolved plan
    assert len(list(folder.metrics(0))) >= plan.steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pipeline=2", {"microbatches": 3, "cuts": ("mobilenet_v2.layer.7",)}),
        ("data=2", {}),
        pytest.param(
            "data=2", {"batch": 13, "microbatches": 2, "shard": True, "recompute": "always"}, marks=pytest.mark.long
        ),
        pytest.param(
            "data=2,pipeline=2",
            {"batch": 13, "microbatches": 2, "cuts": ("mobilenet_v2.layer.7",)},
            marks=pytest.mark.long,
        ),
    ],
)
def test_batch_norm_in_deferred_mode(mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = ModelSpec(name="mobilenet-v2", image_size=32, num_classes=4)
    row = run_plan(on(mesh, model=model, batch_norm="deferred", **options), tmp_path)
    assert row.equal, row.parity


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("in_place", "serial", {}),
        ("in_place", "pipeline=2", {"microbatches": 3}),
        ("in_place", "pipeline=2", {"microbatches": 3, "training": False}),
        ("centred", "data=2", {}),
        ("noisy_loss", "serial", {"microbatches": 2}),
        ("noisy_loss_and_dropout", "pipeline=2", {"microbatches": 3}),
        ("twice", "serial", {"microbatches": 2, "batch_norm": "deferred"}),
        ("twice", "data=2", {"batch_norm": "deferred"}),
        ("unused", "data=2", {"clip": 0.01}),
        ("counting", "pipeline=2", {"microbatches": 2, "training": False}),
        ("scaling", "data=2", {"shard": True, "units": "0.norm,0.router,0.last"}),
        ("read_between", "data=2", {"shard": True, "units": "leaf"}),
        ("branching", "serial", {"microbatches": 2}),
        ("branching", "data=2", {"microbatches": 2}),
        ("branching", "data=2", {"microbatches": 2, "shard": True, "recompute": "always"}),
        ("detection", "serial", {"microbatches": 2}),
        ("detection", "data=2", {"microbatches": 2}),
        ("detection", "data=2", {"shard": True}),
        ("objects", "pipeline=2", {"microbatches": 3, "recompute": "always", "codec": "block8"}),
    ],
)
def test_unusual_models(name: str, mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    row = run_plan(on(mesh, model=ModelSpec(name=f"tests.engine.support.odd_models:{name}"), **options), tmp_path)
    assert row.equal, row.parity


@pytest.mark.long
def test_tensor_parallel_bfloat16_is_within_rounding(tmp_path: Path) -> None:
    """Query gradients result from cancellation: floating-point reordering changes them by more than 2e-2."""
    row = run_plan(on("tensor=2", precision="bf16", steps=1), tmp_path)
    assert row.equal, row.parity
    assert 2e-2 < row.parity.tolerance < 0.15


def test_speedup_requires_parity(tmp_path: Path) -> None:
    mlp = replace(
        PLAN, model=ModelSpec(name="mlp-mnist"), devices=tuple(f"cpu:{CORES[index % len(CORES)]}" for index in range(3))
    )
    serial, tensor = compare(strategy_plans(mlp, ["serial", "tensor"], 3, 4), tmp_path)
    assert serial.speedup == 1
    assert RunFolder(Path(str(serial.run))).result().speedup == 1  # type: ignore[union-attr]
    with RunIndex(tmp_path) as index:
        assert sorted(str(row.speedup) for row in index.rows()) == ["1.0", "None"]
    assert serial.parity is not None
    assert serial.parity.gradients == 0
    assert tensor.refused
    assert "tensor=3 does not divide the 256 inner features" in str(tensor.error)
    assert tensor.speedup is None


def test_memory_limit_is_enforced(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"worker 0.*out of memory") as error:
        run_plan(on("serial", memory_bytes=1 << 20), tmp_path)
    assert "micro-batch 0, forward, shapes a batch of" in str(error.value)
    (folder,) = [RunFolder(path) for path in tmp_path.iterdir() if path.is_dir()]
    result = folder.result()
    assert result is not None
    assert result.status == "failed"
    assert "out of memory" in str(result.error)


def test_strategies_and_bounds() -> None:
    base = replace(PLAN, devices=("cpu:0", "cpu:0", "cpu:0", "cpu:0"))
    plans = strategy_plans(base, ["serial", "data", "pipeline", "data=2,pipeline=2"], 4, 8)
    assert [plan.mesh.strategy for plan in plans] == ["serial", "data", "pipeline", "data×pipeline"]
    assert [plan.microbatches for plan in plans] == [1, 1, 8, 8]
    assert [bubble_bound(plan) for plan in plans] == [1, 4, 4 * 8 / 11, 4 * 8 / 9]
    sharded = strategy_plans(replace(base, shard=True), ["serial", "data", "pipeline", "data=2,pipeline=2"], 4, 8)
    assert [plan.shard for plan in sharded] == [False, True, False, True]
    with pytest.raises(UsageError, match="needs 8 workers, but there are 4 devices"):
        strategy_plans(base, ["data=8"], 4, 8)


@pytest.mark.parametrize(
    ("cores", "strategy", "fix"),
    [
        ((0, 1, 2), "data=3", "use --devices 3$"),
        ((0, 1), "data=3", "use --devices cpu:0,cpu:1,cpu:0, where workers share a device"),
        ((0, 1), "data=64", "use a mesh of at most 2$"),
    ],
)
def test_suggested_devices_exist(
    monkeypatch: pytest.MonkeyPatch, cores: tuple[int, ...], strategy: str, fix: str
) -> None:
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    monkeypatch.setattr(machine, "spread_cores", lambda: cores)
    with pytest.raises(UsageError, match=fix):
        strategy_plans(replace(PLAN, devices=("cpu:0", "cpu:1")), [strategy], 2, 8)


def test_each_round_is_compared_with_its_own_baseline() -> None:
    """A slow phase of the machine does not change the speed-up."""

    def round_of(serial: float, data: float, equal: bool = True) -> list[RunResult]:
        return [
            RunResult(samples_per_s=serial, equal=True, bound=1.0),
            RunResult(samples_per_s=data, equal=equal, bound=2.0),
        ]

    rows = median_rows([round_of(10, 15), round_of(5, 8), round_of(10, 17)], 0)
    assert [row.samples_per_s for row in rows] == [10, 15]
    assert rows[1].speedup == 1.6
    assert rows[1].share_of_bound == 0.8
    assert rows[1].speedups == (1.5, 1.6, 1.7)
    assert median_rows([round_of(10, 15), round_of(10, 15, equal=False)], 0)[1].speedup is None
    failed = RunResult(status="failed", error="worker 1 was killed")
    assert median_rows([round_of(10, 15), [round_of(10, 15)[0], failed]], 0)[1] == failed
    assert median_rows([round_of(10, 15)], 0)[1].speedups is None


@pytest.mark.parametrize("between_runs", [False, True])
def test_sigterm_begins_no_further_plan(between_runs: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a run, where the launcher raises the error, and while a plan is resolved."""
    ran: list[Plan] = []

    def terminated(plan: Plan, root: str | Path, **options: Any) -> RunResult:
        ran.append(plan)
        if between_runs:
            signal.raise_signal(signal.SIGTERM)
        raise RunTerminated("the run was ended by SIGTERM")

    monkeypatch.setattr(module, "run_plan", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunTerminated, match="SIGTERM") as caught:
        compare([on("data=2"), on("tensor=2")], tmp_path)
    assert caught.value.exit_code == 130
    assert len(ran) == 1
    assert signal.getsignal(signal.SIGTERM) is before
