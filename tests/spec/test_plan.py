from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from stagewright.errors import UsageError
from stagewright.spec import Mesh, ModelSpec, Plan
from stagewright.spec.plan import AXES

MODEL = ModelSpec(name="mlp-mnist")
meshes = st.builds(Mesh, data=st.integers(1, 4), tensor=st.integers(1, 4), pipeline=st.integers(1, 4))


def test_plans_need_no_torch() -> None:
    code = "import sys, stagewright.spec, stagewright.cluster; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pipeline_is_innermost() -> None:
    mesh = Mesh(data=2, tensor=2, pipeline=3)
    assert mesh.num_workers == 12
    assert [mesh.coordinates(rank) for rank in (0, 1, 3, 6, 11)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 2),
    ]
    assert mesh.ranks_along("pipeline", 4) == (3, 4, 5)
    assert mesh.ranks_along("tensor", 4) == (1, 4)
    assert mesh.ranks_along("data", 4) == (4, 10)


@given(meshes)
def test_every_worker_has_one_place(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.num_workers)]
    assert len(set(places)) == mesh.num_workers
    assert [mesh.rank(*place) for place in places] == list(range(mesh.num_workers))
    for axis in AXES:
        groups = {mesh.ranks_along(axis, rank) for rank in range(mesh.num_workers)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_workers))


@given(meshes)
def test_mesh_as_text(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh


def test_mesh_accepts_short_axis_names() -> None:
    assert Mesh.parse("dp=2,tp=3,pp=4") == Mesh(data=2, tensor=3, pipeline=4)
    assert Mesh.parse("data=2, pp=2") == Mesh(data=2, pipeline=2)


def test_strategies_have_names() -> None:
    texts = ["serial", "data=2", "tensor=3", "pipeline=2", "data=2,pipeline=2", "pipeline=2, tensor=2, data=2"]
    assert [Mesh.parse(text).strategy for text in texts] == [
        "serial",
        "data",
        "tensor",
        "pipeline",
        "data×pipeline",
        "data×tensor×pipeline",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipelin=2", "unknown axis of a mesh 'pipelin'; did you mean 'pipeline'?"),
        ("data=two", "data needs a whole number, not 'two'"),
        ("data=2,data=2", "data is given twice"),
        ("data=2,dp=2", "data is given twice"),
        ("data=0", "data = 0, but every axis has at least 1 worker"),
        ("", "unknown axis of a mesh ''"),
    ],
)
def test_wrong_meshes(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Mesh.parse(text)
    assert message in str(caught.value)


def test_workers_off_the_mesh() -> None:
    with pytest.raises(UsageError, match="worker 4 is not on the mesh data=2,pipeline=2, which has workers 0 to 3"):
        Mesh(data=2, pipeline=2).coordinates(4)


@pytest.mark.parametrize(
    ("schedule", "num_workers", "workers"),
    [
        ("gpipe", 3, (0, 1, 2)),
        ("1f1b", 1, (0,)),
        ("interleaved", 2, (0, 1, 0, 1)),
        ("interleaved", 1, (0,)),
        ("looped-bfs", 3, (0, 1, 2, 0, 1, 2)),
        ("zbv", 2, (0, 1, 1, 0)),
        ("zbv", 1, (0, 0)),
        ("dualpipev", 3, (0, 1, 2, 2, 1, 0)),
    ],
)
def test_stages_of_schedules(schedule: str, num_workers: int, workers: tuple[int, ...]) -> None:
    plan = Plan(model=MODEL, batch=8, mesh=Mesh(pipeline=num_workers), schedule=schedule)  # type: ignore[arg-type]
    assert plan.stage_workers == workers
    assert plan.num_stages == len(workers)
    assert sorted(stage for worker in range(num_workers) for stage in plan.stages_of(worker)) == list(
        range(len(workers))
    )


def test_client_and_server() -> None:
    plan = Plan(model=MODEL, batch=8, mesh=Mesh(pipeline=2), split="client-server")
    assert plan.resolved_placement == "client-server"
    assert plan.stage_workers == (0, 1, 0)
    four = dataclasses.replace(plan, mesh=Mesh(pipeline=4))
    assert four.stage_workers == (0, 1, 2, 3, 0)
    assert four.stages_of(0) == (0, 4)


def test_cuts_and_stages_say_how_many() -> None:
    plan = Plan(model=MODEL, batch=8, mesh=Mesh(pipeline=2), schedule="interleaved", cuts=("a", "b", "c", "d", "e"))
    assert plan.num_stages == 6
    assert plan.stage_workers == (0, 1, 0, 1, 0, 1)
    assert dataclasses.replace(plan, cuts=(), stages=8).num_stages == 8


def test_recomputed_stages() -> None:
    plan = Plan(model=MODEL, batch=8, mesh=Mesh(pipeline=2), recompute=(True, False))
    assert [plan.recomputes(stage) for stage in range(2)] == [True, False]
    assert dataclasses.replace(plan, recompute="except-last").recomputes(1)
    assert not dataclasses.replace(plan, recompute="none").recomputes(0)


def test_a_model_is_loaded_as_it_says() -> None:
    model = ModelSpec(name="mlp-mnist", seed=3).load(batch=5)
    again = ModelSpec(name="mlp-mnist", seed=3).load(batch=2)
    assert model.batch_size == 5
    assert all(map(lambda a, b: a.equal(b), model.module.parameters(), again.module.parameters()))


def test_expert_parallelism_divides_the_replicas() -> None:
    mesh = Mesh.parse("dp=4,ep=2,pp=2")
    assert (mesh.data, mesh.expert, mesh.num_workers) == (4, 2, 8)
    assert (str(mesh), mesh.strategy) == ("data=4,expert=2,pipeline=2", "data×expert×pipeline")
    assert Mesh.parse("expert=4") == Mesh(data=4, expert=4)
    assert Mesh.parse("expert=4").strategy == "expert"
    with pytest.raises(UsageError, match="expert = 3 does not divide data = 4"):
        Mesh(data=4, expert=3)


def test_context_parallel_workers_take_the_place_of_tensor_parallel_ones() -> None:
    mesh = Mesh.parse("dp=2,cp=2,pp=2")
    assert (str(mesh), mesh.strategy, mesh.num_workers) == ("data=2,context=2,pipeline=2", "data×context×pipeline", 8)
    assert [mesh.rank(*mesh.coordinates(rank)) for rank in range(8)] == list(range(8))
    assert mesh.ranks_along("tensor", 5) == (5, 7)
