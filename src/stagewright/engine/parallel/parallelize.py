"""Train a model under a plan from a user's training loop: ``stagewright.parallelize``.

    trainer = sw.parallelize(model, example, plan="plan.toml", loss=loss_fn, optimizer=make_adamw)
    for batch in loader:                       # every worker gets the same whole batch
        step = trainer.step(batch)             # step.loss is the same on every worker
    trainer.evaluate(batch).loss
    trainer.save("checkpoints/step-00000120"); trainer.load(…)       under any other plan too

Start it with ``torchrun --nproc-per-node N script.py``, or plain ``python`` for one worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from stagewright import structure
from stagewright.cluster.device import pin_process
from stagewright.engine.batch.splitter import count_tokens
from stagewright.engine.parallel.model import move_batch
from stagewright.engine.parallel.optimizer import MakeOptimizer
from stagewright.engine.parallel.trainer import Trainer, as_batch
from stagewright.engine.worker.context import WorkerContext, join_group, make_context
from stagewright.engine.worker.placement import RankPlacement, choose_device
from stagewright.engine.worker.user_loop import UserLoop
from stagewright.engine.worker.watchdog import HANG_S
from stagewright.errors import UnknownName, UsageError
from stagewright.machine.cpu_offload import move_or_offload
from stagewright.spec.plan import OptimizerSpec, Plan
from stagewright.spec.plan_file import read_plan
from stagewright.spec.plan_rules import check_plan
from stagewright.zoo.example import resized
from stagewright.zoo.loss import model_loss
from stagewright.zoo.model import Batch, Model


def parallelize(
    model: nn.Module,
    example: Batch | Sequence[Any],
    *,
    plan: Plan | str | Path,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: MakeOptimizer | OptimizerSpec | None = None,
    loss_items: Literal["samples", "tokens"] | Callable[[Batch], float] = "samples",
    hang_s: float = HANG_S,
) -> Trainer:
    """Return a trainer for this worker's part of a model, in a training script that ``torchrun`` starts.

    Every worker creates the same model (the same seed). A worker that fails in a method of the trainer ends the others,
    and so does one that they wait for longer than ``hang_s``.

    Args:
        model: The model, the same on every worker.
        example: A ``Batch``, or a tuple of the model's arguments followed by the target.
        plan: A plan, or the path of its file; its model and batch size are ignored.
        loss: ``loss(output, target)``, the mean over samples; by default the scalar ``loss`` of the model's output, or
            an output that is a scalar.
        optimizer: Called with this worker's parameters; by default the plan's optimizer.
        loss_items: What the loss is the mean of, so that micro-batches are weighted by their share and their sum is the
            loss of the whole batch: samples, tokens (targets other than -100), or a function that counts them.
        hang_s: Seconds that other workers wait for one without progress.

    Example:
        plan = sw.Plan.of("my model", batch=32)
        trainer = sw.parallelize(model, (x, x), plan=plan, loss=torch.nn.functional.mse_loss)
        print(trainer.step((x, x)).loss)
    """
    plan = plan if isinstance(plan, Plan) else read_plan(plan)
    if not plan.training:
        plan = replace(plan, training=True)
    check_plan(plan)
    context = _join_workers(plan, hang_s)
    loop = UserLoop(context.rank, context.device, hang_s)
    with loop.inside():
        module = move_or_offload(model, context.torch_device, plan.memory_bytes)
        if not module.training:
            module.train()
        wrapped = _wrap_module(module, as_batch(example), loss or model_loss, context.torch_device)
        counts = {"samples": None, "tokens": count_tokens}
        if isinstance(loss_items, str) and loss_items not in counts:
            raise UnknownName("kind of loss items", loss_items, counts, "or give a function of a Batch")
        count_items = counts[loss_items] if isinstance(loss_items, str) else loss_items
        trainer = Trainer(plan, wrapped, context, optimizer=optimizer, count_items=count_items, loop=loop)
        if loss is None:
            model_loss(trainer.runner.part.graph.example_result())  # raise before the first step
    return trainer


def _wrap_module(
    module: nn.Module, example: Batch, loss: Callable[[Any, Any], torch.Tensor], device: torch.device
) -> Model:
    """Wrap the user's module as a ``Model``; examples of other batch sizes repeat the samples of this one."""
    example = move_batch(example, device)
    if not any(tensor.ndim for tensor in structure.tensors((example.args, example.kwargs))):
        raise UsageError("the example has no tensor with samples; give (x, target) as the model takes it")
    batch_size, make_example = resized(example, module)
    return Model(
        name=type(module).__name__,
        module=module,
        args=example.args,
        kwargs=example.kwargs,
        target=example.target,
        loss=loss,
        batch_size=batch_size,
        make_example=make_example,
    )


def _join_workers(plan: Plan, hang_s: float) -> WorkerContext:
    """Choose this worker's device and join the process group, unless the script has."""
    if dist.is_initialized():
        rank = dist.get_rank()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        placement = RankPlacement(rank=rank, local_rank=local_rank, num_workers=dist.get_world_size())
    else:
        placement = RankPlacement.from_environment(os.environ)
    num_workers = plan.mesh.num_workers
    if placement.num_workers != num_workers:
        raise UsageError(
            f"the plan needs {num_workers} workers ({plan.mesh}), but {placement.num_workers} were started; "
            f"use torchrun --nproc-per-node {num_workers} SCRIPT"
        )
    device = choose_device(plan, placement)
    pin_process(device)
    if not dist.is_initialized():
        join_group(device, placement, plan.devices, hang_s)
    elif device.kind == "cuda":
        torch.cuda.set_device(device.torch_device())
    return make_context(plan.mesh, placement.rank, device)
