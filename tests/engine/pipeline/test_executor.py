"""Every schedule gives serial's loss, gradients, buffers and results, for whole and partial batches.

The reference is one worker with the same micro-batches (batch norm normalises each by itself). Differences come from
the order of additions alone: 1e-5 relative holds for every parameter of every model here.
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

SCHEDULES = ["gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"]
MODELS = ["mlp", "digits-vit", "deit", "mobilenet-v2", "roberta", "roberta-mask", "gpt2", "llama"]
MULTI = SCHEDULES[2:]


def compare(pool_of: Any, model: str, schedule: str, num_workers: int, batch: int, **more: Any) -> list[Any]:
    """Run a step on one worker and on several; all that must agree, agrees."""
    count = {2: 4, 3: 6, 4: 4}[num_workers] if schedule != "dualpipev" else 2 * num_workers
    if model == "mobilenet-v2":
        count = min(count, batch // 2)  # batch norm needs two samples
    num_stages = more.pop("num_stages", num_workers * (2 if schedule in MULTI else 1))
    (expected,) = pool_of(1).run("jobs:pipeline_step", model, "serial", "gpipe", count, batch, 1)
    found = pool_of(num_workers).run(
        "jobs:pipeline_step", model, f"pipeline={num_workers}", schedule, count, batch, num_stages, **more
    )
    (loss,) = [one["loss"] for one in found if one["loss"] is not None]
    assert loss == pytest.approx(expected["loss"], rel=1e-5)
    gradients: dict[str, Any] = {}
    for one in found:
        for name, value in one["gradients"].items():  # tied ones are on two workers: their sum is the gradient
            gradients[name] = gradients.get(name, 0) + value
    assert set(gradients) == set(expected["gradients"])
    for name, value in expected["gradients"].items():
        scale = max(np.abs(value).max(), 1e-6)
        assert np.abs(gradients[name] - value).max() / scale < 1e-5, name
    for one in found:
        for name, value in one["buffers"].items():
            np.testing.assert_allclose(value, expected["buffers"][name], rtol=1e-5, atol=1e-7)
    (outputs,) = [one["outputs"] for one in found if one["outputs"] is not None]
    np.testing.assert_allclose(outputs, expected["outputs"], rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_two_workers(pool_of: Any, model: str, schedule: str) -> None:
    compare(pool_of, model, schedule, 2, 12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["aside", "early-exit"])
@pytest.mark.parametrize("recompute", ["none", "always"])
def test_what_no_loss_reaches_gets_no_gradient(pool_of: Any, model: str, schedule: str, recompute: str) -> None:
    """A zero is not the same: weight decay and momentum would change the parameter."""
    found = compare(pool_of, model, schedule, 2, 12, recompute=recompute)
    assert ("aside.weight" in found[0]["gradients"]) == (model == "early-exit")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_what_gpus_meet_first_goes_through_the_host(pool_of: Any, schedule: str) -> None:
    """Here there is nothing but the host: what is tested is that all of it arrives, and that a stream still begins."""
    compare(pool_of, "mlp", schedule, 2, 12, through_host=True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_workers", [3, 4])  # below, so that it changes last: a pool of workers costs seconds
def test_more_workers(pool_of: Any, model: str, schedule: str, num_workers: int) -> None:
    # 8 micro-batches of 12 samples would leave some with one, which batch norm refuses.
    compare(pool_of, model, schedule, num_workers, 16 if model == "mobilenet-v2" else 12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("batch", [11, 5, 3])
def test_partial_batches(pool_of: Any, schedule: str, batch: int) -> None:
    """Batches that don't divide, and one with fewer samples than micro-batches."""
    compare(pool_of, "gpt2", schedule, 2, batch)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_client_and_server(pool_of: Any, schedule: str) -> None:
    """First and last stage on one worker, the middle on the other."""
    found = compare(pool_of, "roberta-mask", schedule, 2, 12, num_stages=3, placement="client-server")
    assert found[0]["loss"] is not None


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize(("recompute", "spared"), [("always", 0), ("except-last", 1)])
def test_a_recomputed_stage_runs_again_once(pool_of: Any, schedule: str, recompute: str, spared: int) -> None:
    """Also where backward is split in two: not once for its inputs and once more for each group of its weights."""
    found = compare(pool_of, "gpt2", schedule, 2, 12, recompute=recompute)
    num_stages = 2 if schedule in MULTI else 1
    assert [one["again"] for one in found] == [num_stages * (4 - spared)] * 2


def test_bytes_on_the_links_are_those_of_the_crossings(pool_of: Any) -> None:
    found = compare(pool_of, "deit", "1f1b", 2, 12)
    hidden = 12 * 6 * 32 * 4  # samples, tokens (4 patches and 2 extra), width, float32
    assert [one["sent_bytes"] for one in found] == [{0: hidden}, {0: hidden}]


def lone_pipeline(device: str, *stage_workers: int) -> PipelineExecutor:
    """Worker 0's part, with nobody to talk to and nothing on its device."""
    groups = {(backward, up): None for backward in (False, True) for up in (False, True)}
    context: Any = SimpleNamespace(pipeline=0, rank=0, pipeline_ranks=range(2), torch_device=torch.device(device))
    context.link_groups, context.link_group = groups, lambda sender, receiver, *, backward: None
    config = PipelineConfig(
        stage_workers=stage_workers,
        schedule="1f1b",
        num_microbatches=1,
        links=Links(shapes=lambda cut, size: [], needs_gradient=[(False,)] * (len(stage_workers) - 1)),
        unflatten=lambda outputs: outputs,
        loss=torch.nn.functional.mse_loss,
    )
    stages: Any = {stage: torch.nn.Identity() for stage, worker in enumerate(stage_workers) if worker == 0}
    return PipelineExecutor(stages, config, context)


def test_a_streams_first_receives_wait_until_they_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 has the ends of a V: nothing comes back before two micro-batches have left."""
    asked: list[Mapping[Transfer, int]] = []

    def receiver(*_: Any, after: Mapping[Transfer, int], **__: Any) -> Any:
        asked.append(after)
        raise InterruptedError

    monkeypatch.setattr(pipeline_step, "Receiver", receiver)
    monkeypatch.setattr(PipelineExecutor, "open_links", lambda self, *, backward: None)
    with pytest.raises(InterruptedError):
        next(lone_pipeline("cpu", 0, 1, 1, 0).stream([MicroBatch(inputs=[torch.zeros(1)], num_samples=1, weight=1.0)]))
    assert [asked[0][Transfer(2, number, False)] for number in range(2)] == [2, 3]


def test_only_linked_gpus_meet_something_new_and_each_size_once() -> None:
    assert not lone_pipeline("cpu", 0, 1)._needs_host_transport(True, [4])
    assert not lone_pipeline("cuda", 0)._needs_host_transport(True, [4])
    linked = lone_pipeline("cuda", 0, 1)
    assert linked._needs_host_transport(True, [4, 4])
    linked._seen_sizes.add((True, 4))
    assert not linked._needs_host_transport(True, [4, 4])
    assert linked._needs_host_transport(True, [4, 3])
    assert linked._needs_host_transport(False, [4])
