"""Two workers' operators side by side, with the sentence that says what makes the difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runs import pipeline_run
from stagewright.errors import UsageError
from stagewright.spec import ModelSpec, Plan
from stagewright.spec.plan import Mesh
from stagewright.trace.operators import Operator, WorkerOperators, compare_workers, read_operators

FORWARD = ["aten::linear", "aten::gelu", "aten::linear"]
BACKWARD = ["aten::mm", "aten::gelu_backward", "aten::mm", "c10d::allreduce_"]


def worker(rank: int, forward: list[str], backward: list[str], microbatches: int = 2) -> WorkerOperators:
    found = [
        Operator(
            name=name, start_s=0.0, end_s=0.0, depth=0, is_operator=True, action=action, stage=0, microbatch=number
        )
        for action, names in (("forward", forward), ("backward", backward))
        for number in range(microbatches)
        for name in names
    ]
    inner = Operator(
        name="aten::addmm", start_s=0, end_s=0, depth=1, is_operator=True, action="forward", stage=0, microbatch=0
    )
    return WorkerOperators(rank=rank, operators=(*found, inner))


def plan(mesh: str, **about: object) -> Plan:
    return Plan(model=ModelSpec(name="mlp-mnist"), batch=8, mesh=Mesh.parse(mesh), **about)  # type: ignore[arg-type]


def test_replicas() -> None:
    pair = [worker(0, FORWARD, BACKWARD), worker(1, FORWARD, BACKWARD)]
    found = compare_workers(pair, 0, 1, plan("data=2"))
    assert found.is_same
    assert [(part.num_first, part.num_second, part.num_same) for part in found.parts] == [(6, 6, 3), (8, 8, 4)]
    assert found.sentence == (
        "workers 0 and 1 executed the same 14 operators in the same order, including 2 collectives: they are "
        "data-parallel replicas of the same stages, whose gradients are all-reduced"
    )


def test_replicas_but_for_collectives() -> None:
    pair = [worker(0, FORWARD, BACKWARD), worker(1, FORWARD, BACKWARD[:3])]
    found = compare_workers(pair, 0, 1, plan("data=2"))
    assert not found.is_same
    assert "the same operators except 1 collective: they are data-parallel replicas" in found.sentence


def test_replicas_that_differ() -> None:
    pair = [worker(0, FORWARD, BACKWARD), worker(1, [*FORWARD, "aten::sin"], BACKWARD)]
    found = compare_workers(pair, 0, 1, plan("data=2"))
    assert found.parts[0].lines == ("  aten::linear", "  aten::gelu", "  aten::linear", "+ aten::sin")
    assert "yet they differ in 1 operator of one micro-batch: aten::sin × 1" in found.sentence


def test_stages_of_a_pipeline() -> None:
    head = ["aten::linear", "aten::log_softmax"]
    pair = [worker(0, ["aten::embedding", *FORWARD], BACKWARD), worker(1, [*FORWARD[1:], *head], BACKWARD)]
    found = compare_workers(pair, 0, 1, plan("pipeline=2", microbatches=2, cuts=("fc1",)))
    assert found.parts[0].lines == (
        "- aten::embedding",
        "- aten::linear",
        "  aten::gelu",
        "  aten::linear",
        "+ aten::linear",
        "+ aten::log_softmax",
    )
    assert found.sentence == (
        "workers 0 and 1 executed different operators because they hold different stages: worker 0 has stage 0 (from "
        "the inputs up to fc1) and worker 1 has stage 1 (after fc1 to the loss); only the first has aten::embedding, "
        "only the second has aten::log_softmax"
    )


def test_more_microbatches_of_the_same() -> None:
    pair = [worker(0, FORWARD, BACKWARD, 2), worker(1, FORWARD, BACKWARD, 3)]
    found = compare_workers(pair, 0, 1, plan("data=2"))
    assert "the same operators a different number of times (forward 6 and 9, backward 8 and 12)" in found.sentence


def test_workers_that_are_not_there() -> None:
    pair = [worker(0, FORWARD, BACKWARD), worker(1, FORWARD, BACKWARD)]
    with pytest.raises(UsageError, match="there is no worker 5; the run has workers 0 to 1"):
        compare_workers(pair, 0, 5, plan("data=2"))
    with pytest.raises(UsageError, match="worker 1 can't be compared with itself"):
        compare_workers(pair, 1, 1, plan("data=2"))


def test_operators_that_were_not_recorded(tmp_path: Path) -> None:
    folder = pipeline_run(tmp_path)
    with pytest.raises(UsageError, match=r"has no operators of worker 0; record them with stagewright trace"):
        read_operators(folder)
    (folder.worker(0).path / "operators.jsonl").write_text(json.dumps({"name": "x"}) + "\n")
    with pytest.raises(UsageError, match=r"can't read .*operators.jsonl"):
        read_operators(folder)


def test_long_sequences_are_compared_quickly() -> None:
    long = ["aten::linear", "aten::gelu"] * 10_000
    pair = [worker(0, long, BACKWARD, 1), worker(1, ["aten::embedding", *long], BACKWARD, 1)]
    found = compare_workers(pair, 0, 1, plan("pipeline=2"))
    assert found.parts[0].num_first == 20_000
    assert len(found.parts[0].lines) <= 4_000
