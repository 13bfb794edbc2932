"""Training scripts with torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from model import BATCH, Setting, build, loss_of, make_batch, make_optimizer
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, SplitPoint, pipeline as trace_pipeline
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.checkpoint import checkpoint

import stagewright as sw


class TextStage(nn.Module):
    """A part of the text model under the model's names, as torchtitan cuts one."""

    def __init__(self, model: Any, first: bool, last: bool, blocks: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(index): model.blocks[index] for index in blocks})
        if first:
            self.embed, self.position = model.embed, model.position
            self.register_buffer("seen", model.seen)
        if last:
            self.norm, self.head = model.norm, model.head
        self.first, self.last, self.failing = first, last, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            self.seen.fill_(x.shape[1])
            x = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def text(setting: Setting, bug: str, folder: str | None) -> None:
    """Train one step of the text model on two stages of named modules."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model: Any = build(setting)
    if setting.tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # each stage has a copy
    stage_module = TextStage(model, rank == 0, rank == world - 1, [rank])
    if bug == "eval mode" and rank == 1:
        stage_module.eval()
    if bug == "detached stage" and rank == 1:
        stage_module.blocks["1"].register_forward_pre_hook(lambda module, args: (args[0].detach(),))
    batch = make_batch(setting)
    stage = PipelineStage(stage_module, rank, world, torch.device("cpu"))
    schedule_class: Any = get_schedule_class("1F1B" if setting.seed % 2 else "GPipe")
    schedule = schedule_class(stage, 4, loss_fn=loss_of, scale_grads=bug != "gradients not scaled")
    optimizer = make_optimizer(stage_module, setting)
    # A first step on other data lets the stages agree on shapes, and its gradients are dropped.
    torch.manual_seed(setting.seed + 7 + (rank if bug == "dropout seed" else 0))
    with sw.verify(stage_module, step=0, folder=folder):
        if rank == 0:
            schedule.step(batch["inputs"])
        else:
            schedule.step(target=batch["labels"], losses=[])
        if setting.tied and bug != "tied weights":
            gradient = (stage_module.embed if rank == 0 else stage_module.head).weight.grad
            dist.all_reduce(gradient)
        optimizer.step()


def slices(setting: Setting, bug: str, folder: str | None) -> None:
    """Train one step of a Sequential in slices, whose names need a mapping; also ZBV, with two stages a rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model: Any = build(setting)
    batch = make_batch(setting)
    layers = list(model)
    size = len(layers)
    if bug.startswith("zbv") or setting.seed % 4 == 3:
        bounds = [0, 1, 2, 3, size]
        numbers = [rank, 2 * world - 1 - rank]
        name = "ZBVZeroBubble"
    else:
        bounds, numbers, name = [0, (size + 1) // 2, size], [rank], "GPipe"
    modules: list[nn.Module] = [nn.Sequential(*layers[bounds[n] : bounds[n + 1]]) for n in numbers]
    names = [{str(i): str(i + bounds[n]) for i in range(bounds[n + 1] - bounds[n])} for n in numbers]
    wrapped = modules
    if bug == "second step with ddp":
        groups = [dist.new_group([other]) for other in range(world)]
        wrapped = [nn.parallel.DistributedDataParallel(module, process_group=groups[rank]) for module in modules]
    if bug == "zbv reentrant checkpoint":
        wrapped = [_Checkpointed(module) for module in modules]
    num_stages = len(bounds) - 1
    device = torch.device("cpu")
    stages = [PipelineStage(m, n, num_stages, device) for m, n in zip(wrapped, numbers, strict=True)]
    if bug not in ("dynamic shapes", "second step with ddp"):  # static shapes: no trial run
        sample = torch.zeros(BATCH // 4, *batch["inputs"].shape[1:], dtype=batch["inputs"].dtype)
        shapes = [sample]
        with torch.no_grad():
            plain = build(setting).eval()
            for n in range(num_stages):
                stage_output = nn.Sequential(*list(plain)[bounds[n] : bounds[n + 1]])(shapes[-1])
                shapes.append(stage_output.clone().requires_grad_())
        stages = [
            PipelineStage(m, n, num_stages, device, input_args=(shapes[n],), output_args=(shapes[n + 1],))
            for m, n in zip(wrapped, numbers, strict=True)
        ]
    loss: Any = lambda output, target: loss_of(output[:, None], target[:, None])  # noqa: E731
    schedule_class: Any = get_schedule_class(name)
    schedule = schedule_class(
        stages if name != "GPipe" else stages[0],
        4,
        loss_fn=None if setting.forward_only else loss,
        scale_grads=bug != "gradients not scaled",
    )
    optimizer = make_optimizer(nn.ModuleList(modules), setting)
    if bug == "stage raises" and rank == 1:
        modules[0][1].register_forward_hook(_raise)
    args = (batch["inputs"],) if rank == 0 else ()
    has_last = num_stages - 1 in numbers
    for step in range(2 if bug == "second step with ddp" else 1):
        with sw.verify(modules, step=step, folder=folder, names=names):
            if setting.forward_only:
                with torch.no_grad():
                    schedule.eval(*args)
                return
            schedule.step(*args, target=batch["labels"] if has_last else None, losses=[] if has_last else None)
            optimizer.step()
            optimizer.zero_grad()


def replicated(setting: Setting, bug: str, folder: str | None) -> None:
    """Train one step on four ranks: two replicas of a pipeline of two ranks, two stages each, in DDP."""
    replica, place = divmod(dist.get_rank(), 2)
    layers = list(build(setting))  # type: ignore[call-overload]
    batch = {name: value.chunk(2)[replica] for name, value in make_batch(setting).items()}
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    bounds = [0, 1, 2, 3, len(layers)]
    parts = [nn.Sequential(*layers[bounds[n] : bounds[n + 1]]) for n in range(4)]
    zbv = bug == "zbv with ddp"
    numbers = [place, 3 - place if zbv else place + 2]
    names = [{str(i): str(i + bounds[n]) for i in range(bounds[n + 1] - bounds[n])} for n in numbers]
    values = [torch.zeros(1, *batch["inputs"].shape[1:], dtype=batch["inputs"].dtype)]
    for part in parts:
        values.append(part(values[-1]).detach().requires_grad_())
    wrapped: list[Any] = [nn.parallel.DistributedDataParallel(parts[n], process_group=replicas[place]) for n in numbers]
    stages = [
        PipelineStage(
            module,
            n,
            4,
            torch.device("cpu"),
            input_args=(values[n],),
            output_args=(values[n + 1],),
            group=pipelines[replica],
        )
        for module, n in zip(wrapped, numbers, strict=True)
    ]
    schedule_class: Any = get_schedule_class("ZBVZeroBubble" if zbv else "Interleaved1F1B")
    schedule = schedule_class(
        stages, 4, loss_fn=lambda output, target: loss_of(output[:, None], target[:, None]), scale_grads=True
    )
    optimizer = make_optimizer(nn.ModuleList(wrapped), setting)
    with sw.verify(wrapped, step=0, folder=folder, names=names):
        has_last = 3 in numbers
        args = (batch["inputs"],) if 0 in numbers else ()
        schedule.step(*args, target=batch["labels"] if has_last else None, losses=[] if has_last else None)
        optimizer.step()


def _raise(module: nn.Module, args: Any, output: Any) -> None:
    raise ValueError("a stage fails")


class _Checkpointed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.module, x, use_reentrant=True)


def traced(setting: Setting, bug: str, folder: str | None) -> None:
    """Train one step of stages that torch's tracer made."""
    rank = dist.get_rank()
    model: Any = build(setting)
    batch = make_batch(setting)
    sample = batch["inputs"][: BATCH // 4]
    if bug == "dropout baked in":
        model.eval()  # traced for a check, then put back
    pipe = trace_pipeline(model, mb_args=(sample,), split_spec={"blocks.1": SplitPoint.BEGINNING})
    model.train()
    stage = pipe.build_stage(rank, torch.device("cpu"))
    stage.submod.train()
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_of)
    optimizer = make_optimizer(stage.submod, setting)
    torch.manual_seed(setting.seed + 7)
    with sw.verify(stage.submod, step=0, folder=folder):
        if rank == 0:
            schedule.step(batch["inputs"])
        else:
            schedule.step(target=batch["labels"], losses=[])
        optimizer.step()
