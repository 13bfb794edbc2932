"""Micro-batches of different shapes: other sequence lengths, other image sizes.

A graph is captured for one shape of the inputs; only the batch size may differ. When a micro-batch of another shape
comes, a hollow copy of the model is captured for it, and each stage gets a second forward over the same modules. Every
worker sees the whole batch and captures the same shapes in the same order, so both ends of a link agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stagewright import structure
from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.batch.random_key import is_keyed, key_stage
from stagewright.engine.pipeline.links import Links
from stagewright.engine.pipeline.unit_checkpointing import checkpoint_variant
from stagewright.errors import CaptureError, UsageError
from stagewright.graph.capture import capture, capture_fixed
from stagewright.graph.stage import Stage
from stagewright.graph.unit_graph import UnitGraph
from stagewright.graph.whole_model import WholeModel
from stagewright.machine.hollow import skip_products
from stagewright.sample_lists import Path


class ShapeVariants:
    """The graphs of one model for all shapes seen so far, and the stages of this worker under each."""

    def __init__(
        self,
        graph: UnitGraph,
        cuts: Sequence[int],
        hollow: nn.Module | None,
        *,
        lists: frozenset[Path] = frozenset(),
        has_codecs: bool = False,
    ) -> None:
        """``hollow``: a hollow copy of the model from before it was divided; None if the model can't be copied.

        ``lists``: lists with an item for each sample, of any length, so that other tensors cross the cuts; not with
        codecs, whose state belongs to one tensor.
        """
        self.lists, self._may_differ = lists, bool(lists) and not has_codecs
        self._graphs, self._cuts, self.hollow = [graph], list(cuts), hollow
        self._known: dict[tuple[Any, ...], int] = {}
        self._stages: dict[int, Stage] = {}
        self._change: Callable[[Stage], None] = lambda stage: None
        self.links = Links.of(self._graphs, cuts)

    def follow(self, stages: dict[int, Stage], change: Callable[[Stage], None]) -> None:
        """Give these stages, by index, a forward for each new shape; ``change`` divides its sequences as theirs."""
        self._stages, self._change = stages, change

    def assign(self, microbatches: Iterable[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with their flattened inputs and the number of their graph."""
        assigned = []
        for microbatch in microbatches:
            index = self._find(microbatch)
            inputs = self._graphs[index].leaves(microbatch.args, microbatch.kwargs)
            assigned.append(replace(microbatch, inputs=inputs, variant=index))
        return assigned

    def _find(self, microbatch: MicroBatch) -> int:
        if isinstance(self._graphs[0], WholeModel):
            return 0
        leaves, spec = structure.flatten((microbatch.args, microbatch.kwargs))
        key = (*(_describe(leaf) for leaf in leaves), len(leaves), spec.num_leaves)
        if key not in self._known:
            self._known[key] = self._search(microbatch)
        return self._known[key]

    def _search(self, microbatch: MicroBatch) -> int:
        """Return the first graph that accepts the inputs, a new one if need be."""
        problem: UsageError | None = None
        for index, graph in enumerate(self._graphs):
            try:
                graph.flatten(microbatch.args, microbatch.kwargs)
                return index
            except UsageError as error:
                problem = problem or error
        assert problem is not None
        if not self._differs_in_shape_only(microbatch.args, microbatch.kwargs) or self.hollow is None:
            raise problem
        self._add(microbatch, problem)
        return len(self._graphs) - 1

    def _differs_in_shape_only(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        examples = self._graphs[0].example_inputs
        if set(kwargs) != set(self._graphs[0].keywords):
            return False
        if self.lists:
            return True
        leaves = self._graphs[0].leaves(args, kwargs)
        return len(leaves) == len(examples) and all(
            leaf.dtype == example.dtype and leaf.ndim == example.ndim
            if isinstance(leaf, torch.Tensor) and isinstance(example, torch.Tensor)
            else type(leaf) is type(example)
            for leaf, example in zip(leaves, examples, strict=True)
        )

    def _is_alike(self, needs_gradient: Sequence[bool], cut: int) -> bool:
        """Whether the same tensors cross a cut as in the first graph; with lists, others of each sample may."""
        expected = self._graphs[0].needs_gradient(cut)
        return any(needs_gradient) == any(expected) if self._may_differ else needs_gradient == expected

    def _add(self, microbatch: MicroBatch, problem: UsageError) -> None:
        """Capture the hollow copy for these inputs and add a forward to each stage."""
        base = self._graphs[0]
        assert self.hollow is not None
        modules = dict(base.model.named_modules())
        for name, module in self.hollow.named_modules():
            module.training = modules[name].training if name in modules else base.model.training
        units = sorted({call.target for call in base.calls})
        device = next(self.hollow.parameters()).device
        inputs = microbatch.args, microbatch.kwargs
        args, kwargs = structure.map_tensors(lambda tensor: tensor.to(device), inputs)
        try:
            with skip_products():
                if self.lists:
                    captured = capture_fixed(self.hollow, args, kwargs, units, microbatch.num_samples)
                else:
                    captured = capture(self.hollow, args, kwargs, units, base.inputs_batch_dim())
            captured.flatten(args, kwargs)
        except CaptureError as error:
            raise UsageError(f"{problem}: {error}") from error
        graph = captured.bound_to(base.model)
        same_calls = [call.name for call in graph.calls] == [call.name for call in base.calls]
        if not same_calls or any(not self._is_alike(graph.needs_gradient(cut), cut) for cut in self._cuts):
            raise UsageError(
                f"{problem}: with these shapes the model calls other units or sends other tensors between stages; "
                + (
                    "let its units take whole batches, or run it without a cut (data parallel or FSDP)"
                    if self.lists
                    else "pad its batches to one shape"
                )
            )
        self._graphs.append(graph)
        if not self._stages:
            return
        all_stages = graph.stages(self._cuts)
        for index, stage in self._stages.items():
            self._change(all_stages[index])
            checkpoint_variant(stage, all_stages[index])
            if is_keyed(stage):
                key_stage(all_stages[index])
            stage.add_variant(all_stages[index])


def _describe(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))
