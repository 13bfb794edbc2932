"""Worker functions for tests of ZeRO, run by ``pool``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.data.parameter_shards import ParameterShards
from stagewright.engine.data.zero import GradientReduceScatter
from stagewright.engine.tensor.axis import Axis

SHAPES = ((5, 2), (1, 3), (), (70_000,), (4,))


def exchange(rank: int, num_microbatches: int, every_microbatch: bool) -> dict[str, Any]:
    """Backward of ``num_microbatches`` with a gradient of rank + 1 for all parameters but the last, then a step."""
    axis = Axis(dist.group.WORLD, "data")
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    shards = ParameterShards(parameters, axis, torch.device("cpu"))
    zero = GradientReduceScatter({0: parameters}, shards, axis, every_microbatch=every_microbatch, overlap=True)
    held = []
    for number in range(num_microbatches):
        if number == num_microbatches - 1:
            zero.last_backward(0)
        with zero.backward(0):
            sum((rank + 1) * parameter.sum() for parameter in parameters[:-1]).backward()  # type: ignore[union-attr]
        if number == num_microbatches - 1:
            zero.stage_done(0)
        held.append(sum(parameter.grad is not None for parameter in parameters))
    zero.finish()
    own = [shard for _, shard in shards]
    gradients = [None if shard.grad is None else shard.grad.flatten().tolist()[:2] for shard in own]
    torch.optim.SGD(own, lr=1.0).step()
    zero.gather_parameters()
    zero.close()
    return {
        "shapes": [tuple(shard.shape) for shard in own],
        "held": held,
        "gradients": gradients,
        "parameters": [sorted(set(parameter.detach().flatten().tolist())) for parameter in parameters],
        "bytes": axis.payload_bytes,
    }
