"""Real tensors at the cuts of a model: the compressible activations of one batch, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stagewright.codecs.header import DTYPES
from stagewright.graph.preserve import preserved
from stagewright.graph.unit_graph import UnitGraph
from stagewright.zoo.model import Batch


def collect_crossing_tensors(
    graph: UnitGraph, cuts: Sequence[int], batch: Batch, loss: Callable[[Any, Any], torch.Tensor] | None
) -> dict[bool, list[list[torch.Tensor]]]:
    """Run one batch; return the tensors of each cut, forward (key False) and backward (True).

    Without a loss there are no gradients.
    """
    collected: dict[bool, list[list[torch.Tensor]]] = {False: [], True: [[] for _ in cuts]}
    crossing: list[list[torch.Tensor]] = []
    with preserved(graph.model), torch.set_grad_enabled(loss is not None):
        values: Sequence[Any] = graph.flatten(batch.args, batch.kwargs)
        for index, stage in enumerate(graph.stages(cuts)):
            values = stage(*values)
            if index < len(cuts):
                pairs = zip(values, graph.needs_gradient(cuts[index]), strict=True)
                crossing.append([value for value, needed in pairs if needed and value.dtype in DTYPES])
                collected[False].append([value.detach().clone() for value in crossing[-1]])
        if loss is not None:
            total = loss(graph.unflatten(values), batch.target)
            flat = [value for row in crossing for value in row if value.requires_grad]
            gradients = iter(torch.autograd.grad(total, flat, allow_unused=True) if flat else ())
            for index, row in enumerate(crossing):
                row_gradients = [next(gradients) for value in row if value.requires_grad]
                collected[True][index] = [gradient.contiguous() for gradient in row_gradients if gradient is not None]
    return collected
