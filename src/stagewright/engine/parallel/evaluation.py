"""Evaluation during training: the same cuts of the model captured in eval mode, over the same parameters.

Train and eval mode are baked into the glue between units, so a stage captured for training can't be used. A second set
of stages calls the same modules with batch norm and dropout in eval mode. Forward alone has one order for every
schedule and placement. With FSDP2, the evaluation stage runs inside the training stage, which gathers the parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.batch.splitter import ReplicaShare
from stagewright.engine.data.fsdp_step import StepFSDPReplica
from stagewright.engine.parallel.model import cut_indices
from stagewright.engine.parallel.shape_variants import ShapeVariants
from stagewright.engine.parallel.step_runner import ActivityHooks, StepRunner
from stagewright.engine.pipeline.executor import PipelineExecutor
from stagewright.graph.stage import Stage
from stagewright.graph.unit_graph import UnitGraph
from stagewright.zoo.model import Batch

_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of one batch in eval mode."""

    loss: float
    """Loss of the whole batch, the same on every worker."""
    outputs: list[Any] = field(default_factory=list)
    """The model's outputs, one per micro-batch of this replica; only on the worker of the last stage."""
    targets: list[Any] = field(default_factory=list)
    """The targets of these outputs; only on the worker of the last stage."""
    num_samples: int
    """Samples of the whole batch."""


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Set eval mode inside the block, and restore the mode of every submodule afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


class Evaluator:
    """The stages of a worker in eval mode."""

    def __init__(self, runner: StepRunner, graph: UnitGraph) -> None:
        self._runner, self._graph = runner, graph
        plan, part = runner.plan, runner.part
        cuts = cut_indices(graph, plan.cuts)
        with in_eval_mode(runner.model.module):  # stages have the mode that the model has now
            all_stages = graph.stages(cuts)
        stages = {index: all_stages[index] for index in part.stages}
        for stage in stages.values():
            part.divide_sequences(stage)
        self._variants = ShapeVariants(
            graph, cuts, part.variants.hollow, lists=part.variants.lists, has_codecs=plan.has_codecs
        )
        self._variants.follow(stages, part.divide_sequences)
        if plan.shard and plan.mesh.data > 1:
            axis = runner.sync.data_axis
            gathered = axis if isinstance(axis, StepFSDPReplica) else None
            stages = {
                index: _InsideFSDP(part.stages[index], stage, gathered, index)  # type: ignore[misc]
                for index, stage in stages.items()
            }
        config = replace(runner.config, links=self._variants.links, unflatten=graph.unflatten)
        self._executor = PipelineExecutor(stages, config, runner.context, ActivityHooks(runner, self._variants.links))

    def evaluate(self, batch: Batch | ReplicaShare | Sequence[Batch]) -> Evaluation:
        """Run forward and loss of a whole batch, of its replica's share, or of a list of micro-batches."""
        with in_eval_mode(self._runner.model.module):
            microbatches = self._runner.split(batch, self._variants)
            result = self._executor.evaluate(microbatches)
        pairs = zip(result.outputs, microbatches, strict=True) if result.outputs else ()
        counted = [(output, microbatch.target) for output, microbatch in pairs if microbatch.weight > 0]
        return Evaluation(
            loss=self._runner.total_loss(result),
            outputs=[output for output, _ in counted],
            targets=[target for _, target in counted],
            num_samples=self._runner.splitter.count_samples(batch),
        )

    def stream(self, batches: Iterable[Batch]) -> Iterator[list[Any]]:
        """Yield for each batch of a stream the outputs of its micro-batches; empty except at the last stage."""
        weights: deque[list[float]] = deque()

        def split_all() -> Iterator[MicroBatch]:
            for batch in batches:
                microbatches = self._runner.split(batch, self._variants)
                weights.append([microbatch.weight for microbatch in microbatches])
                yield from microbatches

        outputs: list[Any] = []
        results = self._executor.stream(split_all())
        while True:
            with in_eval_mode(self._runner.model.module):  # not while the caller runs
                output = next(results, _END)
            while weights and not weights[0]:  # a batch of which this replica has no sample
                weights.popleft()
                yield []
            if output is _END:
                return
            outputs.append(output)
            if len(outputs) == len(weights[0]):
                pairs = zip(outputs, weights.popleft(), strict=True)
                yield [output for output, weight in pairs if output is not None and weight]
                outputs = []


class _InsideFSDP(nn.Module):
    """Runs an evaluation stage while FSDP has gathered the training stage's parameters."""

    def __init__(self, training: Stage, evaluation: Stage, gathered: StepFSDPReplica | None, index: int) -> None:
        """``gathered``: the replica that gathers the stage ``index``, unless the stage does so itself."""
        super().__init__()
        self._training = [training]  # in a list, so that they are no submodules
        self._evaluation = [evaluation]
        self._gathered, self._index = gathered, index
        self.variant = 0

    def forward(self, *inputs: Any) -> Any:
        training, evaluation = self._training[0], self._evaluation[0]
        training.variant, evaluation.variant = 0, self.variant
        modules = dict(evaluation.named_modules(remove_duplicate=False))

        def run(stage: Stage, *values: Any) -> Any:
            for prefix, holder in stage.named_modules():
                module = modules.get(prefix, holder)
                for name in module._parameters if module is not holder else ():
                    if name in holder._parameters:
                        module._parameters[name] = holder._parameters[name]
            return evaluation(*values)

        if self._gathered is not None:
            self._gathered.gather(self._index)
            try:
                return run(training, *inputs)
            finally:
                self._gathered.reshard()
        original_run, training._run = training._run, run
        try:
            return training(*inputs)
        finally:
            training._run = original_run
            training.reshard()  # type: ignore[operator]  # FSDP2's root stays gathered after a forward
