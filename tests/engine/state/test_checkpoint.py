"""Checkpoints are complete or absent, hold no pickle, and resume exactly under any other plan."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_jobs
from safetensors.torch import load_file

from stagewright.engine.jobs.train import TrainingOptions, find_checkpoint, train, write_options
from stagewright.engine.state import checkpoint as checkpoint_module
from stagewright.engine.state.checkpoint import Checkpoint, checkpoint_name, latest, prune, write_checkpoint
from stagewright.errors import RunError, UsageError
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.zoo.sources.weights import load_state

VIT = {"name": "vit", "optimizer": "sgd"}
FIRST, SECOND = (12, 12, 12), (5, 1)
SMALL = {"barrier": lambda: None, "rank": 0, "optimizer": {}, "scalars": {}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"mesh": "pipeline=2"}, {"mesh": "serial"}),
        ({"mesh": "serial"}, {"mesh": "pipeline=2", "schedule": "zbv"}),  # four stages
        ({"mesh": "data=2", "microbatches": 2, "shard": True}, {"mesh": "pipeline=2"}),
        ({"mesh": "data=2", "microbatches": 2, "zero": 2}, {"mesh": "pipeline=2"}),
        pytest.param(
            {"mesh": "data=2,pipeline=2", "microbatches": 2, "shard": True, "fsdp_gather": "microbatch"},
            {"mesh": "data=2,pipeline=2", "microbatches": 2, "shard": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"mesh": "data=4", "microbatches": 1, "shard": True, "fsdp_shards": 2},
            {"mesh": "data=2,pipeline=2", "microbatches": 2, "shard": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"mesh": "pipeline=2"},
            {"mesh": "data=2,pipeline=2", "microbatches": 2, "shard": True},
            marks=pytest.mark.slow,
        ),
        ({"mesh": "pipeline=2"}, {"mesh": "data=2", "microbatches": 2, "zero": 1}),
        ({"mesh": "pipeline=2", "optimizer": "sgd"}, {"mesh": "data=2", "microbatches": 2, "optimizer": "sgd"}),
        # The gradient of a key's bias is rounding only, which AdamW would amplify.
        ({"mesh": "tensor=2", **VIT}, {"mesh": "pipeline=2", **VIT}),
        ({"mesh": "serial", **VIT}, {"mesh": "tensor=2", **VIT}),
        ({"mesh": "tensor=2:1", **VIT}, {"mesh": "pipeline=2", **VIT}),
        ({"mesh": "tensor=1:2", **VIT}, {"mesh": "serial", **VIT}),
        ({"mesh": "serial", **VIT}, {"mesh": "tensor=1:2", **VIT}),
        ({"mesh": "tensor=2", **VIT}, {"mesh": "tensor=2:1", **VIT}),
    ],
    ids=lambda options: ",".join(str(value) for value in options.values()),
)
def test_resume_under_another_plan(pool_of: Any, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Losses match an uninterrupted single-device run, including optimizer states and dropout masks."""
    common = {name: before[name] for name in ("optimizer", "name") if name in before}
    second = (4, 4) if "data" in before["mesh"] + after["mesh"] else SECOND  # the same micro-batches on both sides
    (expected,) = pool_of(1).run("training_jobs:training", "serial", sizes=FIRST + second, **common)
    path = tmp_path / checkpoint_name(3)

    def run(sizes: tuple[int, ...], mesh: str, **more: Any) -> Any:
        workers = Mesh.parse(mesh).num_workers
        return pool_of(workers).run("training_jobs:training", mesh, sizes=sizes, **more)

    for result in run(FIRST, save=str(path), **before):
        np.testing.assert_allclose(result["losses"], expected["losses"][:3], rtol=1e-5)
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".safetensors", ".json"}
    for result in run(second, load=str(path), **after):
        np.testing.assert_allclose(result["losses"], expected["losses"][3:], rtol=1e-5)
        np.testing.assert_allclose(result["evaluations"], expected["evaluations"][3:], rtol=1e-5)
        assert (result["content"], result["step"]) == ({"note": "kept"}, 5)
        for name, value in expected["state"].items():
            np.testing.assert_allclose(result["state"][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_nothing_is_unpickled(pool_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's checkpoints are read with pickle, these with safetensors only, also by torch's safetensors reader."""
    from torch.distributed import checkpoint as dcp

    path = tmp_path / checkpoint_name(1)
    (result,) = pool_of(1).run(
        "training_jobs:training", "serial", sizes=(12,), save=str(path), export=str(tmp_path / "w")
    )

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickle was read")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    saved = Checkpoint.open(path)
    assert sorted(saved.optimizer_state("scale")) == ["exp_avg", "exp_avg_sq", "step"]
    assert saved.model_names() == set(result["state"]) - {"head.weight"}  # tied: saved once
    state = {name: torch.zeros_like(saved.model_tensor(name)) for name in saved.model_names()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path / "model")), no_dist=True)
    for name, value in state.items():
        np.testing.assert_array_equal(value.numpy(), result["state"][name])
    model = training_jobs.small().module
    load_state(model, tmp_path / "w")
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), result["state"][name])


def test_incomplete_checkpoints_are_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / checkpoint_name(2), model={"w": torch.ones(2)}, content={"step": 2}, **SMALL)
    calls = []

    def dies() -> None:
        calls.append(1)
        if len(calls) == 2:  # every file is written, the index is not
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(
            tmp_path / checkpoint_name(4), model={"w": torch.ones(2)}, content={}, **{**SMALL, "barrier": dies}
        )
    assert latest(tmp_path) == tmp_path / checkpoint_name(2)
    assert not (tmp_path / checkpoint_name(4)).exists()
    write_checkpoint(tmp_path / checkpoint_name(4), model={"w": torch.ones(2)}, content={"step": 4}, **SMALL)
    assert latest(tmp_path) == tmp_path / checkpoint_name(4)
    file = tmp_path / checkpoint_name(4) / "model" / "worker-00000.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(UsageError, match="is incomplete"):
        Checkpoint.open(tmp_path / checkpoint_name(4))
    assert latest(tmp_path) == tmp_path / checkpoint_name(2)
    assert latest(tmp_path / "nowhere") is None


def test_checkpoints_are_replaced_and_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 10, 10):
        write_checkpoint(tmp_path / checkpoint_name(step), model={"w": torch.ones(2)}, content={"step": step}, **SMALL)
    (tmp_path / ".step-00000011.partial").mkdir()
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(2), checkpoint_name(10)]


def test_a_kill_while_pruning_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / checkpoint_name(step), model={"w": torch.ones(2)}, content={"step": step}, **SMALL)

    def killed(path: Path, **options: Any) -> None:
        (path / "index.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [checkpoint_name(2)]
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(2)]


def test_every_flipped_bit_is_noticed_by_the_worker_that_checks_the_file(tmp_path: Path) -> None:
    path = tmp_path / checkpoint_name(1)
    write_checkpoint(
        path, model={"w": torch.ones(4)}, content={"step": 1}, **{**SMALL, "optimizer": {"a/w": torch.ones(2)}}
    )
    Checkpoint.open(path).verify()
    files = sorted(path.glob("*/*.safetensors"))
    assert len(files) == 2
    for share, file in enumerate(files):
        content = file.read_bytes()
        for index in range(0, len(content), 7):
            file.write_bytes(content[:index] + bytes([content[index] ^ 1 << index % 8]) + content[index + 1 :])
            with pytest.raises(
                UsageError, match=r"damaged|is not|can't read"
            ):  # the header is refused when it is opened
                Checkpoint.open(path).verify(share, 2)
        file.write_bytes(content)
    Checkpoint.open(path).verify()


@pytest.mark.parametrize("content", ["{}", '{"format": "stagewright checkpoint 2"}', "[]", '{"content": 3', ""])
def test_a_malformed_index_is_one_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / checkpoint_name(1)
    write_checkpoint(path, model={"w": torch.ones(2)}, content={"step": 1}, **SMALL)
    (path / "index.json").write_text(content)
    with pytest.raises(UsageError, match=r"index\.json|is not a checkpoint"):
        Checkpoint.open(path)
    assert latest(tmp_path) is None


def test_checkpoint_of_another_model_or_optimizer_is_rejected(pool_of: Any, tmp_path: Path) -> None:
    path = str(tmp_path / checkpoint_name(1))
    pool_of(1).run("training_jobs:training", "serial", sizes=(12,), save=path)
    with pytest.raises(AssertionError, match="was made with the optimizer AdamW, not SGD"):
        pool_of(1).run("training_jobs:training", "serial", sizes=(), load=path, optimizer="sgd")
    with pytest.raises(AssertionError, match=r"is not of this model: it lacks norm\.num_batches_tracked"):
        pool_of(1).run("training_jobs:training", "serial", sizes=(), load=path, norm=True)


def test_killed_run_resumes_under_another_plan(pool_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps of digits-vit; a worker is killed in the fifth; a single-device run resumes after the fourth."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))

    def plan(mesh: Mesh, **more: Any) -> Plan:
        return Plan(
            model=ModelSpec(name="digits-vit"),
            batch=32,
            mesh=mesh,
            microbatches=2,
            task="digits",
            steps=6,
            devices=("cpu:0",) * mesh.num_workers,
            optimizer=OptimizerSpec(name="adamw", learning_rate=1e-3),
            checkpoint_every=2,
            **more,
        )

    def run(plan: Plan, root: str, **options: Any) -> tuple[list[float], dict[str, Any]]:
        folder = RunFolder.create(tmp_path / root, plan, environment={})
        write_options(folder, TrainingOptions(**options))
        (result,) = pool_of(1).run("training_jobs:run", plan, str(folder.path))
        return result

    killed: list[float] = []
    serial = plan(Mesh())
    losses, whole = run(serial, "whole")
    halves = plan(Mesh(pipeline=2), cuts=(training_jobs.middle_cut("digits-vit"),))
    with pytest.raises(RunError, match=r"worker 1 .*SIGKILL"):
        train(
            halves,
            tmp_path / "runs",
            progress=lambda line: killed.append(line["loss"]) if line["kind"] == "step" else None,
            job="training_jobs:dies",
        )
    np.testing.assert_allclose(killed, losses[:4], rtol=1e-5)
    checkpoint = find_checkpoint(tmp_path / "runs", serial)
    assert checkpoint is not None
    assert checkpoint.name == checkpoint_name(4)
    assert RunFolder.open(checkpoint.parent.parent).result().status == "failed"  # type: ignore[union-attr]
    later, resumed = run(serial, "runs", checkpoint=str(checkpoint), export=str(tmp_path / "weights"))
    np.testing.assert_allclose(later, losses[4:], rtol=1e-5)
    for name in ("training_loss", "evaluation_loss", "accuracy"):
        assert resumed["epochs"][0][name] == pytest.approx(whole["epochs"][0][name], rel=1e-5)
    other = Plan(**{name: getattr(serial, name) for name in serial.__dataclass_fields__} | {"seed": 1})
    assert find_checkpoint(tmp_path / "runs", other) is None
    loaded = ModelSpec(name="digits-vit", weights=str(tmp_path / "weights")).load(batch=2)
    for name, value in load_file(tmp_path / "weights" / "model.safetensors").items():
        assert torch.equal(loaded.module.state_dict()[name], value)
    assert json.loads((checkpoint / "index.json").read_text())["content"]["caller"]["progress"]["step"] == 4
