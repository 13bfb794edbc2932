"""The expert axis of one worker: the replicas among which the experts are divided, and their all-to-alls.

                  forward                                            backward
    dispatch      each row to the worker of its expert               its gradient back to where it came from
    combine       each result back to where its row came from        its gradient to the worker of the expert

All workers of the axis call these equally often and in the same order, also those without a row to send or an expert in
use. So ``combine`` is differentiable wherever the experts are: backward must reach every all-to-all on every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from stagewright.engine.tensor.axis import Axis
from stagewright.engine.worker.recorder import recorder


class ExpertAxis(Axis):
    """This worker's membership in the expert axis; ``payload_bytes`` counts rows, also those that stay here."""

    def __init__(self, group: Any) -> None:
        super().__init__(group, "expert")

    def dispatch(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send ``sent[i]`` consecutive rows to worker i, and return the ``received[i]`` rows of each worker i."""
        return _AllToAll.apply(rows, None, self, sent, received)  # type: ignore[no-any-return, no-untyped-call]

    def combine(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], anchor: torch.Tensor | None
    ) -> torch.Tensor:
        """As ``dispatch``, and differentiable if ``anchor``, a parameter of the experts, is trained."""
        return _AllToAll.apply(rows, anchor, self, sent, received)  # type: ignore[no-any-return, no-untyped-call]

    def all_to_all(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Exchange rows, without autograd."""
        rows = rows.contiguous()
        output = rows.new_empty((sum(received), *rows.shape[1:]))
        self.payload_bytes += rows.nbytes
        start = recorder.now()
        dist.all_to_all_single(output, rows, list(received), list(sent), group=self.group)
        recorder.add("collective", start, num_bytes=rows.nbytes, note=self.name)
        return output

    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Return [worker, expert]: the rows that each worker has for each expert of the layer; ``counts``: own ones."""
        start = recorder.now()
        gathered = self.all_gather(counts)
        recorder.add("collective", start, num_bytes=counts.nbytes, note=self.name)
        return torch.stack(gathered)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        anchor: torch.Tensor | None,
        axis: ExpertAxis,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> torch.Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return axis.all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return ctx.axis.all_to_all(gradient, ctx.received, ctx.sent), None, None, None, None
