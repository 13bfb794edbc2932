"""Train a model under a plan from a loop of one's own: ``stagewright.parallelize``.

    trainer = sw.parallelize(model, example, plan="plan.toml", loss=loss_fn, optimizer=make_adamw)
    for batch in loader:                       # every worker is given the same whole batch
        step = trainer.step(batch)             # step.loss is the same on every worker
    trainer.evaluate(batch).loss
    trainer.save("checkpoints/step-00000120"); trainer.load(…)       under any other plan too

Started with ``torchrun --nproc-per-node N script.py``, or plain ``python`` for one worker.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from stagewright.cluster.device import Device, pin_process
from stagewright.engine.batch.microbatch import leading_dims
from stagewright.engine.parallel.trainer import MakeOptimizer, Trainer, as_batch
from stagewright.engine.worker.context import WorkerContext, make_context
from stagewright.engine.worker.process_group import join_group
from stagewright.engine.worker.user_loop import OwnLoop
from stagewright.engine.worker.watchdog import HANG_S, START_S
from stagewright.engine.worker.worker import Place, choose_device
from stagewright.errors import UsageError
from stagewright.machine.cpu_offload import settle
from stagewright.spec.plan import OptimizerSpec, Plan
from stagewright.spec.plan_file import read_plan
from stagewright.spec.plan_rules import check_plan
from stagewright.zoo.loss import model_loss
from stagewright.zoo.model import Batch, Model

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    example: Batch | Sequence[Any],
    *,
    plan: Plan | str | Path,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: MakeOptimizer | OptimizerSpec | None = None,
    hang_s: float = HANG_S,
) -> Trainer:
    """This worker's part of a model, ready to train.

    Every worker makes the same model (the same seed) and calls this with the same ``example``: a ``Batch``, or the
    model's arguments with the target behind them. ``loss(output, target)`` is the mean over samples; without one it is
    the model's own: the scalar ``loss`` in its result, or a result that is one scalar. ``optimizer`` is given this
    worker's parameters; without one the plan's is used. The plan's model and batch size are not looked at.

    Under ``torchrun`` a worker that fails in a method of the trainer ends the others, and so does one for which they
    wait longer than ``hang_s``.
    """
    chosen = plan if isinstance(plan, Plan) else read_plan(plan)
    if not chosen.training:
        chosen = replace(chosen, training=True)
    check_plan(chosen)
    context = _join(chosen, hang_s)
    loop = OwnLoop(context.rank, context.device, hang_s)
    with loop.inside():
        module = settle(model, context.torch_device, chosen.memory_bytes)
        if not module.training:
            module.train()
        wrapped = _as_model(module, as_batch(example), loss or model_loss, context.torch_device)
        trainer = Trainer(chosen, wrapped, context, optimizer=optimizer, loop=loop)
        if loss is None:
            model_loss(trainer.replica.graph.example_result())  # refused before the first step
    return trainer


def _as_model(
    module: nn.Module, example: Batch, loss: Callable[[Any, Any], torch.Tensor], place: torch.device
) -> Model:
    """The user's module as the engine takes it; other sizes of the example repeat its samples."""
    args, kwargs, target = pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf.to(place), (example.args, example.kwargs, example.target)
    )
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not tensors:
        raise UsageError("the example holds no tensor with samples; give (x, target) as the model takes it")
    size = int(tensors[0].shape[0])

    def make(num_samples: int) -> Batch:
        leaves, spec = pytree.tree_flatten((args, kwargs, target))
        dims = leading_dims((args, kwargs, target), size)
        index = torch.arange(num_samples, device=place) % size
        taken = [leaf if dim is None else leaf.index_select(dim, index) for leaf, dim in zip(leaves, dims, strict=True)]
        some_args, some_kwargs, some_target = pytree.tree_unflatten(taken, spec)
        return Batch(args=some_args, kwargs=some_kwargs, target=some_target)

    return Model(
        name=type(module).__name__,
        module=module,
        args=args,
        kwargs=kwargs,
        target=target,
        loss=loss,
        batch_size=size,
        make_example=make,
    )


def _join(plan: Plan, hang_s: float) -> WorkerContext:
    """Find this worker's place and device and join the process group, if the script has not."""
    if dist.is_initialized():
        rank = dist.get_rank()
        local = int(os.environ.get("LOCAL_RANK", rank))
        place = Place(rank=rank, local_rank=local, num_workers=dist.get_world_size())
    else:
        place = Place.of(os.environ)
    wanted = plan.mesh.num_workers
    if place.num_workers != wanted:
        raise UsageError(
            f"the plan wants {wanted} workers ({plan.mesh}), but {place.num_workers} were started; "
            f"use torchrun --nproc-per-node {wanted} SCRIPT"
        )
    device: Device = choose_device(plan, place)
    pin_process(device)
    if not dist.is_initialized():
        # The watch knows more: this ends a wait only where the watch itself is gone.
        options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=2 * max(hang_s, START_S))}
        if place.store is None:
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        one_machine = place.num_machines == 1
        join_group(device, worker=place.rank, devices=plan.devices, one_machine=one_machine, **options)
    elif device.kind == "cuda":
        torch.cuda.set_device(device.torch_device())
    return make_context(plan.mesh, place.rank, device)
