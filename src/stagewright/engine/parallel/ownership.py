"""Which worker holds what of the model's state, so that it can be put together again under the plain model's names.

    name in ``state_dict``    canonical name (the first of tied ones)    holders along the pipeline    owner
    embedding.weight          embedding.weight                           0, 3                          0
    head.weight               embedding.weight                           0, 3                          0
    pooler.weight (unused)    pooler.weight                              none: kept aside              0

The owner is who writes and sends a value: the first holder of replica 0, first along the tensor axis. Make it before
the stages are built, for that frees what other workers hold. All that gathers must be called on every worker, and goes
to the host tensor by tensor, small ones some at once: a device that holds a part of the model needs room for one
tensor more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from stagewright.engine.state.full_state import full_value
from stagewright.engine.tensor.layers import ShardLayout, shards_of
from stagewright.engine.worker.broadcast import broadcast
from stagewright.engine.worker.context import WorkerContext
from stagewright.errors import UsageError
from stagewright.graph.unit_graph import UnitGraph

if TYPE_CHECKING:
    from stagewright.engine.parallel.replica import Replica

__all__ = ["HeldState"]

_HOST = torch.device("cpu")


class HeldState:
    """The model's state as this worker sees it."""

    def __init__(
        self, graph: UnitGraph, cuts: Sequence[int], stage_workers: Sequence[int], context: WorkerContext
    ) -> None:
        self._context = context
        state = graph.model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        self.canonical: dict[str, str] = {name: first.setdefault(id(value), name) for name, value in state.items()}
        """For each name of the state, the name under which it is kept."""
        self.shapes = {name: (value.shape, value.dtype) for name, value in state.items()}
        holders: dict[str, set[int]] = {name: set() for name in self.canonical.values()}
        for stage, worker in zip(graph.stages(cuts), stage_workers, strict=True):
            for name, _ in _tensors(stage):
                if name in self.canonical:
                    holders[self.canonical[name]].add(worker)
        self.owners: dict[str, int] = {name: min(found, default=0) for name, found in holders.items()}
        """For each canonical name, the owner's place along the pipeline."""
        self._aside = {
            name: state[name].detach().clone() for name, found in holders.items() if not found and context.pipeline == 0
        }
        self._replica: Replica | None = None

    def bind(self, replica: Replica) -> None:
        """From now on values are those of the replica's stages."""
        self._replica = replica

    @property
    def writes(self) -> bool:
        """Whether this worker is one of those that own something."""
        return (self._context.data, self._context.tensor) == (0, 0)

    def held(self) -> dict[str, torch.Tensor]:
        """What this worker holds, as it holds it, by canonical name in the order of the state."""
        assert self._replica is not None
        found: dict[str, torch.Tensor] = {}
        for stage in self._replica.stages.values():
            for name, value in _tensors(stage):
                if name in self.canonical:
                    found.setdefault(self.canonical[name], value)
        found |= self._aside
        return {name: found[name] for name in self.owners if name in found}

    def owned(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of some values that this worker must write."""
        return {name: value for name, value in values.items() if self._owns(name)}

    def owned_in_full(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Full tensors of those of its values, or of an optimiser's averages, that this worker must write.

        What was gathered is on the host; what was whole is where it was.
        """
        shards, found = self._shards, {}
        for name, value in values.items():
            full = self._full(name, value, shards)
            if self._owns(name):
                found[name] = full
            del full  # not to be held beside the next
        return found

    def everything(self, *, wanted: bool = True) -> dict[str, torch.Tensor]:
        """A copy of every canonical name's full value on the host, on every worker; none where not ``wanted``."""
        context, shards, held = self._context, self._shards, self.held()

        def own(names: Sequence[str], owner: int) -> Iterator[torch.Tensor]:
            for name in names:
                value = self._full(name, held[name], shards) if name in held else None  # gathered by all that have it
                if value is None or context.rank != owner:
                    del value  # before there is another
                    shape, dtype = self.shapes[name]
                    value = torch.empty(shape, dtype=dtype, device=context.torch_device)
                yield value
                del value

        found: dict[str, torch.Tensor] = {}
        for place, group in itertools.groupby(self.owners, key=self.owners.__getitem__):
            names, owner = list(group), context.mesh.rank(0, 0, place)
            values = broadcast(own(names, owner), context.torch_device, source=owner)
            for name in names:
                value = next(values)
                if wanted:
                    found[name] = value.to(_HOST, copy=True)
                del value
        return found

    def _owns(self, name: str) -> bool:
        return self.writes and self.owners[name] == self._context.pipeline

    def _full(self, name: str, value: torch.Tensor, shards: Mapping[str, ShardLayout]) -> torch.Tensor:
        return value if name in self._aside else full_value(value.detach(), shards.get(name), _HOST)

    @torch.no_grad()
    def put(self, name: str, target: torch.Tensor, full: torch.Tensor) -> None:
        """Write this worker's part of a full value in place."""
        part = self.part(name, full, target)
        if part.shape != target.shape:
            raise UsageError(
                f"{name} has shape {list(full.shape)} there, but {list(self.shapes[name][0])} in the model"
            )
        target.copy_(part)

    def part(self, name: str, full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This worker's part of a full value that belongs to the parameter ``like``."""
        if full.ndim == 0 or full.shape != self.shapes[name][0]:
            return full
        value = full.to(like.device)
        layout = self._shards.get(name)
        if layout is not None:
            value = layout.part(value)
        if isinstance(like, DTensor):
            value = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
        return value

    @property
    def _shards(self) -> Mapping[str, ShardLayout]:
        assert self._replica is not None
        return shards_of(self._replica.model.module) if self._context.mesh.tensor > 1 else {}


def _tensors(stage: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from stage.named_parameters(remove_duplicate=False)
    yield from stage.named_buffers(remove_duplicate=False)
