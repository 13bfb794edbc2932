"""Evaluation while a plan trains: the same cuts of the model captured in eval mode, over the same parameters.

Training flags are baked into the glue between units, so a stage captured for training can't be used; a second set of
stages calls the same modules with batch norm and dropout in eval mode. Forward alone has one order for every schedule
and placement. Where FSDP2 divides the parameters, the evaluation stage runs inside the training stage, which gathers
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from stagewright.engine.parallel.replica import Replica, cut_indices
from stagewright.engine.pipeline.executor import Links, MicroBatch, Pipeline
from stagewright.engine.pipeline.transport import TensorShape
from stagewright.graph.stage import Stage
from stagewright.graph.unit_graph import UnitGraph
from stagewright.zoo.model import Batch

__all__ = ["Evaluation", "Evaluator", "in_eval_mode"]

_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What came of one batch in eval mode."""

    loss: float
    """Of the whole batch, the same on every worker."""
    outputs: list[Any] = field(default_factory=list)
    """The model's results, one a micro-batch of this replica; only where the last stage is."""
    targets: list[Any] = field(default_factory=list)
    """What they are compared with; only where the last stage is."""
    num_samples: int
    """Samples of the whole batch."""


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module is in the mode in which it was."""
    before = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in before:
            one.training = training


class Evaluator:
    """A replica's stages in eval mode."""

    def __init__(self, replica: Replica, graph: UnitGraph) -> None:
        self._replica, self._graph = replica, graph
        cuts = cut_indices(graph, replica.plan.cuts)
        with in_eval_mode(replica.model.module):  # a graph gives the stages of the mode in which the model is
            every = graph.stages(cuts)
        stages = {index: every[index] for index in replica.stages}

        def shapes(cut: int, size: int) -> list[TensorShape]:
            return [TensorShape(shape=shape, dtype=dtype) for shape, dtype in graph.crossing_shapes(cuts[cut], size)]

        self._inside = replica.plan.shard and replica.plan.mesh.data > 1
        if self._inside:
            ((index, stage),) = stages.items()
            stages = {index: _Inside(replica.stages[index], stage)}  # type: ignore[dict-item]
        self._pipeline = Pipeline(
            stages,
            stage_workers=replica.stage_workers,
            schedule=replica.plan.schedule,
            num_microbatches=replica.plan.microbatches,
            links=Links(
                shapes=shapes,
                needs_gradient=[(False,) * len(graph.cuts[cut].crossing) for cut in cuts],
                codecs=replica.codecs,
                coded=[graph.needs_gradient(cut) for cut in cuts],
            ),
            context=replica.context,
            unflatten=graph.unflatten,
            loss=replica.model.loss,
            watch=replica._note,
        )

    def evaluate(self, batch: Batch) -> Evaluation:
        """Forward and loss of one batch, which every worker is given whole."""
        replica = self._replica
        chunks = self._chunks(batch)
        with in_eval_mode(replica.model.module):
            outcome = self._pipeline.evaluate(chunks)
        kept = [at for at, one in enumerate(chunks) if one.weight > 0] if outcome.outputs else []
        return Evaluation(
            loss=replica.total_loss(outcome),
            outputs=[outcome.outputs[at] for at in kept],
            targets=[chunks[at].target for at in kept],
            num_samples=replica.dealer.size_of(batch),
        )

    def stream(self, batches: Iterable[Batch]) -> Iterator[list[Any]]:
        """The results of a stream of batches, for each a list with one a micro-batch; empty but at the last stage."""
        weights: deque[list[float]] = deque()

        def dealt() -> Iterator[MicroBatch]:
            for batch in batches:
                chunks = self._chunks(batch)
                weights.append([one.weight for one in chunks])
                yield from chunks

        found: list[Any] = []
        results = self._pipeline.stream(dealt())
        while True:
            with in_eval_mode(self._replica.model.module):  # not while the caller has its turn
                result = next(results, _END)
            while weights and not weights[0]:  # a batch of which this replica has no sample
                weights.popleft()
                yield []
            if result is _END:
                return
            found.append(result)
            if len(found) == len(weights[0]):
                yield [one for one, weight in zip(found, weights.popleft(), strict=True) if one is not None and weight]
                found = []

    def _chunks(self, batch: Batch) -> list[MicroBatch]:
        """This replica's micro-batches of a whole batch."""
        dealer, context = self._replica.dealer, self._replica.context
        parts = dealer.parts(batch, context.torch_device, context.data)
        if not parts and self._inside:  # FSDP2 gathers parameters from every replica
            parts = [replace(dealer.parts(batch, context.torch_device, 0)[0], weight=0.0)]
        return [
            MicroBatch(self._graph.flatten(one.args, one.kwargs), one.target, one.size, one.weight) for one in parts
        ]


class _Inside(nn.Module):
    """Runs an evaluation stage while the training stage's parameters are gathered."""

    def __init__(self, training: Stage, evaluation: Stage) -> None:
        super().__init__()
        self._training = [training]
        self._evaluation = [evaluation]

    def forward(self, *inputs: Any) -> Any:
        training, evaluation = self._training[0], self._evaluation[0]

        def run(stage: Stage, *values: Any) -> Any:
            for prefix, holder in stage.named_modules():
                there = _find(evaluation, prefix)
                for name in there._parameters if there is not None and there is not holder else ():
                    if name in holder._parameters:
                        there._parameters[name] = holder._parameters[name]  # type: ignore[union-attr]
            return evaluation(*values)

        before, training._run = training._run, run
        try:
            return training(*inputs)
        finally:
            training._run = before
            training.reshard()  # type: ignore[operator]  # FSDP2's: its root stays gathered after a forward


def _find(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None
