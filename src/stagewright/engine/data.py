"""The data axis for one stage a worker: replicas that each compute some samples, their gradients summed.

    replicated    DistributedDataParallel: buckets, all-reduced while backward goes on
    sharded       FSDP2: parameters, gradients and optimiser state divided, gathered unit by unit where they are used

A loss must carry its share of the whole batch (n_i / B), as everywhere in the engine; so gradients are *summed* and
equal serial's on the whole batch, however unequal the shares are. A replica without a sample must still take part:
give it any sample with the weight 0.

Unused parameters: replicas may use different ones (routing by data), in each step others. One that a replica did not
use counts as zeros there; one that no replica used has no gradient, as in serial. So each step ends with a mark for
every parameter, summed. Those that no replica used in the first step, which is reduced by hand, are summed by hand in
later ones, too, where they are used: nothing waits for them. FSDP2's units are gathered and summed in one order on all
replicas, whatever their samples use, for a thread runs through all of them:

    forward    ── E₁ unit 1 X₁ ── E₂ unit 2 X₂ ── … ── outputs
    backward   ── E₁        X₁ ── E₂        X₂ ── … ──           X gathers a unit, E sums and divides its gradients

Batch norm: each replica normalises its own samples; running statistics are averaged over replicas by weight after each
step. The running mean is then serial's; the running variance lacks what the replicas' means differ by (deferred mode in
``batch_norm`` has it). All replicas, checkpoints and comparisons see the same numbers. Other buffers are each replica's
own; those of replica 0 count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from stagewright.engine.batch_norm import tracked_norms
from stagewright.engine.gradients import BUCKET_BYTES, in_buckets
from stagewright.engine.recorder import recorder
from stagewright.engine.tensor_axis import Traffic, group_of
from stagewright.errors import UsageError

__all__ = ["DataParallel", "reaching", "wrap_data_parallel"]


def wrap_data_parallel(
    module: nn.Module,
    axis: Any,
    *,
    place: torch.device | None = None,
    shard: bool = False,
    units: Iterable[nn.Module] = (),
    bucket_bytes: int = BUCKET_BYTES,
    average_batch_norm: bool = True,
) -> DataParallel:
    """Make this worker's module one replica of the data axis, a process group or a mesh of one dimension.

    Every replica gets replica 0's parameters and buffers. ``place``: the device to run on, while parameters may still
    be on the host; None: where they are. ``shard``: FSDP2, with ``units`` gathered one by one and the rest as a whole;
    optimisers must be made afterwards, from ``parameters()`` of the result. ``average_batch_norm=False`` leaves
    running statistics to deferred mode.
    """
    if bucket_bytes < 1:
        raise UsageError(f"buckets of {bucket_bytes} bytes are too small; use 1 or more")
    group = group_of(axis)
    place = place or next(module.parameters()).device
    _broadcast(module, group, place)
    norms = tracked_norms(module) if average_batch_norm else []
    if shard:
        mesh = axis if isinstance(axis, DeviceMesh) else _mesh(group, place)
        return _Sharded(module, group, norms, mesh, units, place)
    return _Replicated(module, group, norms, bucket_bytes)


class DataParallel:
    """One replica: call it like the module, run backward, then ``synchronise``."""

    def __init__(self, module: nn.Module, group: Any, norms: list[Any]) -> None:
        self.module = module
        """The plain module; its parameters are what optimisers take."""
        self.group = group
        self.num_replicas: int = dist.get_world_size(group)
        self.index: int = dist.get_rank(group)
        self.traffic = Traffic()
        """What passed the data axis."""
        self._norms = norms

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What an optimiser takes."""
        return self.module.parameters()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Forward and backward in this block add to the gradients without exchanging them: all but the last chunk."""
        yield

    def synchronise(self, weight: float) -> None:
        """End a step: whatever backward has not exchanged; ``weight`` is this replica's share of the whole batch."""
        self._average_statistics(weight)

    @torch.no_grad()
    def _average_statistics(self, weight: float) -> None:
        """Running statistics of all batch norms, averaged over replicas by weight, in one message."""
        norms = [norm for norm in self._norms if norm.training]
        buffers = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
        if not buffers:
            return
        flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers]) * weight
        self._sum(flat)
        for buffer, value in zip(buffers, torch.split(flat, [one.numel() for one in buffers]), strict=True):
            buffer.copy_(value.view_as(buffer))

    def _sum(self, flat: torch.Tensor) -> torch.Tensor:
        num_bytes = flat.numel() * flat.element_size()
        self.traffic.add_all_reduce(num_bytes, self.num_replicas)
        start = recorder.now()
        dist.all_reduce(flat, group=self.group)
        recorder.add("collective", start, num_bytes=num_bytes, note="data")
        return flat

    def _used(self, trained: list[nn.Parameter], lacked: set[int]) -> list[nn.Parameter]:
        """Those that any replica used; of the others, zeros that stood for a gradient are taken away.

        ``lacked``: which had none on this replica, whatever they have by now.
        """
        had = [one.grad is not None and id(one) not in lacked for one in trained]
        if not had:
            return []
        marks = self._sum(torch.tensor(had, dtype=torch.int64).to(trained[0].device))
        if all(had):
            return trained  # without reading the sum: a GPU need not be waited for
        counts = marks.tolist()
        for one, count in zip(trained, counts, strict=True):
            if not count:
                one.grad = None
        return [one for one, count in zip(trained, counts, strict=True) if count]

    def _sum_gradients(self, parameters: Iterable[nn.Parameter], bucket_bytes: int) -> None:
        """Sum gradients by hand; one that is missing here counts as zeros."""
        for bucket in in_buckets(parameters, bucket_bytes):
            flat = torch.cat([(torch.zeros_like(one) if one.grad is None else one.grad).reshape(-1) for one in bucket])
            self._sum(flat)
            for one, value in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
                if one.grad is None:
                    one.grad = torch.empty_like(one)
                one.grad.copy_(value.view_as(one))


class _Replicated(DataParallel):
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
        return _hung(outputs, anchor)

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


class _Held(torch.autograd.Function):
    """A value as it is, hung on an anchor."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.detach()  # not the value itself, which could then not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _hung(outputs: Any, anchor: torch.Tensor) -> Any:
    """Outputs through each of which backward reaches an anchor.

    If none of them wants a gradient, since these samples used no parameter, all do: other replicas wait for this one's.
    """
    every = not _trains(outputs)

    def held(one: torch.Tensor) -> Any:
        wanted = one.requires_grad or (every and one.is_floating_point())
        return _Held.apply(one, anchor) if wanted else one  # type: ignore[no-untyped-call]

    return tree_map_only(torch.Tensor, held, outputs) if anchor.requires_grad else outputs


def reaching(loss: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    """A loss from which backward always reaches the outputs: other replicas wait for this one's sums.

    One may be constant for some samples, where nothing is to be learned from them.
    """

    def reached(outputs: Any, target: Any) -> torch.Tensor:
        value = loss(outputs, target)
        if value.requires_grad or not torch.is_grad_enabled():
            return value
        wanted = [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad]
        return _Constant.apply(value, *wanted) if wanted else value  # type: ignore[no-untyped-call]

    return reached


class _Constant(torch.autograd.Function):
    """A number as it is; backward gives zeros to values that it does not depend on."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        ctx.zeros = [one.new_zeros(()).expand(one.shape) for one in values]
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        return None, *ctx.zeros


class _Knot(torch.autograd.Function):
    """Values as they are; ``then`` is called when backward has all of their gradients, or knows that there are none."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], Any], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.then = then
        return tuple(one.detach() for one in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        ctx.then()
        return None, *gradients


class _Sharded(DataParallel):
    """FSDP2: the units and, around them, what is left."""

    def __init__(
        self,
        module: nn.Module,
        group: Any,
        norms: list[Any],
        mesh: DeviceMesh,
        units: Iterable[nn.Module],
        place: torch.device,
    ) -> None:
        super().__init__(module, group, norms)
        self._place = place
        # FSDP2 has no shards of a single number: those stay whole, and are summed by hand.
        self._scalars = [one for one in module.parameters() if one.ndim == 0]
        for scalar in self._scalars:
            scalar.data = scalar.data.to(place)
        ignored = set(self._scalars)
        self._groups: list[FSDPModule] = []
        for unit in _own_units(module, units):
            self._groups.append(fully_shard(unit, mesh=mesh, ignored_params=ignored))
        self._groups.append(fully_shard(module, mesh=mesh, ignored_params=ignored))
        self._lacked: set[int] = set()
        self._thread: torch.Tensor | None = None
        self.run_again: list[Callable[[], Any]] = []
        """How the forward that is running now is run again; called when backward comes to its last unit.

        Units gather their parameters for it, which all replicas must do at the same moment, whatever their samples use.
        """
        for one in self._groups:
            one.set_gradient_divide_factor(1.0)
            one.set_force_sum_reduction_for_comms(True)
            one.set_custom_all_gather(_Recorded(_all_gather, self))  # type: ignore[arg-type]
            scatter = _reduce_scatter if place.type != "cpu" else _exchange_and_sum
            one.set_custom_reduce_scatter(_Recorded(scatter, self))  # type: ignore[arg-type]
            self._fill(one)
            one._get_fsdp_state()._register_pre_backward_hook = lambda output: output  # type: ignore[method-assign]
        for one in self._groups[:-1]:
            self._bind(one)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._thread = torch.zeros((), device=self._place)
        self.run_again = []
        try:
            outputs = self.module(*args, **kwargs)
            self._begin(self.module, outputs)
            self._tie(lambda: self._groups[-1]._get_fsdp_state()._pre_backward(None), ())  # type: ignore[arg-type]
            thread = self._thread
        finally:
            self._thread = None  # units that run again for their backward are no part of it
        return _hung(outputs, thread)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        root = self._groups[-1]
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def synchronise(self, weight: float) -> None:
        trained = [one for one in self.module.parameters() if one.requires_grad]
        used = self._used(trained, self._lacked)
        self._lacked.clear()
        whole = {id(one) for one in self._scalars}
        self._sum_gradients([one for one in used if id(one) in whole], BUCKET_BYTES)
        self._average_statistics(weight)

    def _bind(self, unit: FSDPModule) -> None:
        """Put a unit on the thread, which tells it when to gather its parameters and when to sum their gradients.

        By itself, FSDP2 does so when gradients reach a unit's outputs and inputs, which depends on the samples.
        """
        state: Any = unit._get_fsdp_state()
        group = state._fsdp_param_group
        if group is None:  # nothing but single numbers
            return
        group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._thread is None:
                return None
            self._begin(module, (args, kwargs))
            return self._tie(group.post_backward, (args, kwargs))

        def leave(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
            if self._thread is None:
                return outputs
            again = self.run_again

            def gather() -> None:
                state._pre_backward(None)
                while again:
                    again.pop()()

            return self._tie(gather, outputs)

        cast(nn.Module, unit).register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        cast(nn.Module, unit).register_forward_hook(leave)

    def _begin(self, module: nn.Module, values: Any) -> None:
        """From the first on that backward may reach, modules are on the thread: not those of a frozen beginning."""
        assert self._thread is not None
        if not self._thread.requires_grad and (_trains(values) or _trains(list(module.parameters()))):
            self._thread = torch.zeros_like(self._thread, requires_grad=True)

    def _tie(self, then: Callable[[], Any], values: Any) -> Any:
        """These values, through a knot with the thread."""
        if self._thread is None or not self._thread.requires_grad:
            return values
        leaves, spec = tree_flatten(values)
        places = [at for at, one in enumerate(leaves) if isinstance(one, torch.Tensor) and one.requires_grad]
        knot = _Knot.apply(then, self._thread, *(leaves[at] for at in places))  # type: ignore[no-untyped-call]
        self._thread = knot[0]
        for at, one in zip(places, knot[1:], strict=True):
            leaves[at] = one
        return tree_unflatten(leaves, spec)

    def _fill(self, unit: FSDPModule) -> None:
        """Zeros in place of missing gradients before a unit's are summed: FSDP2 sums what is there, and takes it for
        the same parameters on all replicas.

        A setting for this came with torch 2.13, and does not tell what was missing.
        """
        group: Any = unit._get_fsdp_state()._fsdp_param_group
        if group is None:  # nothing of its own beside its units' parameters
            return
        scatter = group.post_backward

        def post_backward(*unused: Any) -> None:
            for one in group.fsdp_params if group.reduce_grads else ():
                whole, shard = one.unsharded_param, one.sharded_param
                if whole.grad is not None or one.unsharded_accumulated_grad is not None:
                    self._lacked.discard(id(shard))
                elif whole.requires_grad:
                    whole.grad = torch.zeros_like(whole)
                    if shard.grad is None:
                        self._lacked.add(id(shard))
            scatter(*unused)

        group.post_backward = post_backward


class _Recorded:
    """FSDP2's collective as it is, counted, with its time: the CPU waits for it, a GPU runs it beside computing."""

    def __init__(self, run: Callable[..., Any], replica: DataParallel) -> None:
        self._run, self._traffic, self._num_replicas = run, replica.traffic, replica.num_replicas

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        start = recorder.now()
        work = self._run(output_tensor, input_tensor, *args, **options)
        largest = max(output_tensor, input_tensor, key=torch.Tensor.numel)
        stream = "collective" if largest.is_cuda else "compute"
        num_bytes = largest.numel() * largest.element_size()
        recorder.add("collective", start, stream=stream, num_bytes=num_bytes, note="data")
        self._traffic.add_half(num_bytes, self._num_replicas)
        return work


# Newer torch has them under new names, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _exchange_and_sum(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *, group: Any, **_: Any) -> None:
    """A reduce-scatter. Gloo's own sums everything everywhere and throws the rest away: twice the bytes."""
    parts = torch.empty_like(input_tensor)
    dist.all_to_all_single(parts, input_tensor, group=group)
    torch.sum(parts.view(-1, output_tensor.numel()), dim=0, out=output_tensor.view(-1))


def _trains(values: Any) -> bool:
    """Whether any of these tensors wants a gradient."""
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves(values))


def _own_units(module: nn.Module, units: Iterable[nn.Module]) -> list[nn.Module]:
    """Units that can be gathered alone: each once, none inside another, none that shares a parameter with the rest.

    FSDP2 would untie a weight that two of its groups hold (GPT-2's embedding and head); the root's group keeps it.
    """
    listed = list(dict.fromkeys(units))
    inner = {id(below) for unit in listed for below in unit.modules() if below is not unit}
    uses: dict[int, int] = {}
    for one in module.modules():
        for parameter in one.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1

    def alone(unit: nn.Module) -> bool:
        own: dict[int, int] = {}
        for one in unit.modules():
            for parameter in one.parameters(recurse=False):
                own[id(parameter)] = own.get(id(parameter), 0) + 1
        return bool(own) and all(uses.get(identity) == count for identity, count in own.items())

    return [unit for unit in listed if unit is not module and id(unit) not in inner and alone(unit)]


@torch.no_grad()
def _broadcast(module: nn.Module, group: Any, place: torch.device) -> None:
    """Replica 0's parameters and buffers, to all."""
    tensors = {id(one): one for one in (*module.parameters(), *module.buffers())}
    for tensor in tensors.values():
        held = tensor.detach()
        dense = held.to(place).contiguous()
        dist.broadcast(dense, group=group, group_src=0)
        if dense is not held:
            held.copy_(dense)


def _mesh(group: Any, place: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(group, place.type, mesh_dim_names=("data",))
