"""What FSDP adds to a forward and backward on two workers: its collectives, copies and hooks, by the size of a unit.

Units of sixteen parameters, as many as a block of BERT or ViT has, and almost no compute: the same units without FSDP
are timed as well, and the difference is FSDP's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from stagewright.engine.data.fsdp import FSDPReplica
from stagewright.engine.worker.context import WorkerContext

_WIDTHS = (16, 512)  # the large units together exceed the caches
_LAYERS = 8
_UNITS = 4


class FSDPProbe:
    """The same small and large units, sharded and not."""

    def __init__(self, context: WorkerContext) -> None:
        device = context.torch_device
        mesh = DeviceMesh.from_group(context.data_group, device.type, mesh_dim_names=("data",))
        self._pairs: dict[int, tuple[nn.Module, FSDPReplica, torch.Tensor]] = {}
        for width in _WIDTHS:
            generator = torch.Generator().manual_seed(0)
            plain = nn.Sequential(*(_make_unit(width) for _ in range(_UNITS))).to(device)
            values = torch.randn(1, width, generator=generator).to(device)
            sharded = copy.deepcopy(plain)
            replica = FSDPReplica(sharded, context.data_group, [], mesh, list(sharded), device)
            num_bytes = sum(parameter.nbytes for parameter in plain[0].parameters())
            self._pairs[num_bytes] = plain, replica, values

    def round(self, timed: Callable[[Callable[[], object]], float], barrier: Callable[[], None]) -> dict[int, float]:
        """Return the seconds that FSDP adds to a step of one unit, by the bytes of its parameters."""
        added = {}
        for num_bytes, (plain, replica, values) in self._pairs.items():
            barrier()
            plain_s = timed(lambda plain=plain, values=values: _step(plain, plain, values))  # type: ignore[misc]
            barrier()
            sharded_s = timed(
                lambda replica=replica, values=values: _step(replica, replica.module, values)  # type: ignore[misc]
            )
            added[num_bytes] = (sharded_s - plain_s) / _UNITS
        return added


def _make_unit(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS)))


def _step(model: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, values: torch.Tensor) -> None:
    for parameter in module.parameters():
        parameter.grad = None
    model(values).sum().backward()  # type: ignore[no-untyped-call]
    if isinstance(model, FSDPReplica):
        model.synchronize(0.5)
