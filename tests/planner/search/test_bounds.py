"""Lower bounds of the step time and of memory: never above the forecast, and exact where nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from tests.planner.conftest import cluster_of, random_units

from made_profiles import make_costs, profile_of
from stagewright.cluster.cluster import Link, Links
from stagewright.planner.search.bounds import lower_bound_s, max_codec_saving_s, memory_overflow
from stagewright.schedules.rules import FIXED_SCHEDULES, SCHEDULES
from stagewright.simulator import gradient_allreduce as predict_gradient_allreduce
from stagewright.simulator.costs.link_codec import LinkCodec
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.costs.tensor_traffic import TensorTraffic
from stagewright.simulator.gradient_allreduce import BUCKET_BYTES
from stagewright.simulator.simulate import predict, step_seconds
from stagewright.spec.plan import Mesh, OptimizerSpec

PACED = EngineOverheads(collective_share=0.5, collective_pace=0.6, contention=0.1, step_s=0.1, chunk_s=0.01)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    p=st.sampled_from([1, 2, 3, 4]),
    data=st.sampled_from([1, 2]),
    tensor=st.sampled_from([1, 2]),
    rounds=st.integers(2, 4),
    schedule=st.sampled_from(sorted(FIXED_SCHEDULES)),
    recompute=st.sampled_from(["none", "always", "except-last"]),
    optimizer_s=st.sampled_from([0.0, 1e-3, 0.1]),
    training=st.booleans(),
    odd=st.booleans(),
    overheads=st.sampled_from(
        [EngineOverheads(), EngineOverheads(action_s=0.02, message_s=0.03, message_s_per_byte=1e-3), PACED]
    ),
    bucket_bytes=st.sampled_from([512, BUCKET_BYTES]),
)
def test_no_bound_is_above_the_forecast(
    seed: int,
    p: int,
    data: int,
    tensor: int,
    rounds: int,
    schedule: str,
    recompute: str,
    optimizer_s: float,
    training: bool,
    odd: bool,
    overheads: EngineOverheads,
    bucket_bytes: int,
) -> None:
    splits = SCHEDULES[schedule].splits_backward
    costs = make_costs(
        profile_of(random_units(8, seed)),
        mesh=Mesh(data=data, tensor=tensor, pipeline=p),
        microbatches=rounds * p,
        schedule=schedule if p > 1 else "1f1b",
        recompute="none" if splits else recompute,
        training=training,
        steps=3,
        terms={
            "tensor": [TensorTraffic(forward_bytes=(3,), backward_bytes=(5,))] * 8,
            "model_overheads": ModelOverheads(
                optimizer_s_per_byte=optimizer_s,
                accumulate_s_per_byte=optimizer_s / 2,
                loss_forward_s=0.2,
                loss_backward_s=0.1,
                split_input=1.2,
                split_weight=0.9,
                statistics_bytes=16,
            ),
            "engine_overheads": overheads,
        },
        links=Links(intra_host=Link(bandwidth_bytes_per_s=100.0, latency_s=0.01)),
    )
    if odd:  # the last micro-batch is half as large
        costs = replace(costs, shares=(*costs.shares[:-1], 0.5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict_gradient_allreduce, "BUCKET_BYTES", bucket_bytes)
        bound, step_s = lower_bound_s(costs), step_seconds(costs)
        assert bound <= step_s * (1 + 1e-9)
        coded = replace(costs, codecs=(LinkCodec(ratio=0.01),) * len(costs.codecs))
        assert bound - max_codec_saving_s(costs) <= lower_bound_s(coded) * (1 + 1e-9)


def test_the_bound_is_the_forecast_where_nothing_is_lost() -> None:
    """A bound of 0 would be below everything as well: on one worker, and for GPipe with free links, it is exact."""
    profile = profile_of(random_units(4, 1))
    for pipeline, schedule in ((1, "1f1b"), (4, "gpipe")):
        costs = make_costs(profile, mesh=Mesh(pipeline=pipeline), microbatches=8, schedule=schedule)
        step_s = step_seconds(costs)
        assert lower_bound_s(costs) == pytest.approx(step_s, rel=0.25 if pipeline > 1 else 1e-9)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    p=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2]),
    rounds=st.integers(2, 4),
    schedule=st.sampled_from(sorted(FIXED_SCHEDULES)),
    recompute=st.sampled_from(["none", "always", "except-last"]),
    optimizer=st.sampled_from([OptimizerSpec(), OptimizerSpec(momentum=0.9), OptimizerSpec(name="adamw")]),
    shard=st.sampled_from([None, "step", "microbatch"]),
    memory=st.integers(500, 12_000),
)
def test_what_is_refused_early_does_not_fit(
    seed: int,
    p: int,
    data: int,
    rounds: int,
    schedule: str,
    recompute: str,
    optimizer: OptimizerSpec,
    shard: str | None,
    memory: int,
) -> None:
    is_sharded = shard is not None and data > 1
    costs = make_costs(
        profile_of(random_units(8, seed)),
        mesh=Mesh(data=data, pipeline=p),
        microbatches=rounds * p,
        schedule=schedule if p > 1 else "1f1b",
        recompute="none" if SCHEDULES[schedule].splits_backward else recompute,
        optimizer=optimizer,
        shard=is_sharded,
        fsdp_gather=shard if is_sharded and not SCHEDULES[schedule].splits_backward else "auto",
        cluster=cluster_of(p * data, memory_bytes=memory),
    )
    if memory_overflow(costs) is not None:
        assert not predict(costs).fits
