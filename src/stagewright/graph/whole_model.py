"""A model as a single unit, for models that capture can't take: serial, data parallel and FSDP need no cut.

It stands in for a ``UnitGraph`` with one unit call and no cuts. Nothing is traced: the stage flattens the arguments,
calls the model and flattens its result. So code may branch on values, and every batch may have other shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from stagewright import structure
from stagewright.graph.cut import UnitCall
from stagewright.graph.glue.segments import RecordedGlue
from stagewright.graph.preserve import preserved
from stagewright.graph.stage import Stage
from stagewright.graph.unit_graph import RecordedCall, UnitGraph
from stagewright.sample_lists import BatchDims
from stagewright.structure import Structure

_CALL = "stagewright_model"


class WholeModel(UnitGraph):
    """A model that runs as it is."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        batch_dims: BatchDims,
        reason: str,
        name: str | None = None,
    ) -> None:
        """``batch_dims``: where the inputs have their samples; ``reason``: why the model can't be cut."""
        self.model = model
        self.name = name or type(model).__name__
        self.calls = (UnitCall(index=0, name=self.name, target="", kind=type(model).__name__, block=None),)
        self.cuts = ()
        self.guards = ()
        self.notes = (f"the model runs as one unit: {reason}",)
        self.dynamic = True
        self._example = (tuple(args), dict(kwargs))
        self._batch_dims = batch_dims
        self._runner = _Runner(model)
        self.batch_size = self.batch_size_of(tuple(args), kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)

    @property
    def keywords(self) -> list[str]:
        """Names of the keyword arguments of the example."""
        return list(self._example[1])

    @property
    def example_inputs(self) -> Sequence[Any]:
        """The flattened inputs of the example."""
        return self._batch_dims.flatten(self._example)[0]

    def fsdp_units(self) -> list[nn.Module]:
        """No unit has parameters of its own to gather: replicas may call different submodules."""
        return []

    def parameters_of(self, call: UnitCall) -> dict[str, nn.Parameter]:
        """Return all parameters."""
        return dict(self.model.named_parameters())

    def input_batch_dims(self) -> tuple[int | None, ...]:
        """Return the batch dimension of each flattened input."""
        return self._batch_dims.dims

    def stage(self, first: int, last: int) -> Stage:
        """Return the model as a stage."""
        graph = fx.Graph()
        inputs = [graph.placeholder(f"input_{index}") for index in range(len(self._batch_dims.dims))]
        call = graph.call_module(_CALL, tuple(inputs))
        call.meta["mutates"] = frozenset(inputs)  # unknown, so each step works on copies
        graph.output(call)
        stage = Stage(graph, calls=self.calls, inputs=(), outputs=())
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(stage)[registry] = vars(self.model)[registry]
        object.__setattr__(stage, _CALL, self._runner)
        return stage

    def record(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Iterator[RecordedCall]:
        """Yield the call of the model."""
        yield RecordedCall(call=self.calls[0], module=self.model, args=tuple(args), kwargs=dict(kwargs or {}))

    def record_glue(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Iterator[RecordedGlue]:
        """Yield nothing: there are no operations outside of the model."""
        return iter(())

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Flatten the user's arguments."""
        leaves, self._runner.in_spec = self._batch_dims.flatten((tuple(args), dict(kwargs)))
        return leaves

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Flatten the user's arguments."""
        return self.flatten(args, kwargs)

    def unflatten(self, results: Sequence[Any]) -> Any:
        """Restore the structure of the result of the last forward."""
        return self._runner.out_spec.unflatten(list(results))

    def batch_size_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> int:
        """Return the number of samples in a batch."""
        return self._batch_dims.count((tuple(args), dict(kwargs or {}))) or 1

    def example_result(self) -> Any:
        """Run the model on the example without gradients and return its result."""
        args, kwargs = structure.map_tensors(torch.clone, self._example)
        with preserved(self.model), torch.no_grad():
            return self.model(*args, **kwargs)


class _Runner:
    """Calls the model with flattened arguments."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Callable[..., Any] = model
        self.in_spec = Structure()
        self.out_spec = Structure()

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        args, kwargs = self.in_spec.unflatten(leaves)
        results, self.out_spec = structure.flatten(self.model(*args, **kwargs))
        return tuple(results)
