"""Which worker holds what of the model's state, so that it can be put together again under the plain model's names.

    name in ``state_dict``    canonical name (the first of tied ones)    holders along the pipeline    owner
    embedding.weight          embedding.weight                           0, 3                          0
    head.weight               embedding.weight                           0, 3                          0
    pooler.weight (unused)    pooler.weight                              none: kept aside              0

The owner is who writes and sends a value: the first holder of replica 0, first along the tensor axis. Make it before
the stages are built, for that frees what other workers hold. All that gathers must be called on every worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from stagewright.capture.graph import UnitGraph
from stagewright.engine.context import WorkerContext
from stagewright.engine.full_state import full_values
from stagewright.engine.tensor_layers import shards_of
from stagewright.errors import UsageError

if TYPE_CHECKING:
    from stagewright.engine.replica import Replica

__all__ = ["HeldState"]


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

    def full(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Full tensors of what this worker holds for its parameters: values or an optimiser's averages."""
        assert self._replica is not None
        plain = {name: value for name, value in values.items() if name in self._aside}
        rest = {name: value.detach() for name, value in values.items() if name not in plain}
        return plain | full_values(self._replica.model.module, rest, torch.device("cpu"))

    def owned(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of some values that this worker must write."""
        place = self._context.pipeline
        return {name: value for name, value in values.items() if self.writes and self.owners[name] == place}

    def everything(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every canonical name with its full value, one after the other, on every worker."""
        context = self._context
        full = self.full(self.held())
        for name, place in self.owners.items():
            shape, dtype = self.shapes[name]
            value = full.get(name)
            if context.mesh.num_workers > 1:
                owner = context.mesh.rank(0, 0, place)
                if value is None or context.rank != owner:
                    value = torch.empty(shape, dtype=dtype, device=context.torch_device)
                value = value.detach().to(context.torch_device).contiguous()
                dist.broadcast(value, src=owner)
            assert value is not None
            yield name, value.detach()

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
    def _shards(self) -> Mapping[str, Any]:
        assert self._replica is not None
        return shards_of(self._replica.model.module) if self._context.mesh.tensor > 1 else {}


def _tensors(stage: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from stage.named_parameters(remove_duplicate=False)
    yield from stage.named_buffers(remove_duplicate=False)
