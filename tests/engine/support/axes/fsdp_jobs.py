"""Worker functions for tests of FSDP in pipelines and in inference, run by ``pool``."""

from __future__ import annotations

import dataclasses
from typing import Any

import context_jobs
import torch
from expert_jobs import make_plan
from parity_jobs import checked_traffic

from jobs import context_of, even_cuts
from stagewright.engine.parallel.model import capture_for
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.errors import UsageError
from stagewright.zoo.model import Batch, Model

BATCH = 8


def make_model(name: str) -> Model:
    """Build a tiny transformer with dropout: llama, gpt2 or bert with a loss of their own, or vit."""
    return make_vit() if name == "vit" else context_jobs.make_model(name, batch=BATCH)


def make_vit(image_size: int = 8) -> Model:
    """Build a tiny vision transformer with a token for each patch of 4 x 4 pixels and one more."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, image_size=image_size,
        patch_size=4, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2, num_labels=5,
    )  # fmt: skip

    def make(count: int) -> Batch:
        generator = torch.Generator().manual_seed(count)
        target = torch.randint(0, 5, (count,), generator=generator)
        images = torch.randn(count, 3, image_size, image_size, generator=generator)
        return Batch(args=(images,), target=target)

    example = make(BATCH)
    return Model(
        name="vit",
        module=hf.ViTForImageClassification(config),
        args=example.args,
        target=example.target,
        loss=lambda output, target: torch.nn.functional.cross_entropy(output["logits"], target),
        batch_size=BATCH,
        make_example=make,
    )


def parity(rank: int, name: str, mesh: str, **more: Any) -> dict[str, Any]:
    """Check the parity of a plan; return the bytes of its data axis, and of what this worker holds."""
    model = make_model(name)
    model.module.train(more.get("training", True))
    plan = make_plan(mesh, model, shard=True, **more)
    runner, report, sent = checked_traffic(rank, plan, model, mesh, lambda runner: runner.sync.data_axis)
    held = {id(value): value for value in runner.part.module.parameters()}.values()
    return {
        "report": report,
        "bytes": sent,
        "num_parameters": len(held),
        "full_bytes": sum(value.numel() * value.element_size() for value in held),
        "held_bytes": sum(value.to_local().nbytes if hasattr(value, "to_local") else value.nbytes for value in held),
    }


def refused(rank: int) -> str:
    """Return the sentence that refuses separate gathers of a weight that two stages of one worker share."""
    mesh, model = "data=2,pipeline=2", make_model("gpt2")
    plan = make_plan(mesh, model, shard=True, fsdp_gather="microbatch", microbatches=2)
    calls = capture_for(plan, model).calls
    cuts = tuple(calls[cut].name for cut in even_cuts(len(calls), 3))
    plan = dataclasses.replace(plan, cuts=cuts, placement="client-server")
    try:
        StepRunner(plan, model, context_of(rank, mesh))
    except UsageError as error:
        return str(error)
    return ""
