"""A torch process group for workers that share memory: each writes its tensor once and reads the others'.

    GPU_BACKEND    shares of one GPU: NCCL refuses two workers on one GPU, and hangs between MPS clients
    HOST_BACKEND   CPU workers of one machine: Gloo sends every byte through sockets

    all-reduce       small: everyone reads everything; large: everyone sums its part, then all gather the parts
    send, receive    written at once, read when the receiver waits

Values are read (``exchange``) in the order of ranks, so that sums are equal on all workers to the last bit. Tensors of
another kind of device, and very large ones of the host, go through Gloo. All calls return as soon as the work is in a
stream of the GPU (collectives in one of their own, which ``wait`` lets the current one wait for); on a CPU it is done.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stagewright.shared_memory.cuda import CudaMemory
from stagewright.shared_memory.exchange import SharedMemoryExchange
from stagewright.shared_memory.host import HostMemory
from stagewright.shared_memory.slots import SharedMemory

GPU_BACKEND = "stagewright_ipc"
"""Name of the backend of shares of a GPU for ``init_process_group``, after `register`."""
HOST_BACKEND = "stagewright_host"
"""Name of the backend of CPU workers of one machine, after `register`."""

# torch's stubs name arguments that its callers pass by position, and lack half of the methods.
_c10d: Any = torch._C._distributed_c10d
_ProcessGroup: Any = dist.ProcessGroup
_LARGE_BYTES = 1 << 20
_MOST_UNREAD = 1  # tensors that another worker may not have read when a collective writes one more
_MOST_BYTES_ON_HOST = 32 << 20  # larger tensors are not held a second time
_COMBINE: dict[Any, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.AVG: torch.Tensor.add_,
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
    dist.ReduceOp.MAX: lambda total, value: torch.maximum(total, value, out=total),
    dist.ReduceOp.MIN: lambda total, value: torch.minimum(total, value, out=total),
}


def register(backend: str) -> str:
    """Register one of the backends with torch, once, and return its name."""
    if backend.upper() not in dist.Backend._plugins:
        make, devices = {GPU_BACKEND: (_on_gpu, ["cpu", "cuda"]), HOST_BACKEND: (_on_host, ["cpu"])}[backend]
        dist.Backend.register_backend(backend, make, devices=devices)
    return backend


def _on_gpu(store: Any, rank: int, size: int, timeout: timedelta) -> SharedMemoryGroup:
    memory = CudaMemory(torch.device("cuda", torch.cuda.current_device()))
    return SharedMemoryGroup(store, rank, size, timeout, memory, GPU_BACKEND)


def _on_host(store: Any, rank: int, size: int, timeout: timedelta) -> SharedMemoryGroup:
    return SharedMemoryGroup(store, rank, size, timeout, HostMemory(), HOST_BACKEND)


class _Sent:
    """A send: the tensor was copied, in stream order."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Receive:
    """A receive, which reads when it is waited for, after the receives from the same worker that were posted before."""

    def __init__(self, group: SharedMemoryGroup, tensor: torch.Tensor, source: int) -> None:
        self._group, self._tensor, self._source = group, tensor, source
        self.is_done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        queue = self._group.posted[self._source]
        while not self.is_done:
            queue.pop(0).read()
        return True

    def read(self) -> None:
        """Read the next tensor from the worker."""
        self._group.read_into(self._tensor, self._source)
        self.is_done = True

    def is_completed(self) -> bool:
        queue = self._group.posted[self._source]
        if not self.is_done and queue[0] is self and self._group.exchange.is_written(self._source):
            self.wait()
        return self.is_done


class SharedMemoryGroup(_ProcessGroup):  # type: ignore[misc]
    """Collectives and P2P by shared memory for tensors of one device; Gloo for others."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, memory: SharedMemory, backend: str
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._memory, self._backend = rank, size, memory, backend
        self.exchange = SharedMemoryExchange(_c10d.PrefixStore("ipc", store), rank, size, timeout, memory)
        self._gloo = _c10d.ProcessGroupGloo(_c10d.PrefixStore("gloo", store), rank, size, timeout)
        self._others = [other for other in range(size) if other != rank]
        self.posted: dict[int, list[_Receive]] = {other: [] for other in range(size)}
        self._name = ""

    def getBackendName(self) -> str:
        return self._backend

    @property
    def group_name(self) -> str:
        """The name of this group in torch, also while torch destroys it."""
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    def shutdown(self) -> None:
        self.exchange.finish()

    def abort(self) -> None:
        self.exchange.close()

    def read_into(self, tensor: torch.Tensor, source: int) -> None:
        """Copy the next tensor that a worker has written for this one."""
        with self.exchange.reading(source, tensor) as value:
            tensor.copy_(value)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        if self._uses_gloo(tensors[0]):
            return self._gloo.send(tensors, dst, tag)
        self.exchange.write(tensors[0], [dst])
        return _Sent()

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        if self._uses_gloo(tensors[0]):
            return self._gloo.recv(tensors, src, tag)
        receive = _Receive(self, tensors[0], src)
        self.posted[src].append(receive)
        return receive

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if self._uses_gloo(tensors[0]):
            return self._gloo.broadcast(tensors, opts)
        if self._rank == opts.rootRank:
            self.exchange.write(tensors[0], self._others, _MOST_UNREAD)
        else:
            self.read_into(tensors[0], opts.rootRank)
        return _finished(tensors)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or _c10d.AllreduceOptions()
        if self._uses_gloo(tensors[0]):
            return self._gloo.allreduce(tensors, opts)
        with self._memory.beside_compute(tensors):
            for tensor in tensors:
                self._all_reduce(tensor, opts.reduceOp)
            return _finished(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        if self._uses_gloo(inputs[0]):
            return self._gloo.allgather(outputs, inputs, opts or _c10d.AllgatherOptions())
        with self._memory.beside_compute([*outputs[0], *inputs]):
            self._all_gather(outputs[0], inputs[0])
            return _finished(outputs[0])

    def all_gather_single(self, output: torch.Tensor, value: torch.Tensor, opts: Any = None) -> Any:
        if self._uses_gloo(value):
            return self._gloo.allgather([list(output.view(self._size, *value.shape).unbind())], [value])
        with self._memory.beside_compute([output, value]):
            self._all_gather(_parts(output, [value.numel()] * self._size), value)
            return _finished([output])

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        if self._uses_gloo(outputs[0]):
            return self._gloo.reduce_scatter(outputs, inputs, opts or _c10d.ReduceScatterOptions())
        with self._memory.beside_compute([*outputs, *inputs[0]]):
            self._reduce_scatter(outputs[0], inputs[0], opts.reduceOp if opts else dist.ReduceOp.SUM)
            return _finished(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, value: torch.Tensor, opts: Any = None) -> Any:
        if self._uses_gloo(value):
            parts = list(value.view(self._size, *output.shape).unbind())
            return self._gloo.reduce_scatter([output], [parts], opts or _c10d.ReduceScatterOptions())
        parts = _parts(value, [output.numel()] * self._size)
        with self._memory.beside_compute([output, value]):
            self._reduce_scatter(output, parts, opts.reduceOp if opts else dist.ReduceOp.SUM)
            return _finished([output])

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        if self._is_elsewhere(inputs[0]):
            return self._gloo.alltoall(outputs, inputs, opts or _c10d.AllToAllOptions())
        with self._memory.beside_compute([*outputs, *inputs]):
            self._all_to_all(outputs, inputs)
            return _finished(outputs)

    def alltoall_base(
        self,
        output: torch.Tensor,
        value: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        if self._is_elsewhere(value):
            return self._gloo.alltoall_base(output, value, output_sizes, input_sizes, opts or _c10d.AllToAllOptions())
        with self._memory.beside_compute([output, value]):
            self._all_to_all(self._rows(output, output_sizes), self._rows(value, input_sizes))
            return _finished([output])

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        if self._uses_gloo(inputs[0]):
            return self._gloo.gather(outputs, inputs, opts)
        if self._rank != opts.rootRank:
            self.exchange.write(inputs[0], [opts.rootRank], _MOST_UNREAD)
            return _finished([])
        for source, output in enumerate(outputs[0]):
            if source == self._rank:
                output.copy_(inputs[0])
            else:
                self.read_into(output, source)
        return _finished(outputs[0])

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Any:
        if self._uses_gloo(outputs[0]):
            return self._gloo.scatter(outputs, inputs, opts)
        if self._rank == opts.rootRank:
            for target in self._others:
                self.exchange.write(inputs[0][target], [target], _MOST_UNREAD)
            outputs[0].copy_(inputs[0][self._rank])
        else:
            self.read_into(outputs[0], opts.rootRank)
        return _finished(outputs)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if self._uses_gloo(tensors[0]):
            return self._gloo.reduce(tensors, opts)
        if self._rank != opts.rootRank:
            self.exchange.write(tensors[0], [opts.rootRank], _MOST_UNREAD)
        else:
            self._sum_into(tensors[0], tensors[0], opts.reduceOp)
        return _finished(tensors)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        works = [self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)]
        return _wait_for_all(works)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return _wait_for_all(works)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return _wait_for_all([self.allreduce([tensor], opts) for tensor in tensors])

    # The names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    all_to_all_single = alltoall_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _uses_gloo(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, which has the same size on all workers, goes through Gloo."""
        return self._is_elsewhere(tensor) or (not tensor.is_cuda and tensor.nbytes > _MOST_BYTES_ON_HOST)

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != self._memory.device.type

    def _rows(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Split a tensor for or from each worker; evenly without sizes."""
        return list(torch.split(tensor, list(sizes) or [tensor.shape[0] // self._size] * self._size))

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        if self._size > 2 and tensor.nbytes >= _LARGE_BYTES and tensor.is_contiguous():
            each = -(-tensor.numel() // self._size)
            bounds = [min(each * rank, tensor.numel()) for rank in range(self._size + 1)]
            parts = _parts(tensor, [end - start for start, end in itertools.pairwise(bounds)])
            own = torch.empty_like(parts[self._rank])
            self._reduce_scatter(own, parts, op)
            self._all_gather(parts, own)
            return
        self.exchange.write(tensor, self._others, _MOST_UNREAD)
        self._sum_into(tensor, tensor, op)

    def _all_gather(self, outputs: Sequence[torch.Tensor], value: torch.Tensor) -> None:
        self.exchange.write(value, self._others, _MOST_UNREAD)
        for source, output in enumerate(outputs):
            if source == self._rank:
                output.copy_(value.view_as(output))
            else:
                self.read_into(output, source)

    def _reduce_scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: Any) -> None:
        for target in self._others:
            self.exchange.write(parts[target], [target], _MOST_UNREAD)
        self._sum_into(output, parts[self._rank], op)

    @torch.no_grad()
    def _sum_into(self, output: torch.Tensor, value: torch.Tensor, op: Any) -> None:
        """Combine this worker's value with those that the others have written, in the order of ranks."""
        combine = _COMBINE.get(op if isinstance(op, dist.ReduceOp.RedOpType) else op.op)
        if combine is None:
            raise NotImplementedError(f"{op} is not supported between workers that share memory")
        if self._size == 2:  # in either order, without a copy
            with self.exchange.reading(1 - self._rank, value) as other:
                combine(output.copy_(value.view_as(output)) if output is not value else output, other.view_as(output))
        else:
            total = torch.empty_like(value) if output is value else output.view_as(value)
            for source in range(self._size):
                own = nullcontext(value) if source == self._rank else self.exchange.reading(source, value)
                with own as term:
                    total.copy_(term) if source == 0 else combine(total, term)
            if output is value:
                output.copy_(total)
        if op == dist.ReduceOp.AVG:
            output.div_(self._size)

    def _all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        for target in self._others:
            self.exchange.write(inputs[target], [target], _MOST_UNREAD)
        for source, output in enumerate(outputs):
            if source == self._rank:
                output.copy_(inputs[source])
            else:
                self.read_into(output, source)


def _parts(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return consecutive parts of a contiguous tensor, flat."""
    return list(torch.split(tensor.view(-1), list(sizes)))


def _finished(tensors: Sequence[torch.Tensor]) -> Any:
    """Return the handle of work that is in the current stream already."""
    devices: list[Any] = [tensor.device for tensor in tensors if tensor.is_cuda]
    future: Any = torch.futures.Future(devices=devices[:1] or None)
    future.set_result(list(tensors))
    return _c10d._create_work_from_future(future)


def _wait_for_all(works: Sequence[Any]) -> Any:
    return functools.reduce(lambda done, work: (done.wait(), work)[1], works)
