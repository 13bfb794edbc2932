"""Run one worker's part of a pipeline: its actions in the schedule's order, what it receives, what it sends.

    for each action:   take inputs (a mailbox, or a neighbour stage on this worker) ─► compute ─► send, without waiting

A pipeline of one stage and one micro-batch is plain training; so every strategy goes through here. Outputs are detached
where they leave a stage and become leaves where they arrive: autograd never sees a link. Which values need a gradient
is the same on both sides by construction (``UnitGraph.needs_gradient``); whether one was made, the message itself says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.pipeline.backward import Held, backward_inputs, backward_weights, backward_whole
from stagewright.engine.pipeline.link_codec import LinkCodecs
from stagewright.engine.pipeline.messages import Message, Traffic, channels, traffic
from stagewright.engine.pipeline.recompute import RecomputedForward
from stagewright.engine.pipeline.transport import AHEAD, AHEAD_IN_SCHEDULES, Mailbox, Outbox, TensorShape
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.recorder import recorder
from stagewright.errors import UsageError
from stagewright.graph.stage import Stage
from stagewright.schedules.actions import Action, Actions, Kind, forward_actions, forward_stream, schedule_actions
from stagewright.schedules.catalog import SCHEDULES

__all__ = ["Links", "MicroBatch", "Pipeline", "StepOutcome"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One chunk of a batch, as the first and the last stage need it."""

    inputs: Sequence[Any]
    """The flattened inputs of the model."""
    target: Any
    """What the loss compares the output with."""
    size: int
    """Samples."""
    weight: float
    """Share of the whole (global) batch, for the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What crosses the cuts of a pipeline."""

    shapes: Callable[[int, int], Sequence[TensorShape]]
    """``shapes(cut, batch_size)``: every value that crosses."""
    needs_gradient: Sequence[Sequence[bool]]
    """For each cut and value, whether a gradient travels back."""
    codecs: LinkCodecs | None = None
    """How activations and gradients are written on the links; None: as they are."""
    coded: Sequence[Sequence[bool]] = ()
    """For each cut and value, whether it is an activation that a codec takes."""


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """What one worker knows after a step."""

    loss: torch.Tensor | None = None
    """Sum of the weighted losses; only where the last stage is."""
    outputs: list[Any] = field(default_factory=list)
    """The model's results, one a micro-batch; only where the last stage is and if they were asked for."""
    sent_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes sent by this worker, by cut, both directions."""
    waited_s: float = 0.0
    """Time spent waiting for messages."""


Forward = Callable[[tuple[Any, ...], int], tuple[Any, ...]]


class Pipeline:
    """One worker's stages, and how it runs them."""

    def __init__(
        self,
        stages: dict[int, Stage],
        *,
        stage_workers: tuple[int, ...],
        schedule: str,
        num_microbatches: int,
        links: Links,
        context: WorkerContext,
        unflatten: Callable[[Sequence[Any]], Any],
        loss: Callable[[Any, Any], torch.Tensor],
        forwards: dict[int, Forward] | None = None,
        around: Callable[[Action], AbstractContextManager[Any]] | None = None,
        last_backward: Callable[[int], None] | None = None,
        stage_done: Callable[[int], None] | None = None,
        watch: Callable[[Action, int], None] | None = None,
    ) -> None:
        self.stages = stages
        self.stage_workers = stage_workers
        self.schedule = schedule
        self.num_microbatches = num_microbatches
        self.context = context
        self._links = links
        self._unflatten, self._loss = unflatten, loss
        self._forwards = forwards or {}
        self._around = around or (lambda action: nullcontext())
        self._last_backward = last_backward or (lambda stage: None)
        self._stage_done = stage_done or (lambda stage: None)
        self._watch = watch or (lambda action, size: None)
        self._parameters: dict[int, list[nn.Parameter]] = {
            index: [one for one in stage.parameters() if one.requires_grad] for index, stage in stages.items()
        }
        self.splits_backward = schedule in SCHEDULES and SCHEDULES[schedule].splits_backward
        self._last = len(stage_workers) - 1
        self._own = context.pipeline
        ways = (False, True)
        self._outboxes = {way: Outbox(partial(self._group_to, way), context.torch_device, links.codecs) for way in ways}
        self._opened: set[tuple[int, int, bool]] = set()
        self._warm: set[tuple[bool, int]] = set()
        self._passed: tuple[Actions, Traffic] | None = None

    def train_step(self, batch: Sequence[MicroBatch], *, keep_outputs: bool = False) -> StepOutcome:
        """Forward and backward of every micro-batch; parameters' gradients are added to ``grad``."""
        actions = schedule_actions(self.schedule, self.stage_workers, self.num_microbatches, len(batch))
        own, passing = actions[self._own], self._passing(actions)
        with torch.enable_grad():
            return _Step(self, own, passing, batch, training=True, keep_outputs=keep_outputs).run()

    def evaluate(self, batch: Sequence[MicroBatch], *, with_loss: bool = True) -> StepOutcome:
        """Forward alone, for every schedule and placement; results and loss where the last stage is."""
        actions = forward_actions(self.stage_workers, len(batch))
        own, passing = actions[self._own], self._passing(actions)
        with torch.no_grad():
            return _Step(self, own, passing, batch, training=False, keep_outputs=True, with_loss=with_loss).run()

    def _group_to(self, backward: bool, rank: int) -> Any:
        """The group of messages to a world rank."""
        return self.context.link_group(self.context.rank, rank, backward=backward)

    def _passing(self, actions: Actions) -> Traffic:
        """What passes in such a step; found out once, since most steps are alike."""
        if self._passed is None or self._passed[0] is not actions:
            self._passed = actions, traffic(actions, self.stage_workers, self._own, self._links.needs_gradient)
        return self._passed[1]

    def _is_new(self, training: bool, sizes: Iterable[int]) -> bool:
        """Whether linked GPUs have not yet met micro-batches of such sizes."""
        linked = self.context.torch_device.type != "cpu" and len(set(self.stage_workers)) > 1
        return linked and not {(training, size) for size in sizes} <= self._warm

    def open_links(self, *, backward: bool) -> None:
        """Send one number through each link that was not used yet; every worker of the pipeline must come here.

        NCCL connects two workers when both first use a link, and stands still until then: in the middle of a schedule
        one would wait with a receive for another that waits for it. Here all open the links in one order.
        """
        for sender, receiver, way in channels(self.stage_workers, backward=backward):
            if (sender, receiver, way) in self._opened:
                continue
            self._opened.add((sender, receiver, way))
            if self._own not in (sender, receiver):
                continue
            ranks = self.context.pipeline_ranks
            group = self.context.link_group(ranks[sender], ranks[receiver], backward=way)
            number = torch.zeros(1, device=self.context.torch_device)
            if self._own == sender:
                dist.send(number, dst=ranks[receiver], group=group)
            else:
                dist.recv(number, src=ranks[sender], group=group)

    def stream(self, batches: Iterable[MicroBatch]) -> Iterator[Any]:
        """Inference over a stream, which may have no end: the pipeline is filled once, little is read or sent ahead.

        Every worker must be given the same sizes in the same order; results appear, in order, where the last stage is;
        the other workers yield ``None`` for each micro-batch.
        """
        window = _Window(batches)
        own, workers = self._own, self.stage_workers
        orders = {
            (peer, False): (
                Message(action.stage, action.microbatch, False)
                for action in forward_stream(workers, peer, window.has)
                if action.stage < self._last and workers[action.stage + 1] == own
            )
            for peer in {workers[stage - 1] for stage in self.stages if stage > 0} - {own}
        }
        if window.has(0) and self._is_new(False, [window[0].size]):
            self.evaluate([window[0]], with_loss=False)  # through the host
        # The first receives are posted before any was taken, and wait as those of a short pass do; later ones can come
        # by the time that a place is free for them.
        beginning = self._passing(forward_actions(workers, 2 * len(workers)))
        passing = Traffic(orders, {}, beginning.after)
        step = _Step(self, (), passing, window, training=False, keep_outputs=True, with_loss=False)
        outbox, highest = self._outboxes[False], max(self.stages)
        group = self.context.link_groups[False, True]
        if group is not None:
            _streaming.add(group)
        for action in forward_stream(workers, own, window.has):
            with torch.no_grad():  # not while the caller has its turn
                step.do(action)
                outbox.limit(at_least=2 * len(self.stages))
            if action.stage == highest:
                window.forget(action.microbatch)
                yield step.outcome.outputs.pop() if step.outcome.outputs else None
        step.finish()
        if group is not None:
            _streaming.discard(group)


_streaming: WeakSet[Any] = WeakSet()
"""Groups through which a stream goes, or went when it was left."""


class _Window:
    """The micro-batches of a stream that are under way, by number; the next is read when it is asked for."""

    def __init__(self, batches: Iterable[MicroBatch]) -> None:
        self._source = iter(batches)
        self._held: dict[int, MicroBatch] = {}
        self._read = 0
        self._ended = False

    def has(self, number: int) -> bool:
        """Whether the stream has so many and one more."""
        while self._read <= number and not self._ended:
            one = next(self._source, None)
            if one is None:
                self._ended = True
            else:
                self._held[self._read] = one
                self._read += 1
        return number < self._read

    def __getitem__(self, number: int) -> MicroBatch:
        return self._held[number]

    def forget(self, number: int) -> None:
        """No stage here needs it any more."""
        del self._held[number]


class _Step:
    """One pass over the actions."""

    def __init__(
        self,
        pipeline: Pipeline,
        actions: Sequence[Action],
        passing: Traffic,
        batch: Sequence[MicroBatch] | _Window,
        *,
        training: bool,
        keep_outputs: bool,
        with_loss: bool = True,
    ) -> None:
        if pipeline.context.link_groups[False, True] in _streaming:
            raise UsageError(
                "a stream was left before its end, or has not ended yet, and what is under way in the pipeline belongs "
                "to it: let its batches end instead of leaving the loop"
            )
        self.pipeline, self.batch = pipeline, batch
        self.training, self.keep_outputs, self.with_loss = training, keep_outputs, with_loss
        self.own = pipeline._own
        self.actions = actions
        self.held: dict[tuple[int, int], Held] = {}
        self.local: dict[Message, list[torch.Tensor | None]] = {}
        self.outcome = StepOutcome()
        self.done = 0
        self.left = dict.fromkeys(pipeline.stages, 0)
        for action in self.actions:
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                self.left[action.stage] += 1
        codecs = pipeline._links.codecs
        if codecs is not None:
            codecs.begin(pipeline._links.coded, batch if training and not isinstance(batch, _Window) else None)
        pipeline.open_links(backward=training)
        sizes = [] if isinstance(batch, _Window) else [part.size for part in batch]
        through_host = pipeline._is_new(training, sizes)
        pipeline._warm |= {(training, size) for size in sizes}
        for outbox in pipeline._outboxes.values():
            outbox.through_host = through_host
        self.taken = passing.taken
        ranks = pipeline.context.pipeline_ranks
        on_cpu = pipeline.context.torch_device.type == "cpu"
        self.mailboxes = {
            (peer, backward): Mailbox(
                pipeline.context.link_group(ranks[peer], pipeline.context.rank, backward=backward),
                ranks[peer],
                iter(order),
                self.shapes,
                pipeline.context.torch_device,
                codecs=codecs,
                through_host=through_host,
                after=passing.after,
                ahead=AHEAD_IN_SCHEDULES if training and on_cpu else AHEAD,
            )
            for (peer, backward), order in passing.orders.items()
        }

    def run(self) -> StepOutcome:
        """Do every action, then wait until all that was sent has left."""
        for action in self.actions:
            self.do(action)
        return self.finish()

    def finish(self) -> StepOutcome:
        recorder.stage = recorder.microbatch = None
        for outbox in self.pipeline._outboxes.values():
            outbox.flush()
            for edge, sent in outbox.take_bytes().items():
                self.outcome.sent_bytes[edge] = self.outcome.sent_bytes.get(edge, 0) + sent
        if self.pipeline._links.codecs is not None:
            self.pipeline._links.codecs.finish()
        self.outcome.waited_s = sum(mailbox.waited_s for mailbox in self.mailboxes.values())
        return self.outcome

    def do(self, action: Action) -> None:
        pipeline = self.pipeline
        recorder.stage, recorder.microbatch = action.stage, action.microbatch
        pipeline._watch(action, self.batch[action.microbatch].size)
        if action.kind is Kind.BACKWARD and self.left[action.stage] == 1:
            pipeline._last_backward(action.stage)
        with pipeline._around(action):
            if action.kind is Kind.FORWARD:
                self.forward(action)
            elif action.kind is Kind.BACKWARD_WEIGHT:
                held = self.held.pop((action.stage, action.microbatch))
                start = recorder.now()
                backward_weights(held, pipeline._parameters[action.stage])
                recorder.add("backward-weight", start)
            else:
                self.backward(action)
        self.done += 1
        for mailbox in self.mailboxes.values():
            mailbox.advance(self.done)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self.left[action.stage] -= 1
            if not self.left[action.stage]:
                pipeline._stage_done(action.stage)

    def forward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        pipeline, microbatch = self.pipeline, self.batch[number]
        module = pipeline.stages[stage]
        leaves: list[torch.Tensor] = []
        values: Sequence[Any] = microbatch.inputs
        if stage > 0:
            received = self.take(Message(stage - 1, number, False), pipeline.stage_workers[stage - 1])
            if self.training:
                for value, needed in zip(received, pipeline._links.needs_gradient[stage - 1], strict=True):
                    if needed:
                        assert value is not None  # only a gradient can be
                        leaves.append(value.requires_grad_())
            values = received
        start = recorder.now()
        run = pipeline._forwards.get(stage)
        outputs = run(tuple(values), number) if run is not None and self.training else module(*values)
        recorder.add("forward", start)
        forgotten = isinstance(run, RecomputedForward) and run.forgets
        if stage == pipeline._last:
            self.conclude(action, outputs, leaves, forgotten)
            return
        if self.training:
            wanted = pipeline._links.needs_gradient[stage]
            roots = [value for value, one in zip(outputs, wanted, strict=True) if one]
            self.held[stage, number] = Held(leaves, [self.root(value) for value in roots], forgotten=forgotten)
        self.give(Message(stage, number, False), outputs, pipeline.stage_workers[stage + 1])

    def root(self, value: torch.Tensor) -> torch.Tensor | None:
        """A value from which gradients flow; where backward is split, a copy of it.

        The split backward detaches its roots in place: not a view, not an input that is passed on, not a value that the
        stage itself goes on to use.
        """
        if not value.requires_grad:
            return None
        return value.clone() if self.pipeline.splits_backward else value

    def conclude(self, action: Action, outputs: tuple[Any, ...], leaves: list[torch.Tensor], forgotten: bool) -> None:
        """The last stage: the model's results and the loss."""
        pipeline, microbatch = self.pipeline, self.batch[action.microbatch]
        result = pipeline._unflatten(outputs)
        if self.with_loss:
            start = recorder.now()
            loss = pipeline._loss(result, microbatch.target) * microbatch.weight
            recorder.add("forward", start, note="loss")
            total = loss.detach()
            self.outcome.loss = total if self.outcome.loss is None else self.outcome.loss + total
            if self.training:
                roots = [loss if loss.requires_grad else None]
                self.held[action.stage, action.microbatch] = Held(leaves, roots, forgotten=forgotten)
        if self.keep_outputs:
            self.outcome.outputs.append(result)

    def backward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        pipeline = self.pipeline
        held = self.held[stage, number]
        gradients: list[torch.Tensor | None] = []
        if stage == pipeline._last:
            gradients = [None if loss is None else torch.ones_like(loss) for loss in held.outputs]
        elif any(pipeline._links.needs_gradient[stage]):
            gradients = self.take(Message(stage, number, True), pipeline.stage_workers[stage + 1])
        whole = action.kind is Kind.BACKWARD
        start = recorder.now()
        if whole:
            found = backward_whole(held, gradients)
            recorder.add("backward", start)
            del self.held[stage, number]
        elif held.forgotten and held.inputs:  # it runs again once: for its weights too, and nothing is held until then
            found = backward_whole(held, gradients)
            held.outputs, held.inputs = [], []
            recorder.add("backward-input", start, note="whole")
        else:
            found = backward_inputs(held, gradients, pipeline._parameters[stage])
            recorder.add("backward-input", start)
        if stage > 0 and any(pipeline._links.needs_gradient[stage - 1]):
            self.give(Message(stage - 1, number, True), found, pipeline.stage_workers[stage - 1])

    def take(self, message: Message, worker: int) -> list[torch.Tensor | None]:
        """What a neighbour stage gave: from this worker's own hands, or from a mailbox."""
        if worker == self.own:
            return self.local.pop(message)
        before = activity.turn("receive gradient" if message.backward else "receive activation")
        received = self.mailboxes[worker, message.backward].take(message)
        for gone in self.taken.get(message, ()):
            self.pipeline._outboxes[gone.backward].let_go((gone,))
        activity.turn(before)
        return received

    def give(self, message: Message, tensors: Sequence[torch.Tensor | None], worker: int) -> None:
        """Hand values to a neighbour stage."""
        if worker == self.own:
            self.local[message] = [None if tensor is None else tensor.detach() for tensor in tensors]
        else:
            rank = self.pipeline.context.pipeline_ranks[worker]
            self.pipeline._outboxes[message.backward].send(message, tensors, rank, self.shapes)

    def shapes(self, message: Message) -> Sequence[TensorShape]:
        """What a message holds: every value forward, those that need a gradient backward."""
        links = self.pipeline._links
        every = links.shapes(message.edge, self.batch[message.microbatch].size)
        if not message.backward:
            return every
        return [shape for shape, needed in zip(every, links.needs_gradient[message.edge], strict=True) if needed]
