"""Training scripts with tensor parallelism: DTensor's parallel styles, and column and row shards written by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from model import Setting, build, loss_of, make_batch, make_optimizer, run_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import stagewright as sw


def dtensor(setting: Setting, bug: str, folder: str | None) -> None:
    """Train one step with DTensor: column- and row-wise MLPs, vocabulary-parallel embedding and head."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = build(setting)
    styles: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for index in range(2):
        reduced = Partial() if bug == "no all-reduce" and index == 1 else Replicate()
        styles[f"blocks.{index}.mlp.fc1"] = ColwiseParallel()
        styles[f"blocks.{index}.mlp.fc2"] = RowwiseParallel(output_layouts=reduced)
        if bug == "fused projection" and index == 0:
            styles[f"blocks.{index}.attn.qkv"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, styles)
    if bug == "fused projection":  # shards of q, k and v, gathered as if the weight had been split as one
        weight = model.blocks[0].attn.qkv.weight
        whole = build(setting).blocks[0].attn.qkv.weight.detach()
        chunks = [part.chunk(2)[dist.get_rank()] for part in whole.chunk(3)]
        weight.to_local().data.copy_(torch.cat(chunks))
    optimizer = make_optimizer(model, setting)
    batch = make_batch(setting)
    if bug == "dropout seed":
        torch.manual_seed(dist.get_rank())
    else:
        torch.manual_seed(setting.seed + 7)
    with sw.verify(model, step=0, folder=folder):
        output = run_model(model, batch)
        (loss_of(output, batch["labels"]) * (2 if bug == "loss scaled by ranks" else 1)).backward()
        optimizer.step()


def sequence(setting: Setting, bug: str, folder: str | None) -> None:
    """Train one step with sequence-parallel norms around tensor-parallel MLPs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = build(setting)
    for block in model.blocks:
        styles: dict[str, Any] = {
            "norm2": SequenceParallel(),
            "mlp.fc1": ColwiseParallel(input_layouts=Shard(1)),
            "mlp.fc2": RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(block, mesh, styles)
        split_before(block.norm2)
    optimizer = make_optimizer(model, setting)
    batch = make_batch(setting)
    torch.manual_seed(setting.seed + 7)
    with sw.verify(model, step=0, folder=folder):
        loss_of(run_model(model, batch), batch["labels"]).backward()
        optimizer.step()


def split_before(norm: nn.Module) -> None:
    """Give a sequence-parallel norm this rank's part of the sequence."""

    def split(module: nn.Module, args: Any) -> Any:
        return (_Split.apply(args[0], 1),)

    norm.register_forward_pre_hook(split, prepend=True)


class _Split(torch.autograd.Function):
    """Forward: this rank's part of a dimension. Backward: gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts, ctx.dim), None


class _Copy(torch.autograd.Function):
    """Forward: identity. Backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


class _Reduce(torch.autograd.Function):
    """Forward: all-reduce. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class ColumnLinear(nn.Module):
    """Holds some output features of a linear layer."""

    def __init__(
        self, whole: nn.Linear, blocks: int = 1, *, swapped: bool = False, reduce_backward: bool = True
    ) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.reduce_backward = reduce_backward

        def take(value: torch.Tensor) -> nn.Parameter:
            parts = [part.chunk(world)[world - 1 - rank if swapped else rank] for part in value.detach().chunk(blocks)]
            return nn.Parameter(torch.cat(parts).clone())

        self.weight, self.bias = take(whole.weight), take(whole.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(_Copy.apply(x) if self.reduce_backward else x, self.weight, self.bias)


class RowLinear(nn.Module):
    """Holds some input features of a linear layer."""

    def __init__(self, whole: nn.Linear, *, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.weight = nn.Parameter(whole.weight.detach().chunk(dist.get_world_size(), 1)[dist.get_rank()].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bug == "bias on every rank":
            return _Reduce.apply(nn.functional.linear(x, self.weight, self.bias))
        x = nn.functional.linear(x, self.weight)
        if self.bug == "all-reduce twice":
            x = _Reduce.apply(x)
        return (x if self.bug == "no all-reduce" else _Reduce.apply(x)) + self.bias


def megatron(setting: Setting, bug: str, folder: str | None) -> None:
    """Train one step with column and row shards by hand, as Megatron does."""
    model: Any = build(setting)
    for index, block in enumerate(model.blocks):
        wrong = bug if index == 1 else ""
        block.attn.qkv = ColumnLinear(block.attn.qkv, 1 if wrong == "fused projection" else 3)
        block.attn.heads //= dist.get_world_size()
        block.attn.out = RowLinear(block.attn.out, bug=wrong if wrong == "all-reduce twice" else "")
        block.mlp.fc1 = ColumnLinear(
            block.mlp.fc1, swapped=wrong == "swapped shards", reduce_backward=wrong != "no backward all-reduce"
        )
        block.mlp.fc2 = RowLinear(block.mlp.fc2, bug="" if wrong == "all-reduce twice" else wrong)
    optimizer = make_optimizer(model, setting)
    batch = make_batch(setting)
    options: dict[str, Any] = {"offset": 1} if bug == "positions shifted" and dist.get_rank() == 1 else {}
    torch.manual_seed(dist.get_rank() if bug == "dropout seed" else setting.seed + 7)
    shards = {"*.qkv": "column:3", "*.fc1": "column", "*.out": "row", "*.fc2": "row"}
    with sw.verify(model, step=0, folder=folder, shards=shards):
        loss_of(run_model(model, batch, **options), batch["labels"]).backward()
        if bug == "sharded gradients averaged":
            for block in model.blocks:
                block.mlp.fc1.weight.grad /= dist.get_world_size()
        optimizer.step()
