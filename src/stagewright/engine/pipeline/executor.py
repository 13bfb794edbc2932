"""Run one worker's stages of a pipeline: training steps, evaluation, and inference over a stream.

A pipeline of one stage and one micro-batch is plain training, so every strategy uses this executor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.pipeline.config import PipelineConfig, PipelineHooks, PipelineResult
from stagewright.engine.pipeline.step import PipelineStep, WorkerStages
from stagewright.engine.pipeline.transfers import ReceivePlan, Transfer, link_directions, plan_receives
from stagewright.engine.pipeline.transport import Sender
from stagewright.engine.worker.context import WorkerContext
from stagewright.errors import UsageError
from stagewright.graph.stage import Stage
from stagewright.schedules.action_order import Actions, forward_actions, forward_stream, schedule_actions

_streaming: WeakSet[Any] = WeakSet()
"""Process groups of streams that have not ended."""


class PipelineExecutor:
    """Runs the stages of one worker."""

    def __init__(
        self,
        stages: dict[int, Stage],
        config: PipelineConfig,
        context: WorkerContext,
        hooks: PipelineHooks | None = None,
    ) -> None:
        self.stages, self.config, self.context = stages, config, context
        self._worker = WorkerStages(
            stages=stages,
            parameters={
                index: [parameter for parameter in stage.parameters() if parameter.requires_grad]
                for index, stage in stages.items()
            },
            config=config,
            context=context,
            hooks=hooks or PipelineHooks(),
            senders={
                backward: Sender(
                    partial(context.link_group, context.rank, backward=backward), context.torch_device, config.codecs
                )
                for backward in (False, True)
            },
        )
        self._opened: set[tuple[int, int, bool]] = set()
        self._seen_sizes: set[tuple[bool, tuple[int, int]]] = set()
        self._cached_receives: tuple[Actions, ReceivePlan] | None = None

    def train_step(self, batch: Sequence[MicroBatch], *, keep_outputs: bool = False) -> PipelineResult:
        """Run forward and backward of every micro-batch; accumulate the parameters' gradients in ``grad``."""
        config = self.config
        # A caller may give more micro-batches than the plan has: some schedules need a multiple of that number.
        num_scheduled = config.num_microbatches * max(1, -(-len(batch) // config.num_microbatches))
        actions = schedule_actions(
            config.schedule, config.stage_workers, num_scheduled, len(batch), searched=config.actions
        )
        with torch.enable_grad():
            return self._make_step(batch, actions, training=True, keep_outputs=keep_outputs).run()

    def evaluate(self, batch: Sequence[MicroBatch], *, with_loss: bool = True) -> PipelineResult:
        """Run forward only, for every schedule and placement; the last stage's worker has outputs and loss."""
        actions = forward_actions(self.config.stage_workers, len(batch))
        with torch.no_grad():
            return self._make_step(batch, actions, with_loss=with_loss).run()

    def stream(self, batches: Iterable[MicroBatch]) -> Iterator[Any]:
        """Run inference over a stream, which may be endless: the pipeline fills once, little is read or sent ahead.

        Every worker must get the same sizes in the same order. The last stage's worker yields the outputs in order, the
        others yield ``None`` for each micro-batch.
        """
        window = _StreamWindow(batches)
        pipeline_rank, workers = self.context.pipeline, self.config.stage_workers
        last_stage = len(workers) - 1
        orders = {
            (peer, False): (
                Transfer(action.stage, action.microbatch, False)
                for action in forward_stream(workers, peer, window.has)
                if action.stage < last_stage and workers[action.stage + 1] == pipeline_rank
            )
            for peer in {workers[stage - 1] for stage in self.stages if stage > 0} - {pipeline_rank}
        }
        if window.has(0) and self._needs_host_transport(False, [window[0].size]):
            self.evaluate([window[0]], with_loss=False)
        # The first receives are posted before any was received and wait like those of a short pass; the peer can send
        # later ones by the time there is a free slot for them.
        start = self._plan_receives(forward_actions(workers, 2 * len(workers)))
        receives = ReceivePlan(orders, {}, start.after)
        step = self._make_step(window, receives=receives, with_loss=False)
        sender, highest_stage = self._worker.senders[False], max(self.stages)
        group = self.context.link_groups[False, True]
        if group is not None:
            _streaming.add(group)
        for action in forward_stream(workers, pipeline_rank, window.has):
            with torch.no_grad():  # not while the caller runs
                step.run_action(action)
                sender.limit_in_flight(min_transfers=2 * len(self.stages))
            if action.stage == highest_stage:
                window.drop(action.microbatch)
                yield step.result.outputs.pop() if step.result.outputs else None
        step.finish()
        if group is not None:
            _streaming.discard(group)

    def open_links(self, *, backward: bool) -> None:
        """Send one number over each link that was not used yet; every worker of the pipeline must call this.

        NCCL connects two workers when both first use a link, and blocks until then. In the middle of a schedule that
        deadlocks: one worker waits in a receive for another that waits for it. Here all open the links in one order.
        """
        for sender, receiver, is_backward in link_directions(self.config.stage_workers, backward=backward):
            if (sender, receiver, is_backward) in self._opened:
                continue
            self._opened.add((sender, receiver, is_backward))
            if self.context.pipeline not in (sender, receiver):
                continue
            rank, mesh = self.context.rank, self.context.mesh
            number = torch.zeros(1, device=self.context.torch_device)
            if self.context.pipeline == sender:
                for peer in mesh.receivers(rank, receiver):
                    dist.send(number, dst=peer, group=self.context.link_group(rank, peer, backward=is_backward))
            else:
                peer = mesh.sender(rank, sender)
                dist.recv(number, src=peer, group=self.context.link_group(peer, rank, backward=is_backward))

    def _make_step(
        self,
        batch: Sequence[MicroBatch] | _StreamWindow,
        actions: Actions = (),
        *,
        receives: ReceivePlan | None = None,
        training: bool = False,
        keep_outputs: bool = True,
        with_loss: bool = True,
    ) -> PipelineStep:
        """Set up a pass over this worker's actions; a stream passes its receives, and runs actions as they come."""
        if self.context.link_groups[False, True] in _streaming:
            raise UsageError(
                "a stream was left before its end, or has not ended yet, and its micro-batches are still in the "
                "pipeline: let its batches end instead of leaving the loop"
            )
        microbatches = None if isinstance(batch, _StreamWindow) else batch
        if self.config.codecs is not None:
            self.config.codecs.begin(self.config.links.needs_gradient, microbatches if training else None)
        self.open_links(backward=training)
        sizes = [microbatch.size for microbatch in microbatches or ()]
        through_host = self._needs_host_transport(training, sizes)
        self._seen_sizes |= {(training, size) for size in sizes}
        return PipelineStep(
            self._worker,
            batch,
            actions[self.context.pipeline] if actions else (),
            receives or self._plan_receives(actions),
            training=training,
            keep_outputs=keep_outputs,
            with_loss=with_loss,
            through_host=through_host,
        )

    def _plan_receives(self, actions: Actions) -> ReceivePlan:
        """Plan the receives of a step; cached, because most steps are alike."""
        if self._cached_receives is None or self._cached_receives[0] is not actions:
            config = self.config
            receives = plan_receives(actions, config.stage_workers, self.context.pipeline, config.links.needs_gradient)
            self._cached_receives = actions, receives
        return self._cached_receives[1]

    def _needs_host_transport(self, training: bool, sizes: Iterable[tuple[int, int]]) -> bool:
        """Return whether GPUs that NCCL links run micro-batches of these sizes for the first time."""
        is_linked = self.context.uses_nccl and len(set(self.config.stage_workers)) > 1
        return is_linked and not {(training, size) for size in sizes} <= self._seen_sizes


class _StreamWindow:
    """The micro-batches of a stream that are in flight, by number; the next is read on demand."""

    def __init__(self, batches: Iterable[MicroBatch]) -> None:
        self._source = iter(batches)
        self._in_flight: dict[int, MicroBatch] = {}
        self._num_read = 0
        self._ended = False

    def has(self, number: int) -> bool:
        """Return whether the stream has a micro-batch of this number."""
        while self._num_read <= number and not self._ended:
            microbatch = next(self._source, None)
            if microbatch is None:
                self._ended = True
            else:
                self._in_flight[self._num_read] = microbatch
                self._num_read += 1
        return number < self._num_read

    def __getitem__(self, number: int) -> MicroBatch:
        return self._in_flight[number]

    def drop(self, number: int) -> None:
        """Free a micro-batch that no stage of this worker needs any more."""
        del self._in_flight[number]
