from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from stagewright import zoo
from stagewright.errors import UsageError
from stagewright.fabric.traffic.from_model import buckets, from_model, num_trials
from stagewright.fabric.traffic.from_plan import from_plan
from stagewright.fabric.traffic.workload import Message, Workload, from_sizes, parse_nccl_size, sweep_sizes
from stagewright.profiler.profile import Amount, Profile, Time, UnitProfile
from stagewright.spec import Mesh, ModelSpec, Plan


def test_the_study_is_reproduced() -> None:
    workload = from_model(zoo.load("mlp-mnist"), 4, trials=num_trials(60000, 64, 2))
    assert [message.num_bytes for message in workload.messages] == [2600, 33024, 131584, 803840]
    assert [message.name for message in workload.messages] == ["fc4", "fc3", "fc2", "fc1"]
    assert workload.trials == 938 * 2
    assert {message.groups for message in workload.messages} == {((0, 1, 2, 3),)}


def test_a_tied_weight_is_sent_once() -> None:
    model = zoo.load("tiny-gpt2") if "tiny-gpt2" in zoo.names() else zoo.load("digits-vit")
    workload = from_model(model, 2, trials=1)
    parameters = {id(one): one for one in model.module.parameters() if one.requires_grad}
    assert sum(message.num_bytes for message in workload.messages) == sum(
        one.numel() * 4 for one in parameters.values()
    )


@given(sizes=st.lists(st.integers(1, 1000), max_size=30), bucket=st.integers(1, 3000))
def test_buckets_lose_nothing(sizes: list[int], bucket: int) -> None:
    found = buckets([(str(at), size) for at, size in enumerate(sizes)], bucket)
    assert sum(size for _, size in found) == sum(sizes)
    assert all(size >= bucket for _, size in found[:-1])


def test_sweep_is_that_of_nccl_tests() -> None:
    sizes = sweep_sizes(parse_nccl_size("8"), parse_nccl_size("64M"), 2)
    assert sizes == [8 * 2**power for power in range(24)]
    assert sizes[-1] == 64 * 2**20
    with pytest.raises(UsageError, match="empty"):
        sweep_sizes(16, 8, 2)
    with pytest.raises(UsageError, match="never ends"):
        sweep_sizes(8, 16, 1)


def test_a_workload_survives_its_data() -> None:
    workload = from_sizes([8, 2600], 4, trials=3).with_delays({2: 0.02})
    assert Workload.from_dict(workload.to_dict()) == workload
    assert workload.delays == (0.0, 0.0, 0.02, 0.0)
    with pytest.raises(UsageError, match="not a workload"):
        Workload.from_dict({**workload.to_dict(), "command": "rm"})


def test_wrong_workloads_are_rejected() -> None:
    with pytest.raises(UsageError, match="0 bytes"):
        from_sizes([0], 4)
    with pytest.raises(UsageError, match="0 trials"):
        from_sizes([8], 4, trials=0)
    with pytest.raises(UsageError, match="rank 4 cannot be delayed"):
        from_sizes([8], 4).with_delays({4: 1.0})
    twice = Message(name="x", algorithm="ring", num_bytes=8, groups=((0, 1), (1, 2)))
    with pytest.raises(UsageError, match="may occur once"):
        Workload(name="x", num_ranks=4, messages=(twice,), trials=1)


def _profile(num_units: int) -> Profile:
    time = Time(median_s=0.001, spread_s=0.0)
    units = tuple(
        UnitProfile(
            name=f"block{index}",
            kind="Block",
            block=f"block{index}",
            parameters=Amount(total=1000),
            parameter_bytes=Amount(total=4000),
            buffer_bytes=0,
            macs=1,
            forward=time,
            backward_input=time,
            backward_weight=time,
            output_bytes=512,
            saved_bytes=Amount(total=0),
            recompute_saved_bytes=0,
            crossing_bytes=512 if index < num_units - 1 else 0,
        )
        for index in range(num_units)
    )
    return Profile(
        model="m",
        device="cpu",
        dtype="float32",
        batch_size=4,
        training=True,
        units=units,
        whole_forward=time,
        whole_backward=time,
        whole_macs=1,
        versions={},
    )


def test_traffic_of_a_plan() -> None:
    plan = Plan(model=ModelSpec(name="m"), batch=16, microbatches=4, mesh=Mesh(data=2, pipeline=2), cuts=("block1",))
    workload = from_plan(plan, _profile(4), name="plan.toml", trials=5)
    found = {message.name: message for message in workload.messages}
    assert found["stage 0 → 1"].groups == ((0, 1), (2, 3))
    assert found["stage 1 → 0"].groups == ((1, 0), (3, 2))
    assert found["stage 0 → 1"].num_bytes == 512
    assert found["stage 0 → 1"].count == 4
    assert found["stage 0 → 1"].gap_s == pytest.approx(0.002)
    gradients = [message for message in workload.messages if message.name.startswith("gradients")]
    assert [(message.num_bytes, message.groups) for message in gradients] == [(8000, ((0, 2),)), (8000, ((1, 3),))]


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [("reduce-scatter", 16000, 1, ((0, 1, 2, 3),)), ("all-gather", 16000, 4, ((0, 1, 2, 3),))]),
        (
            {"fsdp_gather": "step"},
            [("reduce-scatter", 16000, 1, ((0, 1, 2, 3),)), ("all-gather", 16000, 1, ((0, 1, 2, 3),))],
        ),
        (
            {"fsdp_shards": 2},
            [
                ("reduce-scatter", 16000, 1, ((0, 1), (2, 3))),
                ("all-gather", 16000, 4, ((0, 1), (2, 3))),
                ("ring", 8000, 1, ((0, 2), (1, 3))),
            ],
        ),
    ],
    ids=["FSDP", "per step", "HSDP"],
)
def test_traffic_of_fsdp(options: dict[str, Any], expected: list[tuple[object, ...]]) -> None:
    """Two all-gathers per micro-batch, or one per step; HSDP shards in groups and all-reduces across them."""
    plan = Plan(model=ModelSpec(name="m"), batch=16, microbatches=2, mesh=Mesh(data=4), shard=True, **options)
    messages = from_plan(plan, _profile(4), name="plan.toml", trials=5).messages
    assert [(one.algorithm, one.num_bytes, one.count, one.groups) for one in messages] == expected


def test_traffic_of_tensor_parallelism() -> None:
    plan = Plan(model=ModelSpec(name="m"), batch=8, mesh=Mesh(tensor=2))
    (message,) = from_plan(plan, _profile(4), name="plan.toml", trials=5).messages
    # Two sums a block and direction.
    assert (message.count, message.num_bytes, message.groups) == (16, 512, ((0, 1),))


def test_traffic_of_sequence_parallelism() -> None:
    plan = Plan(model=ModelSpec(name="m"), batch=8, mesh=Mesh(tensor=2), sequence_parallel=True)
    messages = from_plan(plan, _profile(4), name="plan.toml", trials=5).messages
    found = [(message.algorithm, message.count, message.num_bytes) for message in messages]
    assert found == [("all-gather", 16, 512), ("reduce-scatter", 16, 512)]


def test_plans_without_traffic_or_cuts() -> None:
    with pytest.raises(UsageError, match="one worker"):
        from_plan(Plan(model=ModelSpec(name="m"), batch=8), _profile(2), name="p", trials=1)
    plan = Plan(model=ModelSpec(name="m"), batch=8, mesh=Mesh(pipeline=2), microbatches=2)
    with pytest.raises(UsageError, match="no cuts"):
        from_plan(plan, _profile(2), name="p", trials=1)
