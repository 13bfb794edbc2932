"""Replicas that hold all parameters: DistributedDataParallel, which sums buckets of gradients while backward runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stagewright.engine.data.anchors import hung
from stagewright.engine.data.data_parallel import DataParallel
from stagewright.engine.worker.recorder import recorder

__all__ = ["Replicated"]


class Replicated(DataParallel):
    """DistributedDataParallel from the second step on."""

    def __init__(self, module: nn.Module, group: Any, norms: list[Any], bucket_bytes: int) -> None:
        super().__init__(module, group, norms)
        self._bucket_bytes = bucket_bytes
        self._wrapped: DistributedDataParallel | None = None
        self._trained = [one for one in module.parameters() if one.requires_grad]
        self._accumulates = False
        self._in_buckets: set[int] = set()
        self._reduced: set[int] = set()
        self._lacked: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._wrapped is None or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        with self._wrapped.no_sync():  # or else it exchanges in the next backward, be it another micro-batch's
            outputs = self._wrapped(*args, **kwargs)
        return outputs if self._accumulates else self._exchanging(outputs)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def _exchanging(self, outputs: Any) -> Any:
        """Outputs whose backward exchanges the gradients.

        It reaches every parameter: one that they don't depend on gets no gradient by that, but DistributedDataParallel
        hears of it, as it does of all others, and waits for none in vain.
        """
        assert self._wrapped is not None
        reducer = self._wrapped.reducer
        anchor = _Anchor.apply(lambda: reducer.prepare_for_backward([]), *self._trained)  # type: ignore[no-untyped-call]
        return hung(outputs, anchor)

    def synchronise(self, weight: float) -> None:
        assert self._reduced == self._in_buckets, "backward has not reached every parameter"
        used = self._used(self._trained, self._lacked)
        self._reduced.clear()
        self._lacked.clear()
        self._sum_gradients([one for one in used if id(one) not in self._in_buckets], self._bucket_bytes)
        if self._wrapped is None and used:
            self._wrap(used)
        self._average_statistics(weight)

    def _wrap(self, used: list[nn.Parameter]) -> None:
        """Hand over to DistributedDataParallel what the first step has shown to be used."""
        self._in_buckets = {id(one) for one in used}
        named = self.module.named_parameters(remove_duplicate=False)
        ignored = [name for name, one in named if one.requires_grad and id(one) not in self._in_buckets]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            self.module, ignored
        )
        # torch's own buckets count in MiB.
        wrapped = DistributedDataParallel(
            self.module,
            process_group=self.group,
            init_sync=False,
            bucket_cap_mb=self._bucket_bytes / (1 << 20),
            gradient_as_bucket_view=True,
        )
        wrapped.broadcast_buffers = False  # as an argument it has another name, or a warning, in newer torch
        # A lambda: torch inspects annotations, and those of this file are text.
        wrapped.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))
        self._wrapped = wrapped

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Sum one bucket; DistributedDataParallel's own hook would average."""
        flat = bucket.buffer()
        self._reduced.update(id(one) for one in bucket.parameters())
        self._lacked.update(id(one) for one in bucket.parameters() if one.grad is None)
        num_bytes = flat.numel() * flat.element_size()
        self.traffic.add_all_reduce(num_bytes, self.num_replicas)
        done = recorder.beside(num_bytes, "data")
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        if bucket.is_last():
            recorder.wait_inside("data")  # all gradients are there: what is left of backward is their sum

        def take(future: Any) -> torch.Tensor:
            done()
            if flat.is_cuda:
                work.wait()  # or else NCCL holds the bucket until its watchdog comes by
            return future.value()[0]  # type: ignore[no-any-return]

        return work.get_future().then(take)  # type: ignore[no-any-return]


class _Anchor(torch.autograd.Function):
    """A number that hangs on every parameter, with no gradient for any; calls ``begin`` before they get theirs.

    Made after the forward: backward takes what was made last first, so no parameter waits for it.
    """

    @staticmethod
    def forward(ctx: Any, begin: Callable[[], None], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.begin, ctx.num_parameters = begin, len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, ...]:
        ctx.begin()
        num_inputs: int = 1 + ctx.num_parameters
        return (None,) * num_inputs
