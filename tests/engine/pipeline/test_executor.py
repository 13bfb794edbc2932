"""Every schedule gives the baseline's loss, gradients, buffers and outputs, for whole and partial batches.

The baseline is one worker with the same micro-batches (batch norm normalizes each by itself). Differences come from
floating-point reordering alone: in float64 every parameter of every model here is within 1e-8 of its gradient, or of a
tenth of the model's median gradient where its own is only rounding errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.pipeline import step as pipeline_step
from stagewright.engine.pipeline.config import PipelineConfig
from stagewright.engine.pipeline.executor import PipelineExecutor
from stagewright.engine.pipeline.links import Links
from stagewright.engine.pipeline.transfers import Transfer
from stagewright.schedules.action_order import format_actions
from stagewright.schedules.order_search.problem import OrderProblem
from stagewright.schedules.order_search.search import search_orders

SCHEDULES = ["gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"]
MODELS = ["mlp", "digits-vit", "deit", "mobilenet-v2", "roberta", "roberta-mask", "gpt2", "llama"]
MULTI = SCHEDULES[2:]


def compare(pool_of: Any, model: str, schedule: str, num_workers: int, batch: int, **more: Any) -> list[Any]:
    """Run a step on one worker and on several, and compare loss, gradients, buffers and outputs."""
    count = {2: 4, 3: 6, 4: 4}[num_workers] if schedule != "dualpipev" else 2 * num_workers
    if model == "mobilenet-v2":
        count = min(count, batch // 2)  # batch norm needs two samples
    num_stages = more.pop("num_stages", num_workers * (2 if schedule in MULTI else 1))
    (expected,) = pool_of(1).run("jobs:pipeline_step", model, "serial", "gpipe", count, batch, 1)
    results = pool_of(num_workers).run(
        "jobs:pipeline_step", model, f"pipeline={num_workers}", schedule, count, batch, num_stages, **more
    )
    (loss,) = [result["loss"] for result in results if result["loss"] is not None]
    assert loss == pytest.approx(expected["loss"], rel=1e-8)
    gradients: dict[str, Any] = {}
    for result in results:
        for name, value in result["gradients"].items():  # tied ones are on two workers: their sum is the gradient
            gradients[name] = gradients.get(name, 0) + value
    assert set(gradients) == set(expected["gradients"])
    median = np.median([np.abs(value).max() for value in expected["gradients"].values()])
    for name, value in expected["gradients"].items():
        scale = max(np.abs(value).max(), 0.1 * median)  # a key's bias has no gradient but rounding errors
        assert np.abs(gradients[name] - value).max() / scale < 1e-8, name
    for result in results:
        for name, value in result["buffers"].items():
            np.testing.assert_allclose(value, expected["buffers"][name], rtol=1e-8, atol=1e-10)
    (outputs,) = [result["outputs"] for result in results if result["outputs"] is not None]
    np.testing.assert_allclose(outputs, expected["outputs"], rtol=1e-8, atol=1e-10)
    return results


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_two_workers(pool_of: Any, model: str, schedule: str) -> None:
    compare(pool_of, model, schedule, 2, 12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["aside", "early-exit"])
@pytest.mark.parametrize("recompute", ["none", "always"])
def test_unused_parameters_get_no_gradient(pool_of: Any, model: str, schedule: str, recompute: str) -> None:
    """A zero gradient would differ: weight decay and momentum change the parameter."""
    results = compare(pool_of, model, schedule, 2, 12, recompute=recompute)
    assert ("aside.weight" in results[0]["gradients"]) == (model == "early-exit")


@pytest.mark.parametrize(
    ("model", "schedule", "in_flight"),
    [
        ("gpt2", "gpipe", [4, 4]),
        ("early-exit", "1f1b", [2, 1]),
        ("mobilenet-v2", "1f1b", [2, 1]),
        ("llama", "zbv", None),
    ],
)
def test_stages_run_in_slots(pool_of: Any, model: str, schedule: str, in_flight: list[int] | None) -> None:
    """As CUDA graphs do: a micro-batch in flight has a slot, which the next one uses again."""
    results = compare(pool_of, model, schedule, 2, 12, in_slots=True)
    if in_flight is not None:
        assert [result["slots"][index] for index, result in enumerate(results)] == in_flight


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_transfers_through_host_memory(pool_of: Any, schedule: str) -> None:
    """On CPUs everything is in host memory: this tests that all transfers arrive and that a stream still starts."""
    compare(pool_of, "mlp", schedule, 2, 12, through_host=True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["mlp", "gpt2"])  # a chain, and a model with tied weights that skip stages
@pytest.mark.parametrize("num_workers", [3, 4])  # below, so that it changes last: a pool of workers costs seconds
def test_more_workers(pool_of: Any, model: str, schedule: str, num_workers: int) -> None:
    # 8 micro-batches of 12 samples would leave some with one, which batch norm refuses.
    compare(pool_of, model, schedule, num_workers, 16 if model == "mobilenet-v2" else 12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("batch", [11, 5, 3])
def test_partial_batches(pool_of: Any, schedule: str, batch: int) -> None:
    """Batches that don't divide, and one with fewer samples than micro-batches."""
    compare(pool_of, "gpt2", schedule, 2, batch)


def searched(workers: tuple[int, ...]) -> tuple[str, ...]:
    """An order for four micro-batches on unequal stages, with memory for three of them on each stage."""
    times = [(1.0, 1.2, 1.0), (1.5, 1.4, 1.6), (0.7, 0.6, 0.8), (1.1, 1.3, 1.2)][: len(workers)]
    columns = [[forward, inputs + weights, inputs, weights] for forward, inputs, weights in times]
    forward, backward, inputs, weights = (tuple((value,) * 4 for value in row) for row in zip(*columns, strict=True))
    problem = OrderProblem(
        stage_workers=workers,
        action_s=(forward, backward, inputs, weights),
        link_s=((0.1,) * 4,) * (len(workers) - 1),
        saved_bytes=((1,) * 4,) * len(workers),
        pending_bytes=((0,) * 4,) * len(workers),
        limit_bytes=(3.0 * len(workers) / 2,) * 2,
        tail_s=(0.0, 0.0),
        can_split=tuple(stage > 0 for stage in range(len(workers))),
    )
    return format_actions(search_orders(problem)[0].actions)


@pytest.mark.parametrize(
    ("model", "batch"), [("gpt2", 12), ("gpt2", 11), ("gpt2", 3), ("mobilenet-v2", 12), ("llama", 12)]
)
@pytest.mark.parametrize("workers", [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0)], ids=["one", "two", "v"])
def test_searched_orders(pool_of: Any, model: str, batch: int, workers: tuple[int, ...]) -> None:
    """Orders that no schedule has: backwards are split here and whole there."""
    actions = searched(workers)
    kinds = {kind for kind in "FBIW" if any(kind in line for line in actions)}
    assert kinds == set("FBIW")
    placement = "v" if workers == (0, 1, 1, 0) else "in-order"
    compare(pool_of, model, "searched", 2, batch, num_stages=len(workers), placement=placement, actions=actions)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_client_and_server(pool_of: Any, schedule: str) -> None:
    """First and last stage on one worker, the middle on the other."""
    results = compare(pool_of, "roberta-mask", schedule, 2, 12, num_stages=3, placement="client-server")
    assert results[0]["loss"] is not None


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize(("recompute", "spared"), [("always", 0), ("except-last", 1)])
def test_a_stage_is_recomputed_once(pool_of: Any, schedule: str, recompute: str, spared: int) -> None:
    """With a split backward too: not once for the inputs and again for each group of weights."""
    results = compare(pool_of, "gpt2", schedule, 2, 12, recompute=recompute)
    num_stages = 2 if schedule in MULTI else 1
    assert [result["again"] for result in results] == [num_stages * (4 - spared)] * 2


def test_sent_bytes_are_those_of_the_crossings(pool_of: Any) -> None:
    results = compare(pool_of, "deit", "1f1b", 2, 12)
    hidden = 12 * 6 * 32 * 8  # samples, tokens (4 patches and 2 extra), width, float64
    assert [result["sent_bytes"] for result in results] == [{0: hidden}, {0: hidden}]


def lone_pipeline(device: str, *stage_workers: int) -> PipelineExecutor:
    """An executor of worker 0 without peers."""
    groups = {(backward, up): None for backward in (False, True) for up in (False, True)}
    context: Any = SimpleNamespace(pipeline=0, rank=0, pipeline_ranks=range(2), torch_device=torch.device(device))
    context.uses_nccl = device != "cpu"
    context.link_groups, context.link_group = groups, lambda sender, receiver, *, backward: None
    config = PipelineConfig(
        stage_workers=stage_workers,
        schedule="1f1b",
        num_microbatches=1,
        links=Links(
            shapes=lambda cut, size: [],
            gradients=lambda cut, variant: (False,),
            needs_gradient=[(False,)] * (len(stage_workers) - 1),
        ),
        unflatten=lambda outputs: outputs,
        loss=torch.nn.functional.mse_loss,
    )
    stages: Any = {stage: torch.nn.Identity() for stage, worker in enumerate(stage_workers) if worker == 0}
    return PipelineExecutor(stages, config, context)


def test_first_receives_of_a_stream_are_not_posted_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 has both ends of a V: nothing returns before two micro-batches are sent."""
    asked: list[Mapping[Transfer, int]] = []

    def receiver(*_: Any, after: Mapping[Transfer, int], **__: Any) -> Any:
        asked.append(after)
        raise InterruptedError

    monkeypatch.setattr(pipeline_step, "Receiver", receiver)
    monkeypatch.setattr(PipelineExecutor, "open_links", lambda self, *, backward: None)
    with pytest.raises(InterruptedError):
        next(lone_pipeline("cpu", 0, 1, 1, 0).stream([MicroBatch(inputs=[torch.zeros(1)], num_samples=1, weight=1.0)]))
    assert [asked[0][Transfer(2, number, False)] for number in range(2)] == [2, 3]


def test_host_transport_is_for_new_sizes_between_gpus() -> None:
    assert not lone_pipeline("cpu", 0, 1)._needs_host_transport(True, [4])
    assert not lone_pipeline("cuda", 0)._needs_host_transport(True, [4])
    linked = lone_pipeline("cuda", 0, 1)
    assert linked._needs_host_transport(True, [4, 4])
    linked._seen_sizes.add((True, 4))
    assert not linked._needs_host_transport(True, [4, 4])
    assert linked._needs_host_transport(True, [4, 3])
    assert linked._needs_host_transport(False, [4])
