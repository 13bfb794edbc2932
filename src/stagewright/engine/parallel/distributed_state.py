"""The model's state distributed over workers: which worker holds what, and how to gather it by the model's names.

    name in ``state_dict``    canonical name (the first of tied ones)    holders along the pipeline    owner
    embedding.weight          embedding.weight                           0, 3                          0
    head.weight               embedding.weight                           0, 3                          0
    pooler.weight (unused)    pooler.weight                              none: a copy on worker 0      0

The owner writes and sends a value: the first holder of replica 0, first along the tensor axis. Create this before the
stages are built, because building them frees the parameters of other workers. Every method that gathers must be called
on every worker. It gathers to the host tensor by tensor, small ones together, so a device needs memory for one more
tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from stagewright.engine.parallel.model_part import ModelPart, first_names
from stagewright.engine.state.full_state import full_tensor
from stagewright.engine.state.tensor_file import TensorStream
from stagewright.engine.tensor.layers import ShardLayout, shard_layouts
from stagewright.engine.worker.broadcast import broadcast
from stagewright.engine.worker.context import WorkerContext
from stagewright.errors import UsageError
from stagewright.files.stored_tensor import StoredTensor, TensorPart
from stagewright.graph.unit_graph import UnitGraph
from stagewright.zoo.weight_files import WeightFiles

_HOST = torch.device("cpu")


class DistributedState:
    """The model's state as one worker sees it."""

    def __init__(
        self,
        graph: UnitGraph,
        cuts: Sequence[int],
        stage_workers: Sequence[int],
        context: WorkerContext,
        weights: WeightFiles | None = None,
    ) -> None:
        """``weights``: the files of a hollow model's weights."""
        self._context = context
        state = graph.model.state_dict(keep_vars=True)
        self.canonical = first_names(state.items())
        self.shapes = {name: (value.shape, value.dtype) for name, value in state.items()}
        holders: dict[str, set[int]] = {name: set() for name in self.canonical.values()}
        for stage, worker in zip(graph.stages(cuts), stage_workers, strict=True):
            for name, _ in _named_tensors(stage):
                if name in self.canonical:
                    holders[self.canonical[name]].add(worker)
        self.owners: dict[str, int] = {name: min(workers, default=0) for name, workers in holders.items()}
        """The owner's pipeline rank for each canonical name."""
        unused = [name for name, workers in holders.items() if not workers and context.pipeline == 0]
        self._unused = {name: state[name].detach().clone() for name in unused}
        if weights is not None:
            for name, value in self._unused.items():
                weights.read(name, value)
        self._part: ModelPart | None = None

    def bind(self, part: ModelPart) -> None:
        """Use the tensors of the stages that were built."""
        self._part = part

    def held(self) -> dict[str, torch.Tensor]:
        """Return the tensors that this worker holds, possibly sharded, by canonical name in the order of the state."""
        assert self._part is not None
        tensors: dict[str, torch.Tensor] = {}
        for stage in self._part.stages.values():
            for name, value in _named_tensors(stage):
                if name in self.canonical:
                    tensors.setdefault(self.canonical[name], value)
        tensors |= self._unused
        return {name: tensors[name] for name in self.owners if name in tensors}

    def owned(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Select the values that this worker owns."""
        return {name: value for name, value in values.items() if self._owns(name)}

    def stream_owned(self, held: Iterable[tuple[str, str, torch.Tensor]]) -> TensorStream:
        """Return the full tensors that this worker owns, each gathered when it is asked for, together with its holders.

        ``held``: label, canonical name and value (or optimizer state) of the tensors that this worker holds. Gathered
        tensors are on the host; unsharded tensors stay on their device.
        """
        layouts = self._shard_layouts
        ordered = sorted(held, key=lambda entry: -entry[2].element_size())

        def values() -> Iterator[tuple[str, torch.Tensor]]:
            for label, name, value in ordered:
                full = self._gather(name, value, layouts)
                if self._owns(name):
                    yield label, full
                del full  # free it before the next is gathered

        shapes = {label: (self._full_shape(name, value, layouts), value.dtype) for label, name, value in ordered}
        owned = {label: shapes[label] for label, name, _ in ordered if self._owns(name)}
        return TensorStream(shapes=owned, values=values())

    def stream_all(self) -> TensorStream:
        """Return the full values of all canonical names, each sent to every worker when they ask for it."""
        order = sorted(self.owners, key=lambda name: -self.shapes[name][1].itemsize)
        shapes = {name: (tuple(self.shapes[name][0]), self.shapes[name][1]) for name in order}
        return TensorStream(shapes=shapes, values=self._broadcast_all(order))

    def gather_all(self) -> dict[str, torch.Tensor]:
        """Copy the full value of every canonical name to the host, on every worker."""
        return {name: value.to(_HOST, copy=True) for name, value in self._broadcast_all(list(self.owners))}

    def _broadcast_all(self, order: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full value of each canonical name on every worker, valid until the next one is asked for."""
        context, layouts, held = self._context, self._shard_layouts, self.held()

        def owner_tensors(names: Sequence[str], owner: int) -> Iterator[torch.Tensor]:
            for name in names:
                value = self._gather(name, held[name], layouts) if name in held else None  # a collective of all holders
                if value is None or context.rank != owner:
                    del value  # free it before allocating another
                    shape, dtype = self.shapes[name]
                    value = torch.empty(shape, dtype=dtype, device=context.torch_device)
                yield value
                del value

        for owner_position, group in itertools.groupby(order, key=self.owners.__getitem__):
            names, owner = list(group), context.mesh.rank(0, 0, owner_position)
            values = broadcast(owner_tensors(names, owner), context.torch_device, source=owner)
            for name in names:
                yield name, next(values)

    @torch.no_grad()
    def load(self, name: str, target: torch.Tensor, stored: StoredTensor) -> None:
        """Copy this worker's shard of a stored value into ``target``."""
        shape = stored.shape
        if shape != self.shapes[name][0]:
            raise UsageError(
                f"{name} has shape {list(shape)} in the checkpoint, but {list(self.shapes[name][0])} in the model"
            )
        if isinstance(target, DTensor):
            target.copy_(self._shard(name, stored.read(), target))
        else:
            stored.copy_to(target, self._part_of(name, target))

    def read_state(self, name: str, stored: StoredTensor, like: torch.Tensor) -> torch.Tensor:
        """Read this worker's shard of an optimizer state of the parameter ``like``; one of another shape is whole."""
        shape = stored.shape
        if not shape or shape != self.shapes[name][0]:
            return stored.read().clone()  # not a view of the mapped file
        if isinstance(like, DTensor):
            return self._shard(name, stored.read(), like)
        value = torch.empty(like.shape, dtype=stored.read().dtype, device=like.device)
        stored.copy_to(value, self._part_of(name, like))
        return value

    def _part_of(self, name: str, held: torch.Tensor) -> TensorPart | None:
        """Return which part of a full value this worker holds; None: all of it."""
        layout = None if name in self._unused else self._shard_layouts.get(name)
        return None if layout is None else layout.part(held)

    def _shard(self, name: str, full: torch.Tensor, like: DTensor) -> torch.Tensor:
        """Return this worker's shard of a full value that belongs to the parameter ``like``."""
        value = full.to(like.device)
        layout = self._shard_layouts.get(name)
        if layout is not None:
            value = layout.shard(value)
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

    def _owns(self, name: str) -> bool:
        is_first = (self._context.data, self._context.tensor) == (0, 0)
        return is_first and self.owners[name] == self._context.pipeline

    def _full_shape(self, name: str, value: torch.Tensor, layouts: Mapping[str, ShardLayout]) -> tuple[int, ...]:
        """Return the shape of what ``_gather`` returns."""
        layout = None if name in self._unused else layouts.get(name)
        return tuple(value.shape) if layout is None or not value.ndim else layout.full_shape(value)

    def _gather(self, name: str, value: torch.Tensor, layouts: Mapping[str, ShardLayout]) -> torch.Tensor:
        return value if name in self._unused else full_tensor(value.detach(), layouts.get(name), _HOST)

    @property
    def _shard_layouts(self) -> Mapping[str, ShardLayout]:
        assert self._part is not None
        mesh = self._context.mesh
        return shard_layouts(self._part.model.module) if mesh.tensor > 1 or mesh.expert > 1 else {}


def _named_tensors(stage: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from stage.named_parameters(remove_duplicate=False)
    yield from stage.named_buffers(remove_duplicate=False)
