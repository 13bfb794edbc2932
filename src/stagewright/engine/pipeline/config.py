"""What a pipeline executor is given and what it returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from stagewright.engine.pipeline.link_codec import LinkCodecs
from stagewright.engine.pipeline.links import Links
from stagewright.schedules.action_order import Action

StageForward: TypeAlias = Callable[[tuple[Any, ...], int], tuple[Any, ...]]
"""``forward(inputs, microbatch)``: the outputs of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """A pipeline as all of its workers know it."""

    stage_workers: tuple[int, ...]
    """The pipeline rank of each stage's worker."""
    schedule: str
    actions: tuple[str, ...] = ()
    """The actions of each worker under schedule "searched", as text."""
    num_microbatches: int
    """Micro-batches of a full batch."""
    links: Links
    codecs: LinkCodecs | None = None
    """The codecs of the links; None if all tensors are sent unchanged."""
    unflatten: Callable[[Sequence[Any]], Any]
    """Builds the model's output from the outputs of the last stage."""
    loss: Callable[[Any, Any], torch.Tensor]
    """``loss(output, target)``: the mean over the samples of a micro-batch."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of every forward and loss."""
    loss_scale: Callable[[], float] = lambda: 1.0
    """The factor of all gradients in this step (loss scaling)."""
    whole_backward: bool = False
    """Whether B of a split backward computes the weight gradients too, because stages are compiled or CUDA
    graphs."""


class PipelineHooks:
    """Callbacks of an executor; the defaults do nothing. Subclass it to observe or change how stages run."""

    forwards: Mapping[int, StageForward] = {}
    """Replaces the forward of these stages in training."""
    inference_forwards: Mapping[int, StageForward] = {}
    """Replaces the forward of these stages in inference."""

    def on_action(self, action: Action, size: tuple[int, int]) -> None:
        """Run before each action."""

    def action_context(self, action: Action) -> AbstractContextManager[Any]:
        """Return a context to run an action in."""
        return nullcontext()

    def trained_parameters(self, stage: int) -> Sequence[nn.Parameter] | None:
        """Return the trainable parameters of a stage during a step; None: those that it always has."""
        return None

    def on_last_backward(self, stage: int) -> None:
        """Run before the last unsplit backward of a stage in a step."""

    def on_stage_done(self, stage: int) -> None:
        """Run when a stage has finished its backward of all micro-batches."""


@dataclass(slots=True, kw_only=True)
class PipelineResult:
    """What one worker has after a step."""

    loss: torch.Tensor | None = None
    """Sum of the weighted losses; only on the worker of the last stage."""
    outputs: list[Any] = field(default_factory=list)
    """The model's outputs, one per micro-batch; only on the worker of the last stage and only on request."""
    sent_bytes: Counter[int] = field(default_factory=Counter)
    """Bytes sent by this worker, by cut, both directions."""
    waited_s: float = 0.0
