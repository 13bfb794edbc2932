from __future__ import annotations

from typing import Any

import pytest

from stagewright.errors import UsageError
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec import Mesh, ModelSpec, OptimizerSpec, Plan, check_plan
from stagewright.spec.plan_rules import POLICIES


def plan(**changes: Any) -> Plan:
    mesh = changes.pop("mesh", "pipeline=2")
    return Plan(**{"model": ModelSpec(name="mlp-mnist"), "batch": 16, "mesh": Mesh.parse(mesh), **changes})


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mesh", ["serial", "pipeline=2", "pipeline=4", "data=2,pipeline=2"])
def test_every_schedule_runs(schedule: str, mesh: str) -> None:
    check_plan(plan(schedule=schedule, mesh=mesh, microbatches=8))


def test_policies_are_those_of_the_registry() -> None:
    from stagewright.partition import policy_names

    assert tuple(policy_names())[: len(POLICIES)] == POLICIES


@pytest.mark.parametrize(
    "good",
    [
        {"microbatches": 1, "schedule": "gpipe"},
        {"microbatches": 1, "schedule": "zbv"},
        {"microbatches": 1, "training": False},
        {"microbatches": 1, "schedule": "dualpipev", "training": False},
        {"microbatches": 4, "schedule": "interleaved", "stages": 6},
        {"microbatches": 4, "split": "client-server"},
        {"microbatches": 4, "placement": "client-server", "mesh": "pipeline=3"},
        {"microbatches": 4, "cuts": ("anything",), "split": "user-defined"},
        {"microbatches": 2, "devices": ("cpu:0", "cpu:1-3,5")},
        {"microbatches": 2, "devices": ("cuda:0", "cuda:1")},
        {"mesh": "data=2", "shard": True},
        {"mesh": "data=2,pipeline=2", "microbatches": 2, "zero": 2},
        {"mesh": "tensor=2,pipeline=2", "microbatches": 2, "vocab_parallel": True},
        {"mesh": "tensor=2,pipeline=2", "microbatches": 2, "sequence_parallel": True},
        {"microbatches": 2, "recompute": (True, False)},
        {"mesh": "serial", "batch": 1},
    ],
)
def test_plans_that_run(good: dict[str, Any]) -> None:
    check_plan(plan(**good))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedule": "1f1"}, "unknown schedule '1f1'; did you mean '1f1b'?"),
        ({"schedule": "interleaved-zero"}, "did you mean 'interleaved-zero-bubble'"),
        ({"split": "optimum"}, "unknown policy 'optimum'; did you mean 'optimal'"),
        ({"placement": "w"}, "unknown placement 'w'"),
        ({"precision": "fp16-mix"}, "unknown precision 'fp16-mix'; did you mean 'fp16-mixed'"),
        ({"compile": "stage"}, "unknown compile mode 'stage'; did you mean 'stages'"),
        ({"batch_norm": "defered"}, "unknown batch norm mode 'defered'; did you mean 'deferred'?"),
        (
            {"recompute": "never"},
            "unknown recompute mode 'never'; known: none, always, except-last, attention (or names of units: "
            "--recompute layers.0,layers.1, in a plan a list)",
        ),
        (
            {"optimizer_in_backward": True, "microbatches": 4},
            "optimizer_in_backward = true does not work with microbatches = 4, because gradients of several",
        ),
        (
            {"optimizer_in_backward": True, "clip": 1.0, "microbatches": 1, "mesh": "serial"},
            "optimizer_in_backward = true does not work with clip = 1.0, because the norm of all gradients",
        ),
        (
            {"optimizer_in_backward": True, "mesh": "data=2", "microbatches": 1},
            "does not work with data=2, because gradients are summed over replicas or tokens first",
        ),
        (
            {"optimizer_in_backward": True, "precision": "fp16-mixed", "microbatches": 1, "mesh": "serial"},
            'does not work with precision = "fp16-mixed", because an overflow of scaled gradients',
        ),
        (
            {"recompute": "attention", "compile": "units"},
            'recompute = "attention" does not work with compile = "units": leave out one of the two',
        ),
        (
            {"recompute": "attention", "mesh": "context=2"},
            'recompute = "attention" does not work with context = 2: leave out one of the two',
        ),
        ({"model": ModelSpec(name="")}, "the model has no name"),
        ({"batch": 0}, "batch = 0, but must be at least 1"),
        ({"steps": 0}, "steps = 0, but must be at least 1"),
        ({"warmup": -1}, "warmup = -1, but must be at least 0"),
        ({"clip": 0.0}, "clip = 0.0, but the maximum gradient norm must be above 0: use clip = 1.0, or leave"),
        ({"clip": -1.0}, "clip = -1.0, but the maximum gradient norm"),
        ({"clip": float("nan")}, "clip = nan, but the maximum gradient norm"),
        ({"clip": float("inf")}, "clip = inf, but the maximum gradient norm"),
        ({"memory_bytes": 0}, "memory = 0, but must be at least 1"),
        ({"seed": -1}, "seed = -1, but must be from 0 to 4294967295"),
        ({"optimizer": OptimizerSpec(name="adan")}, "unknown optimizer 'adan'; did you mean 'adam'"),  # type: ignore[arg-type]
        ({"optimizer": OptimizerSpec(learning_rate=0.0)}, "learning_rate = 0.0, but must be above 0"),
        (
            {"optimizer": OptimizerSpec(name="adam", momentum=0.9)},
            "momentum = 0.9 is for sgd and rmsprop; adam has none",
        ),
        ({"batch": 7, "microbatches": 8}, "a batch of 7 can't be split into 8 micro-batches: use batch = 8 or more"),
        (
            {"mesh": "data=3,pipeline=2", "batch": 11, "microbatches": 4},
            "a batch of 11 can't be split into 4 micro-batches on each of 3 replicas: use batch = 12 or more",
        ),
        ({"devices": ("cpu:0",)}, "1 device for the 2 workers of pipeline=2: give 2 devices, one for each worker"),
        ({"devices": ("cpu:0", "gpu:1")}, "'gpu:1' is not a device; write cpu:0"),
        ({"devices": ("cpu:0", "cuda:1")}, "devices of cpu and cuda in one plan"),
        ({"cuts": ("a", "a")}, "the cut after 'a' is given twice"),
        ({"cuts": ("a", "b"), "stages": 2}, "2 cuts make 3 stages, not 2: give 1 cuts or leave out stages"),
        ({"mesh": "pipeline=4", "stages": 2}, "2 stages can't keep 4 workers busy"),
        ({"recompute": (True,)}, "recompute has 1 flags for 2 stages"),
        ({"microbatches": 1}, "schedule '1f1b' with 2 stages on 2 workers needs at least 2 micro-batches, not 1"),
        (
            {"mesh": "pipeline=4", "schedule": "dualpipev", "microbatches": 7},
            "schedule 'dualpipev' with 8 stages on 4 workers needs at least 8 micro-batches, not 7: "
            'use microbatches = 8, or schedule = "gpipe"',
        ),
        (
            {"schedule": "interleaved", "microbatches": 5},
            "runs micro-batches in rounds of 2, one per worker, and 5 is not a multiple of 2: use microbatches = 6",
        ),
        ({"schedule": "interleaved", "stages": 5}, "5 stages can't be split evenly over 2 workers"),
        (
            {"schedule": "zbv", "stages": 2},
            "schedule 'zbv' places exactly 2 stages on each worker, so 2 workers hold 4 stages, not 2",
        ),
        (
            {"schedule": "1f1b", "stages": 4},
            "schedule '1f1b' places exactly 1 stage on each worker, so 2 workers hold 2 stages, not 4: "
            'leave out stages, or schedule = "interleaved" for more',
        ),
        (
            {"schedule": "zbv", "placement": "in-order"},
            "schedule 'zbv' places its stages v, not in-order: use placement = \"v\" or leave it out",
        ),
        ({"placement": "v"}, "schedule '1f1b' places its stages in-order, not v"),
        ({"placement": "client-server", "mesh": "serial"}, "needs a client and a server"),
        ({"placement": "client-server", "schedule": "zbv"}, 'runs with schedule "gpipe" or "1f1b", not \'zbv\''),
        ({"placement": "client-server", "stages": 4}, "2 workers hold 3 stages, not 4"),
        ({"split": "client-server", "mesh": "pipeline=3"}, "supports one client and one server, not 3 workers"),
        ({"shard": True, "microbatches": 2}, "shard (FSDP) shards parameters over replicas, and there is only one"),
        ({"fsdp_shards": 2, "mesh": "data=4"}, "fsdp_shards = 2 divides the replicas of FSDP into groups (HSDP)"),
        (
            {"fsdp_shards": 4, "shard": True, "mesh": "data=6"},
            "fsdp_shards = 4 does not divide data = 6 into groups of two or more replicas: use 2 or 3 or 6",
        ),
        ({"fsdp_gather": "steps", "shard": True, "mesh": "data=2"}, "unknown fsdp_gather 'steps'"),
        (
            {"fsdp_gather": "step", "mesh": "data=2"},
            "and the plan has no shard (FSDP): leave it out, or use shard = true",
        ),
        (
            {"fsdp_gather": "step", "shard": True, "mesh": "data=2", "training": False, "microbatches": 1},
            'fsdp_gather = "step" keeps parameters gathered during a training step, and inference has none',
        ),
        (
            {"fsdp_gather": "microbatch", "shard": True, "mesh": "data=2,pipeline=2", "schedule": "zbv"},
            "schedule 'zbv' splits the backward, inside which fsdp_gather = \"microbatch\" gathers parameters",
        ),
        ({"zero": 3, "mesh": "data=2", "microbatches": 1}, "use shard = true, which is ZeRO-3 (FSDP)"),
        ({"zero": 4, "mesh": "data=2", "microbatches": 1}, "zero = 4 is not a ZeRO stage"),
        (
            {"zero": 1, "shard": True, "mesh": "data=2", "microbatches": 1},
            "the plan also has zero = 1: use one of them",
        ),
        (
            {"vocab_parallel": True, "microbatches": 2},
            "divides the vocabulary over tensor parallel workers, and pipeline=2 has none",
        ),
        (
            {"sequence_parallel": True, "microbatches": 2},
            "divides sequences over tensor parallel workers, and pipeline=2 has none",
        ),
        ({"zero": 1, "microbatches": 2}, "zero = 1 shards optimizer states over replicas, and there is only one"),
        ({"zero": 1, "mesh": "data=2", "training": False, "microbatches": 1}, "zero = 1 is for training"),
        ({"shard": True, "mesh": "expert=2", "microbatches": 1}, "expert = 2 divides experts over them"),
        (
            {"mesh": "expert=2,pipeline=2", "schedule": "zbv", "microbatches": 4},
            "schedule 'zbv' splits the backward, in which expert = 2 communicates",
        ),
        ({"mesh": "tensor=2,context=2", "microbatches": 1}, "not with tensor = 2: leave out one of the two"),
        ({"epochs": 2, "microbatches": 2}, "epochs = 2 are passes over a task's samples: name a task, or use steps"),
        ({"training": False, "checkpoint_every": 5}, "checkpoint_every is for training"),
        ({"training": False, "clip": 1.0}, "clip = 1.0 is for training: leave it out"),
    ],
)
def test_plans_that_do_not(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_plan(plan(**wrong))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
