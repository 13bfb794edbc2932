"""DDP replicas: DistributedDataParallel, with gradient buckets all-reduced during backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stagewright.engine.data.data_parallel import DataParallelReplica
from stagewright.engine.data.keep_differentiable import keep_outputs_differentiable
from stagewright.engine.worker.recorder import recorder


class DDPReplica(DataParallelReplica):
    """A replica that wraps its module in DistributedDataParallel after the first step."""

    def __init__(
        self, module: nn.Module, group: Any, norms: list[Any], bucket_bytes: int, divided: Container[int] = ()
    ) -> None:
        """``divided``: identities of parameters that replicas do not have in common."""
        super().__init__(module, group, norms)
        self._bucket_bytes = bucket_bytes
        self._wrapped: DistributedDataParallel | None = None
        self._trained = [
            parameter for parameter in module.parameters() if parameter.requires_grad and id(parameter) not in divided
        ]
        self._accumulates = False
        self._in_buckets: set[int] = set()
        self._reduced: set[int] = set()
        self._unused_here: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._wrapped is None or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        with self._wrapped.no_sync():  # otherwise the next backward all-reduces, even another micro-batch's
            outputs = self._wrapped(*args, **kwargs)
        return outputs if self._accumulates else self._with_all_reduce(outputs)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def _with_all_reduce(self, outputs: Any) -> Any:
        """Make the backward of these outputs all-reduce the gradients.

        Backward reaches every parameter through an anchor. A parameter that the outputs don't depend on gets no
        gradient by that, but DistributedDataParallel marks it as ready and does not wait for it.
        """
        assert self._wrapped is not None
        reducer = self._wrapped.reducer
        anchor = _Anchor.apply(lambda: reducer.prepare_for_backward([]), *self._trained)  # type: ignore[no-untyped-call]
        return keep_outputs_differentiable(outputs, anchor)

    def synchronize(self, weight: float) -> None:
        assert self._reduced == self._in_buckets, "backward has not reached every parameter"
        used = self._used_parameters(self._trained, self._unused_here)
        self._reduced.clear()
        self._unused_here.clear()
        outside = [parameter for parameter in used if id(parameter) not in self._in_buckets]
        self._all_reduce_gradients(outside, self._bucket_bytes)
        if self._wrapped is None and used:
            self._wrap(used)
        self._average_statistics(weight)

    def _wrap(self, used: list[nn.Parameter]) -> None:
        """Wrap the module, with buckets for the parameters that the first step used."""
        self._in_buckets = {id(parameter) for parameter in used}
        named = self.module.named_parameters(remove_duplicate=False)
        ignored = [name for name, value in named if value.requires_grad and id(value) not in self._in_buckets]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            self.module, ignored
        )
        wrapped = DistributedDataParallel(
            self.module,
            process_group=self.group,
            init_sync=False,
            bucket_cap_mb=self._bucket_bytes / (1 << 20),
            gradient_as_bucket_view=True,
        )
        wrapped.broadcast_buffers = False  # the argument is renamed or deprecated in newer torch
        # A lambda: torch inspects annotations, which are strings in this file.
        wrapped.register_comm_hook(None, lambda _, bucket: self._all_reduce_bucket(bucket))
        self._wrapped = wrapped

    def _all_reduce_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Sum one bucket over replicas; the default hook of DistributedDataParallel would average."""
        flat = bucket.buffer()
        self._reduced.update(id(parameter) for parameter in bucket.parameters())
        self._unused_here.update(id(parameter) for parameter in bucket.parameters() if parameter.grad is None)
        self.payload_bytes += flat.nbytes
        done = recorder.begin_overlapped(flat.nbytes, "data")
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        if bucket.is_last():
            recorder.wait_inside("data")  # all gradients are ready: the rest of backward waits for the all-reduces

        def finish(future: Any) -> torch.Tensor:
            done()
            if flat.is_cuda:
                work.wait()  # otherwise NCCL holds the bucket until its watchdog runs
            return future.value()[0]  # type: ignore[no-any-return]

        return work.get_future().then(finish)  # type: ignore[no-any-return]


class _Anchor(torch.autograd.Function):
    """A scalar that depends on every parameter without a gradient for any; calls ``begin`` first in backward.

    Created after the forward: autograd runs the newest node first, so no parameter waits for it.
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
