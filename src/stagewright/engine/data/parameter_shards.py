"""Each replica's shard of every parameter, for ZeRO: what its optimizer steps, and a view of the full parameter.

    full parameter, on every replica        rows 0 … n, divided as by ``torch.chunk``
    shard of replica r                      a view of its rows: the optimizer changes the full parameter through it
    scalars                                 not divided: every replica steps them alike

Optimizer states and gradients of a shard have its shape. Gathering them goes through a DTensor, as with FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from stagewright.engine.tensor.axis import Axis


class ParameterShards:
    """This replica's shards of the parameters that its worker trains."""

    def __init__(self, parameters: Iterable[nn.Parameter], axis: Axis, device: torch.device) -> None:
        self._axis = axis
        self._mesh: Any = DeviceMesh.from_group(axis.group, device.type, mesh_dim_names=("data",))
        self._full = {id(parameter): parameter for parameter in parameters}
        self._shards = {identity: self._make(parameter) for identity, parameter in self._full.items()}

    def __iter__(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield every full parameter with its shard."""
        for identity, parameter in self._full.items():
            yield parameter, self._shards[identity]

    def shard(self, parameter: torch.Tensor) -> nn.Parameter:
        """Return the shard of a full parameter."""
        return self._shards[id(parameter)]

    def size(self, parameter: torch.Tensor) -> int:
        """Return the elements of the largest shard, to which the others are padded in a collective."""
        if not parameter.ndim:
            return 1
        rows = -(-parameter.shape[0] // self._axis.num_workers)
        return rows * (parameter.numel() // max(1, parameter.shape[0]))

    def divide(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Divide a tensor of a parameter's shape into the shards of all replicas, as views; a scalar is on each."""
        if not value.ndim:
            return (value.reshape(1),) * self._axis.num_workers
        parts = value.chunk(self._axis.num_workers)
        return parts + (value[:0],) * (self._axis.num_workers - len(parts))

    def own(self, value: torch.Tensor) -> torch.Tensor:
        """Copy this replica's shard of a tensor of a parameter's shape; a scalar as it is."""
        return self.divide(value)[self._axis.index].clone() if value.ndim else value

    def distributed(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return a gradient or optimizer state of a shard as a DTensor; values of another shape as they are."""
        if not parameter.ndim or value.shape != self.shard(parameter).shape:
            return value
        stride = torch.empty(parameter.shape, device="meta").stride()
        with torch.no_grad():
            return DTensor.from_local(
                value, self._mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=stride
            )

    def _make(self, parameter: nn.Parameter) -> nn.Parameter:
        value = parameter.detach()
        return nn.Parameter(self.divide(value)[self._axis.index] if value.ndim else value)
