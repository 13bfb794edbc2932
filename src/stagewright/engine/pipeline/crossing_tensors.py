"""Real tensors at the cuts of a model: the activations that codecs take, and their gradients, of one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stagewright.codecs.header import DTYPES
from stagewright.graph.preserve import preserved
from stagewright.graph.unit_graph import UnitGraph
from stagewright.zoo.model import Batch

__all__ = ["tensors_at"]


def tensors_at(
    graph: UnitGraph, cuts: Sequence[int], batch: Batch, loss: Callable[[Any, Any], torch.Tensor] | None
) -> dict[bool, list[list[torch.Tensor]]]:
    """For forward (False) and backward (True) and each cut, its tensors; no gradients without a loss."""
    found: dict[bool, list[list[torch.Tensor]]] = {False: [], True: [[] for _ in cuts]}
    crossing: list[list[torch.Tensor]] = []
    with preserved(graph.model), torch.set_grad_enabled(loss is not None):
        values: Sequence[Any] = graph.flatten(batch.args, batch.kwargs)
        for at, stage in enumerate(graph.stages(cuts)):
            values = stage(*values)
            if at < len(cuts):
                wanted = zip(values, graph.needs_gradient(cuts[at]), strict=True)
                crossing.append([value for value, one in wanted if one and value.dtype in DTYPES])
                found[False].append([value.detach().clone() for value in crossing[-1]])
        if loss is not None:
            total = loss(graph.unflatten(values), batch.target)
            flat = [value for row in crossing for value in row if value.requires_grad]
            gradients = iter(torch.autograd.grad(total, flat, allow_unused=True) if flat else ())
            for at, row in enumerate(crossing):
                every = [next(gradients) for value in row if value.requires_grad]
                found[True][at] = [one.contiguous() for one in every if one is not None]
    return found
