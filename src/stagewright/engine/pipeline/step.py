"""One pass over a worker's actions: receive inputs, compute, send outputs without waiting.

    for each action:   inputs (received, or from a stage on this worker) ─► compute ─► send

Outputs are detached when they leave a stage and become leaves when they arrive: autograd never sees a link. Both sides
agree by construction on which tensors need a gradient (``UnitGraph.needs_gradient``); the transfer itself says whether
there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from stagewright import structure
from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.pipeline.activation_checkpointing import CheckpointedForward
from stagewright.engine.pipeline.backward import BackwardState, run_backward, run_input_backward, run_weight_backward
from stagewright.engine.pipeline.config import PipelineConfig, PipelineHooks, PipelineResult
from stagewright.engine.pipeline.cuda_graphs import GraphedForward
from stagewright.engine.pipeline.links import TensorShape
from stagewright.engine.pipeline.transfers import ReceivePlan, Transfer
from stagewright.engine.pipeline.transport import AHEAD, AHEAD_IN_SCHEDULES, Receiver, Sender
from stagewright.engine.pipeline.unit_checkpointing import has_checkpointed_units
from stagewright.engine.tensor.divided_logits import gather_logits
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.recorder import recorder
from stagewright.graph.stage import Stage
from stagewright.schedules.action_order import Action, Kind


class MicroBatches(Protocol):
    """Micro-batches by number: a list, or a window on a stream."""

    def __getitem__(self, number: int, /) -> MicroBatch: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStages:
    """The stages of one worker and what it needs to run them."""

    stages: Mapping[int, Stage]
    parameters: Mapping[int, list[nn.Parameter]]
    """The trainable parameters of each stage."""
    config: PipelineConfig
    context: WorkerContext
    hooks: PipelineHooks
    senders: Mapping[bool, Sender]
    """The senders of activations (key False) and gradients (True)."""


class PipelineStep:
    """One pass of a worker over its actions."""

    def __init__(
        self,
        worker: WorkerStages,
        batch: MicroBatches,
        actions: Sequence[Action],
        receives: ReceivePlan,
        *,
        training: bool,
        keep_outputs: bool,
        with_loss: bool,
        through_host: bool,
    ) -> None:
        self.config, self.hooks, self.context = worker.config, worker.hooks, worker.context
        self.worker, self.batch, self.actions = worker, batch, actions
        self.training, self.keep_outputs, self.with_loss = training, keep_outputs, with_loss
        self.split_backwards: set[tuple[int, int]] = set()
        if not self.config.whole_backward:
            inputs = (action for action in actions if action.kind is Kind.BACKWARD_INPUT)
            self.split_backwards = {(action.stage, action.microbatch) for action in inputs}
        self.last_stage = len(self.config.stage_workers) - 1
        self.backward_states: dict[tuple[int, int], BackwardState] = {}
        self.local_tensors: dict[Transfer, list[torch.Tensor | None]] = {}
        self.result = PipelineResult()
        self.num_done = 0
        self.backwards_left = dict.fromkeys(worker.stages, 0)
        for action in actions:
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                self.backwards_left[action.stage] += 1
        self.acknowledges = receives.acknowledges
        for sender in worker.senders.values():
            sender.through_host = through_host
        ranks, device = self.context.pipeline_ranks, self.context.torch_device
        self.receivers = {
            (peer, backward): Receiver(
                self.context.link_group(ranks[peer], self.context.rank, backward=backward),
                ranks[peer],
                iter(order),
                self.shapes_of,
                device,
                codecs=self.config.codecs,
                through_host=through_host,
                after=receives.after,
                ahead=AHEAD_IN_SCHEDULES if training and device.type == "cpu" else AHEAD,
            )
            for (peer, backward), order in receives.orders.items()
        }

    def run(self) -> PipelineResult:
        """Run every action, then wait until everything is sent."""
        for action in self.actions:
            self.run_action(action)
        return self.finish()

    def finish(self) -> PipelineResult:
        """Wait until everything is sent, and return the result."""
        recorder.stage = recorder.microbatch = None
        for sender in self.worker.senders.values():
            sender.flush()
            self.result.sent_bytes.update(sender.take_sent_bytes())
        if self.config.codecs is not None:
            self.config.codecs.finish()
        self.result.waited_s = sum(receiver.waited_s for receiver in self.receivers.values())
        return self.result

    def run_action(self, action: Action) -> None:
        """Run one action, and post the receives that it makes possible."""
        recorder.stage, recorder.microbatch = action.stage, action.microbatch
        microbatch = self.batch[action.microbatch]
        self.worker.stages[action.stage].variant = microbatch.variant
        self.hooks.on_action(action, microbatch.size)
        if action.kind is Kind.BACKWARD and self.backwards_left[action.stage] == 1:
            self.hooks.on_last_backward(action.stage)
        with self.hooks.action_context(action):
            if action.kind is Kind.FORWARD:
                self._forward(action)
            elif action.kind is Kind.BACKWARD_WEIGHT:
                state = self.backward_states.pop((action.stage, action.microbatch))
                start = recorder.now()
                run_weight_backward(state, self._trained_parameters(action.stage))
                recorder.add("backward-weight", start)
            else:
                self._backward(action)
        self.num_done += 1
        for receiver in self.receivers.values():
            receiver.advance(self.num_done)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self.backwards_left[action.stage] -= 1
            if not self.backwards_left[action.stage]:
                self.hooks.on_stage_done(action.stage)

    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        links, workers, variant = self.config.links, self.config.stage_workers, self.batch[number].variant
        leaves: list[torch.Tensor] = []
        inputs: Sequence[Any] = self.batch[number].inputs
        if stage > 0:
            received = self._receive(Transfer(stage - 1, number, False), workers[stage - 1])
            if self.training:
                for value, needed in zip(received, links.gradients(stage - 1, variant), strict=True):
                    if needed:
                        assert value is not None, "only a gradient can be missing"
                        leaves.append(value.requires_grad_())
            inputs = received
        start = recorder.now()
        forward = (self.hooks.forwards if self.training else self.hooks.inference_forwards).get(stage)
        with self.config.autocast():
            outputs = self.worker.stages[stage](*inputs) if forward is None else forward(tuple(inputs), number)
        recorder.add("forward", start)
        state = BackwardState(leaves, [], is_recomputed=has_checkpointed_units(self.worker.stages[stage]))
        state.is_recomputed |= isinstance(forward, CheckpointedForward) and forward.will_recompute
        state.replayed = forward.replayed if isinstance(forward, GraphedForward) else None
        if stage == self.last_stage:
            self._compute_loss(action, outputs, state)
            return
        outputs = gather_logits(outputs)
        if self.training:
            pairs = zip(outputs, links.gradients(stage, variant), strict=True)
            is_split = (stage, number) in self.split_backwards
            state.outputs = [_make_root(value, is_split=is_split) for value, needed in pairs if needed]
            self.backward_states[stage, number] = state
        self._send(Transfer(stage, number, False), outputs, workers[stage + 1])

    def _compute_loss(self, action: Action, outputs: tuple[Any, ...], state: BackwardState) -> None:
        """Compute the model's output and the loss after the last stage."""
        microbatch = self.batch[action.microbatch]
        output = self.config.unflatten(outputs)
        if self.keep_outputs and not self.training:
            output = gather_logits(output)
        if self.with_loss:
            start = recorder.now()
            with self.config.autocast():
                loss = self.config.loss(output, microbatch.target) * microbatch.weight
            recorder.add("forward", start, note="loss")
            total = loss.detach()
            self.result.loss = total if self.result.loss is None else self.result.loss + total
            if self.training:
                state.outputs = [loss if loss.requires_grad else None]
                self.backward_states[action.stage, action.microbatch] = state
        if self.keep_outputs:
            output = gather_logits(output)
            if state.replayed is not None:  # a later micro-batch overwrites it
                output = structure.map_tensors(lambda tensor: tensor.detach().clone(), output)
            self.result.outputs.append(output)

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        needs_gradient, workers = self.config.links.needs_gradient, self.config.stage_workers
        state = self.backward_states[stage, number]
        gradients: list[torch.Tensor | None] = []
        if stage == self.last_stage:
            scale = self.config.loss_scale()
            gradients = [None if loss is None else torch.full_like(loss, scale) for loss in state.outputs]
        elif any(needs_gradient[stage]):
            gradients = self._receive(Transfer(stage, number, True), workers[stage + 1])
        start = recorder.now()
        if action.kind is Kind.BACKWARD:
            input_gradients = run_backward(state, gradients)
            recorder.add("backward", start)
            del self.backward_states[stage, number]
        elif (state.is_recomputed or self.config.whole_backward) and state.inputs:
            # Recompute once, for the weights too, and hold nothing until then; a compiled graph has one backward.
            input_gradients = run_backward(state, gradients)
            state.outputs, state.inputs = [], []
            recorder.add("backward-input", start, note="whole")
        else:
            input_gradients = run_input_backward(state, gradients, self._trained_parameters(stage))
            recorder.add("backward-input", start)
        if stage > 0 and any(needs_gradient[stage - 1]):
            self._send(Transfer(stage - 1, number, True), input_gradients, workers[stage - 1])

    def _trained_parameters(self, stage: int) -> Sequence[nn.Parameter]:
        parameters = self.hooks.trained_parameters(stage)
        return self.worker.parameters[stage] if parameters is None else parameters

    def _receive(self, transfer: Transfer, worker: int) -> list[torch.Tensor | None]:
        """Return the tensors of a neighboring stage, on this worker or another."""
        if worker == self.context.pipeline:
            return self.local_tensors.pop(transfer)
        before = activity.switch("receive gradient" if transfer.backward else "receive activation")
        received = self.receivers[worker, transfer.backward].receive(transfer)
        for sent in self.acknowledges.get(transfer, ()):
            self.worker.senders[sent.backward].release((sent,))
        activity.switch(before)
        return received

    def _send(self, transfer: Transfer, tensors: Sequence[torch.Tensor | None], worker: int) -> None:
        """Pass tensors to a neighboring stage."""
        if worker == self.context.pipeline:
            self.local_tensors[transfer] = [None if tensor is None else tensor.detach() for tensor in tensors]
        else:
            ranks = self.context.mesh.receivers(self.context.rank, worker)
            self.worker.senders[transfer.backward].send(transfer, tensors, ranks, self.shapes_of)

    def shapes_of(self, transfer: Transfer) -> Sequence[TensorShape]:
        """Return the tensors of a transfer: all that cross in forward, those that need a gradient in backward."""
        links, microbatch = self.config.links, self.batch[transfer.microbatch]
        shapes = links.shapes(transfer.cut, microbatch.size)
        if not transfer.backward:
            return shapes
        needs_gradient = links.gradients(transfer.cut, microbatch.variant)
        return [shape for shape, needed in zip(shapes, needs_gradient, strict=True) if needed]


def _make_root(output: torch.Tensor, *, is_split: bool) -> torch.Tensor | None:
    """Return the tensor from which backward starts; a copy of the output if backward is split.

    The split backward detaches its roots in place, so a root must not be a view, an input that is passed on, or a
    tensor that the stage itself uses further.
    """
    if not output.requires_grad:
        return None
    return output.clone() if is_split else output
