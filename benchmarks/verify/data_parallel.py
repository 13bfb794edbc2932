"""Training scripts with DDP, FSDP1 and FSDP2: right ones, and ones with a bug."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from model import Setting, build, loss_of, make_batch, make_optimizer, run_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stagewright as sw


def local_batch(setting: Setting, *, strided: bool = False, same: bool = False) -> dict[str, torch.Tensor]:
    """Return this rank's samples: a slice, or every n-th like a DistributedSampler."""
    rank, world, batch = dist.get_rank(), dist.get_world_size(), make_batch(setting)
    if same:
        rank = 0
    if strided:
        return {name: value[rank::world] for name, value in batch.items()}
    return {name: value.chunk(world)[rank] for name, value in batch.items()}


def mean_loss(setting: Setting, output: torch.Tensor, labels: torch.Tensor, *, per_rank: bool = False) -> torch.Tensor:
    """Return the loss whose mean over ranks is the mean over the valid tokens of the global batch."""
    if per_rank or not setting.padded:
        return loss_of(output, labels)
    valid = (labels >= 0).sum()
    dist.all_reduce(valid)
    return loss_of(output, labels, "sum") / valid * dist.get_world_size()


def reduce_gradients(model: nn.Module, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        if op == dist.ReduceOp.AVG:
            parameter.grad /= dist.get_world_size()


def ddp(setting: Setting, bug: str, folder: str | None) -> None:
    """Train one step with DistributedDataParallel."""
    plain = build(setting)
    if bug == "initial weights":
        torch.manual_seed(100 + dist.get_rank())
        plain.head.reset_parameters()
    by_hand = bug in ("clip before reduction", "initial weights")
    if bug == "stale buffer" and dist.get_rank() == 1:
        plain.register_forward_hook(_forget)
    model: Any = plain if by_hand else DistributedDataParallel(plain, broadcast_buffers=bug != "stale buffer")
    if bug == "parameter not updated":
        optimizer = make_optimizer(plain.blocks, setting)
    else:
        factor = 2.0 if bug == "learning rate" else 1.0
        optimizer = make_optimizer(plain, setting, decay_all=bug == "weight decay", factor=factor)
    batch = local_batch(setting, strided=setting.seed % 2 == 1, same=bug == "same samples")
    options: dict[str, Any] = {}
    if bug == "mask shifted":
        batch["mask"] = batch["mask"].roll(1, dims=1)
    if bug == "positions shifted" and dist.get_rank() == 1:
        options["offset"] = 1
    if bug == "eval mode":
        plain.blocks[1].eval()
    passes = 2 if "micro-batches" in bug or setting.seed % 3 == 2 else 1
    with sw.verify(model, step=0, folder=folder, replica=dist.get_rank() if by_hand else None):
        for index in range(passes):
            part = {name: value.chunk(passes)[index] for name, value in batch.items()}
            silent = bug == "no all-reduce" or index + 1 < passes
            if bug == "micro-batches lost":
                optimizer.zero_grad()
            with model.no_sync() if silent and not by_hand else contextlib.nullcontext():
                loss = mean_loss(setting, run_model(model, part, **options), part["labels"], per_rank=bug == "padding")
                if bug not in ("micro-batches not divided", "micro-batches lost") and not setting.padded:
                    loss = loss / passes
                if bug == "micro-batches lost":
                    loss = loss / passes
                if bug == "loss divided by ranks":
                    loss = loss / dist.get_world_size()
                loss.backward()
        if bug == "all-reduce twice":
            reduce_gradients(plain, op=dist.ReduceOp.SUM)
        if bug == "one all-reduce twice":
            dist.all_reduce(plain.embed.weight.grad)
        if setting.clip:
            nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        if by_hand:
            reduce_gradients(plain)
        optimizer.step()


def _forget(module: Any, args: Any, output: Any) -> None:
    module.seen.zero_()


def fsdp2(setting: Setting, bug: str, folder: str | None) -> None:
    """Train one step with fully_shard."""
    model: Any = build(setting)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if bug == "optimizer before sharding":
        optimizer = make_optimizer(model, setting)
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if bug == "sum instead of mean":
        for module in (model, *model.blocks):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    if bug == "block sums":
        model.blocks[0].set_force_sum_reduction_for_comms(True)
        model.blocks[0].set_gradient_divide_factor(1.0)
    if bug == "no reduce-scatter":
        model.set_requires_gradient_sync(False)
    if bug != "optimizer before sharding":
        factor = 2.0 if bug == "learning rate" else 1.0
        optimizer = make_optimizer(model, setting, decay_all=bug == "weight decay", factor=factor)
    batch = local_batch(setting, strided=setting.seed % 2 == 1)
    with sw.verify(model, step=0, folder=folder):
        loss = mean_loss(setting, run_model(model, batch), batch["labels"], per_rank=bug == "padding")
        if bug == "loss scaled by ranks":
            loss = loss * dist.get_world_size()
        loss.backward()
        if bug == "local clipping norm":
            grads = [p.grad.to_local() for p in model.parameters()]
            norm = torch.stack([g.float().norm() for g in grads]).norm()
            for grad in grads:
                grad.mul_(min(1.0, setting.clip / float(norm)))
        elif setting.clip:
            nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()


def fsdp1(setting: Setting, bug: str, folder: str | None) -> None:
    """Train one step with FullyShardedDataParallel."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(build(setting), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = make_optimizer(model, setting)
    batch = local_batch(setting)
    with sw.verify(model, step=0, folder=folder):
        loss = mean_loss(setting, run_model(model, batch), batch["labels"])
        (loss * dist.get_world_size() if bug == "loss scaled by ranks" else loss).backward()
        optimizer.step()
