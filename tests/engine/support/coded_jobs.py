"""A perceptron in four stages with codecs on its links, under tensor parallelism, with and without faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from parity_jobs import example_of
from torch import nn

from jobs import context_of
from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.engine.parity.float64_step import decide_in_float64
from stagewright.engine.pipeline.link_codec import LinkCodecs, round_trip
from stagewright.engine.tensor import axis
from stagewright.runs.result import ParityReport
from stagewright.spec.plan import Mesh, ModelSpec, Plan

MESH = "tensor=2,pipeline=2"
PLAN = Plan(
    model=ModelSpec(name="coded_jobs:perceptron"), batch=64, microbatches=2, mesh=Mesh.parse(MESH),
    schedule="interleaved", cuts=("0", "1", "2"),
)  # fmt: skip


def perceptron() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Four feed-forward layers without kinks, and a batch of which each sample has the size of a block."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)) for _ in range(4)]
    return nn.Sequential(*blocks), (torch.randn(64, 64),)


def _missing_gradient() -> Any:
    train_step = StepRunner.train_step

    def step(runner: StepRunner, *args: Any, **kwargs: Any) -> Any:
        result = train_step(runner, *args, **kwargs)
        next(iter(runner.part.trainable_parameters().values())).grad = None
        return result

    return patch.object(StepRunner, "train_step", step)


def _swapped_microbatches() -> Any:
    split = StepRunner.split

    def swapped(*args: Any, **kwargs: Any) -> Any:
        first, second = split(*args, **kwargs)
        return [replace(first, inputs=second.inputs), replace(second, inputs=first.inputs)]

    return patch.object(StepRunner, "split", swapped)


def _scaled_gradients(factor: float) -> Any:
    """Scale the gradient of every tensor-parallel region's input."""
    right = axis._CopyToRegion.backward

    def wrong(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return factor * right(ctx, gradient)[0], None

    return patch.object(axis._CopyToRegion, "backward", staticmethod(wrong))


def _scaled_loss(factor: float) -> Any:
    """Scale the weight of every micro-batch."""
    split = StepRunner.split

    def scaled(*args: Any, **kwargs: Any) -> Any:
        return [replace(microbatch, weight=factor * microbatch.weight) for microbatch in split(*args, **kwargs)]

    return patch.object(StepRunner, "split", scaled)


def _encoded_twice() -> Any:
    """Encode the decoded values of every message once more."""
    encode = LinkCodecs.encode

    def twice(self: LinkCodecs, transfer: Any, position: int, values: torch.Tensor) -> torch.Tensor:
        codec = self.codec(transfer, position, values.dtype)
        return encode(self, transfer, position, values if codec is None else round_trip(codec, values))

    return patch.object(LinkCodecs, "encode", twice)


def _other_codecs(change: Callable[[Sequence[str]], Sequence[str]]) -> Any:
    """Give all links of the plan, but not the baseline's, other codecs."""
    create = LinkCodecs.__init__

    def init(self: LinkCodecs, forward: Sequence[str], backward: Sequence[str], **options: Any) -> None:
        create(self, change(forward), change(backward), **options)

    return patch.object(LinkCodecs, "__init__", init)


SPOILS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "missing gradient": _missing_gradient,
    "swapped micro-batches": _swapped_microbatches,
    "gradients +1 %": lambda: _scaled_gradients(1.01),
    "gradients +0.1 %": lambda: _scaled_gradients(1.001),
    "loss +1 %": lambda: _scaled_loss(1.01),
    "loss +0.1 %": lambda: _scaled_loss(1.001),
    "encoded twice": _encoded_twice,
    "wrong crossing": lambda: _other_codecs(lambda names: (*names[1:], names[0])),
    "no codec": lambda: _other_codecs(lambda names: ["none" for _ in names]),
    "wrong bits": lambda: _other_codecs(lambda names: ["none" if name == "none" else "block6" for name in names]),
}


FAILED = ParityReport(
    equal=False, tolerance=1e-5, loss=0.0, outputs=2e-3, gradients=2e-3, buffers=0.0, worst="gradient of x"
)


def check(
    rank: int, codec: str, spoil: str = "nothing", *, mesh: str = MESH, **more: Any
) -> tuple[ParityReport, ParityReport]:
    """Return the report of float32, and that of float64 as if rounding had made float32 fail.

    The middle one of the three links has no codec.
    """
    plan = replace(PLAN, codec=(codec, "none", codec), mesh=Mesh.parse(mesh), **more)
    context = context_of(rank, mesh)
    model = load_model(plan, context)
    graph = capture_for(plan, model)
    baseline = baseline_of(plan, model, graph, context) if rank == 0 else None
    with SPOILS[spoil]():
        report = check_parity(StepRunner(plan, model, context, graph), example_of(model), baseline)
        return report, decide_in_float64(plan, FAILED, context, 0)


def check_all(rank: int, codecs: Sequence[str], spoils: Sequence[str] = ("nothing",), **more: Any) -> list[Any]:
    """Check every codec with every fault; return codec, fault and both reports of each."""
    return [(codec, spoil, *check(rank, codec, spoil, **more)) for codec in codecs for spoil in spoils]
