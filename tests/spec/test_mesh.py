"""A mesh numbers its workers and says who communicates with whom, also where tensor degrees differ between stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.errors import UsageError
from stagewright.spec.mesh import Mesh
from stagewright.spec.plan import ModelSpec, Plan
from stagewright.spec.plan_file import read_plan, write_plan
from stagewright.spec.plan_rules import check_plan
from stagewright.spec.unequal_devices import pipeline_speeds, replica_sizes

MESHES = ["tensor=2:1", "tensor=1:2:1", "data=2,tensor=3:2", "data=3,tensor=1:4:2", "data=2,tensor=2,pipeline=3"]


def test_the_drawn_mesh() -> None:
    mesh = Mesh.parse("tensor=2:1")
    assert (mesh, str(mesh)) == (Mesh(pipeline=2, tensor_degrees=(2, 1)), "tensor=2:1,pipeline=2")
    assert (mesh.num_workers, mesh.tensor, mesh.strategy) == (3, 2, "tensor×pipeline")
    assert [mesh.coordinates(rank) for rank in range(3)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    assert [mesh.receivers(rank, 1) for rank in (0, 2)] == [(1,), ()]
    assert mesh.receivers(1, 0) == (0, 2)
    assert [mesh.ranks_along("tensor", rank) for rank in range(3)] == [(0, 2), (1,), (0, 2)]
    assert (mesh.num_copies(0, 1), mesh.num_copies(1, 0)) == (1, 2)


@pytest.mark.parametrize("text", MESHES)
def test_each_worker_gets_one_copy(text: str) -> None:
    mesh = Mesh.parse(text)
    ranks = range(mesh.num_workers)
    assert [mesh.rank(*mesh.coordinates(rank)) for rank in ranks] == list(ranks)
    for sender, receiver in [(0, 1), (1, 0)]:
        at = {index: [rank for rank in ranks if mesh.coordinates(rank)[2] == index] for index in (sender, receiver)}
        sent = [(rank, peer) for rank in at[sender] for peer in mesh.receivers(rank, receiver)]
        assert sorted(peer for _, peer in sent) == at[receiver]
        assert all(mesh.sender(peer, sender) == rank for rank, peer in sent)
        assert max(len(mesh.receivers(rank, receiver)) for rank in at[sender]) == mesh.num_copies(sender, receiver)
        groups = mesh.linked_ranks()
        assert all(any({rank, peer} <= set(group) for group in groups) for rank, peer in sent)
    for rank in ranks:
        _, tensor, pipeline = mesh.coordinates(rank)
        peers = mesh.ranks_along("data", rank)
        assert [mesh.coordinates(peer) for peer in peers] == [(index, tensor, pipeline) for index in range(mesh.data)]
        assert {mesh.coordinates(peer)[2] for peer in mesh.ranks_along("tensor", rank)} == {pipeline}


def test_equal_degrees_are_a_plain_mesh() -> None:
    assert Mesh.parse("data=2,tensor=2:2") == Mesh(data=2, tensor=2, pipeline=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor=2:1,pipeline=3", "2 degrees for pipeline = 3"),
        ("tensor=2:0", "every stage has at least 1 worker"),
        ("tensor=2:", "a whole number"),
        ("data=2:1", "a whole number"),
        ("pipeline=2:1", "a whole number"),
    ],
)
def test_wrong_degrees(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Mesh.parse(text)


def test_a_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('batch = 8\nmicrobatches = 2\n[model]\nname = "digits-vit"\n[mesh]\ntp = [1, 2]\n')
    plan = read_plan(path)
    assert plan.mesh == Mesh(pipeline=2, tensor_degrees=(1, 2))
    write_plan(plan, path)
    assert "tensor = [1, 2]\npipeline = 2\n" in path.read_text()
    assert read_plan(path) == plan
    for wrong in ("[]", "[2]\npipeline = 2", "[1, 0]", "[1, true]"):
        path.write_text(f'batch = 8\nmicrobatches = 2\n[model]\nname = "digits-vit"\n[mesh]\ntensor = {wrong}\n')
        with pytest.raises(UsageError):
            read_plan(path)


@pytest.mark.parametrize(
    "other",
    [
        {"shard": True},
        {"zero": 1},
        {"vocab_parallel": True},
        {"sequence_parallel": True},
        {"mesh": Mesh.parse("data=2,expert=2,tensor=2:1")},
    ],
    ids=str,
)
def test_what_it_does_not_work_with(other: dict[str, object]) -> None:
    fields = {"mesh": Mesh.parse("data=2,tensor=2:1"), "microbatches": 2, **other}
    plan = Plan(model=ModelSpec(name="digits-vit"), batch=8, **fields)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="tensor degree for each stage, which does not work with"):
        check_plan(plan)


def test_cuts_and_shares_follow_the_degrees() -> None:
    plan = Plan.of("digits-vit", 8, "data=2,tensor=3:1", microbatches=2)
    assert pipeline_speeds(plan) == (1.0, pytest.approx(1 / 3))
    assert replica_sizes(plan, 8) == (4, 4)
    slower = Plan.of("digits-vit", 12, "data=2,tensor=3:1", speeds=(1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5))
    assert replica_sizes(slower, 12) == (8, 4)
