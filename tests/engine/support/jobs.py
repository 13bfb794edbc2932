"""What workers do in the tests of the pipeline; imported by name in ``pool``."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from stagewright.cluster.device import Device
from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.pipeline.activation_checkpointing import CheckpointedForward
from stagewright.engine.pipeline.config import PipelineConfig, PipelineHooks
from stagewright.engine.pipeline.cuda_graphs import GradientSums, GraphedForward
from stagewright.engine.pipeline.executor import PipelineExecutor
from stagewright.engine.pipeline.links import Links
from stagewright.engine.worker.context import WorkerContext, make_context
from stagewright.graph import UnitGraph, capture
from stagewright.schedules.rules import PLACEMENTS, SCHEDULES
from stagewright.spec.plan import Mesh


class Aside(nn.Module):
    """Layers with a second head near their beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.last = nn.Linear(16, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.middle = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        early = self.aside(hidden)
        return self.last(self.middle(hidden)), early


def build(name: str) -> tuple[nn.Module, Any, Any, Any, Any]:
    """A small model in train mode without dropout: module, args and kwargs of a batch, target, loss.

    A batch has 12 samples, or 16 where batch norm needs two in each micro-batch.
    """
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ids = torch.randint(5, 100, (12, 8))
    classes = torch.randint(0, 3, (12,))

    def classify(output: Any, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(getattr(output, "logits", output), target)

    def predict(output: Any, target: torch.Tensor) -> torch.Tensor:
        logits = output.logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, target[:, 1:].flatten())

    if name == "mlp":
        layers = [module for _ in range(5) for module in (nn.Linear(16, 16), nn.ReLU(inplace=True))]
        return nn.Sequential(*layers, nn.Linear(16, 3)), (torch.randn(12, 16),), {}, classes, classify
    if name in ("aside", "early-exit"):

        def one_head(output: Any, target: torch.Tensor) -> torch.Tensor:
            """The early head's result is used in some micro-batches, and then alone; or never."""
            return classify(output[name == "early-exit" and int(target[0]) == 0], target)

        return Aside(), (torch.randn(12, 16),), {}, torch.arange(12) % 4 % 3, one_head
    if name == "deit":
        config: Any = hf.DeiTConfig(**sizes, **off, image_size=16, patch_size=8, num_labels=3)
        return hf.DeiTForImageClassification(config), (torch.randn(12, 3, 16, 16),), {}, classes, classify
    if name == "digits-vit":
        from stagewright import zoo

        model = zoo.load("digits-vit", batch=12)
        for module in model.module.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.module, model.args, model.kwargs, model.target, model.loss
    if name == "mobilenet-v2":
        config = hf.MobileNetV2Config(image_size=64, depth_multiplier=0.35, num_labels=3, classifier_dropout_prob=0.0)
        classes = torch.randint(0, 3, (16,))
        return hf.MobileNetV2ForImageClassification(config), (torch.randn(16, 3, 64, 64),), {}, classes, classify
    if name.startswith("roberta"):
        config = hf.RobertaConfig(**sizes, **off, vocab_size=100, num_labels=3)
        mask = (torch.arange(8) < torch.randint(3, 9, (12, 1))).long()
        kwargs = {"attention_mask": mask} if name == "roberta-mask" else {}
        return hf.RobertaForSequenceClassification(config), (ids,), kwargs, classes, classify
    if name == "gpt2":
        config = hf.GPT2Config(
            n_embd=32,
            n_layer=6,
            n_head=4,
            vocab_size=100,
            n_positions=16,
            use_cache=False,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
        return hf.GPT2LMHeadModel(config), (ids,), {}, ids, predict
    assert name == "llama"
    config = hf.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=100, use_cache=False)
    return hf.LlamaForCausalLM(config), (ids,), {}, ids, predict


@lru_cache(maxsize=4)
def captured(name: str) -> tuple[UnitGraph, Any, Any, Any, Any]:
    """In float64: batch norm of a few samples makes a rounding error of float32 a thousand times as large."""
    model, args, kwargs, target, loss = build(name)
    model.train().double()
    args = tuple(value.double() if value.is_floating_point() else value for value in args)
    units = "leaf" if name in ("digits-vit", "aside", "early-exit") else "auto"  # else too few for 8 stages
    return capture(model, args, kwargs, units), args, kwargs, target, loss


_contexts: dict[tuple[int, str], WorkerContext] = {}


def context_of(rank: int, mesh: str) -> WorkerContext:
    if (rank, mesh) not in _contexts:
        _contexts[rank, mesh] = make_context(Mesh.parse(mesh), rank, Device.parse("cpu"))
    return _contexts[rank, mesh]


def even_cuts(num_units: int, num_stages: int) -> list[int]:
    return [round(num_units * stage / num_stages) - 1 for stage in range(1, num_stages)]


def microbatches(graph: UnitGraph, args: Any, kwargs: Any, target: Any, batch: int, count: int) -> list[MicroBatch]:
    """The first ``batch`` samples in ``count`` chunks."""
    pieces = [piece for piece in torch.arange(batch).tensor_split(count) if len(piece)]
    found = []
    for piece in pieces:
        chosen = graph.flatten(tuple(one[piece] for one in args), {name: one[piece] for name, one in kwargs.items()})
        size = len(piece)
        found.append(MicroBatch(inputs=chosen, target=target[piece], num_samples=size, weight=size / batch))
    return found


def pipeline_step(
    rank: int,
    name: str,
    mesh: str,
    schedule: str,
    count: int,
    batch: int,
    num_stages: int,
    placement: str | None = None,
    recompute: str = "none",
    through_host: bool = False,
    in_slots: bool = False,
    actions: tuple[str, ...] = (),
) -> Any:
    """One step under a schedule; the loss, gradients and buffers of this worker's stages, and evaluation's output.

    ``through_host``: as GPUs do what they meet for the first time; evaluation is then a stream. ``in_slots``: stages
    run as CUDA graphs do, twice over all micro-batches, so that slots are used again.
    """
    graph, args, kwargs, target, loss = captured(name)
    context = context_of(rank, mesh)
    state = {key: value.clone() for key, value in graph.model.state_dict().items()}
    workers = PLACEMENTS[placement or SCHEDULES[schedule].placement](num_stages, context.mesh.pipeline)
    cuts = even_cuts(len(graph.calls), num_stages)
    every = graph.stages(cuts)
    stages = {index: stage for index, stage in enumerate(every) if workers[index] == context.pipeline}

    again: list[int] = []  # one for each time that a stage ran again

    def watch() -> Any:
        again.append(1)
        return nullcontext()

    parts = microbatches(graph, args, kwargs, target, batch, count)
    forwards = {
        index: CheckpointedForward(
            stage, policy=recompute, index=index, num_microbatches=len(parts), recompute_context=watch
        )
        for index, stage in stages.items()
        if recompute != "none"
    }
    hooks = PipelineHooks()
    hooks.forwards = forwards
    slots: dict[int, GraphedForward] = {}
    if in_slots:
        sums = GradientSums(context.torch_device)
        slots, hooks.inference_forwards = (
            {
                index: GraphedForward(
                    stage,
                    list(stage.parameters()),
                    sums,
                    device=context.torch_device,
                    copies_outputs=index < num_stages - 1,
                )
                for index, stage in stages.items()
            }
            for _ in range(2)
        )
        hooks.forwards = slots
    config = PipelineConfig(
        stage_workers=workers,
        schedule=schedule,
        actions=actions,
        num_microbatches=count,
        links=Links.of([graph], cuts),
        unflatten=graph.unflatten,
        loss=loss,
        whole_backward=in_slots,
    )
    pipeline = PipelineExecutor(stages, config, context, hooks)
    if through_host:
        pipeline._needs_host_transport = lambda training, sizes: bool(sizes)  # type: ignore[method-assign]
    for _ in range(2 if in_slots else 1):
        graph.model.load_state_dict(state)
        graph.model.zero_grad()
        outcome = pipeline.train_step(parts)
    gradients = {key: one.grad for key, one in graph.model.named_parameters() if one.grad is not None}
    gradients = {key: value.clone() for key, value in gradients.items()}
    own = {key for stage in stages.values() for key in stage.state_dict()}
    buffers = {
        key: value.clone() for key, value in graph.model.state_dict().items() if key in own and key not in gradients
    }
    graph.model.load_state_dict(state)
    if through_host:
        with torch.no_grad():
            found = [one for one in pipeline.stream(iter(parts)) if one is not None]
    else:
        found = pipeline.evaluate(parts, with_loss=False).outputs
    outputs = [one[0] if isinstance(one, tuple) else getattr(one, "logits", one) for one in found]
    graph.model.load_state_dict(state)
    return {
        "loss": None if outcome.loss is None else float(outcome.loss),
        "gradients": {key: value.numpy() for key, value in gradients.items()},
        "buffers": {key: value.numpy() for key, value in buffers.items()},
        "outputs": torch.cat(outputs).numpy() if outputs else None,
        "sent_bytes": outcome.sent_bytes,
        "again": len(again),
        "slots": {index: forward.num_free_slots for index, forward in slots.items()},
    }
