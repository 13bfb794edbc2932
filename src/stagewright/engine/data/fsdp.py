"""Replicas that hold a part of the parameters each: FSDP2.

Its units are gathered and summed in one order on all replicas, whatever their samples use, for a thread runs through
all of them:

    forward    ── E₁ unit 1 X₁ ── E₂ unit 2 X₂ ── … ── outputs
    backward   ── E₁        X₁ ── E₂        X₂ ── … ──           X gathers a unit, E sums and divides its gradients
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from stagewright.engine.data.anchors import hung, trains
from stagewright.engine.data.data_parallel import DataParallel
from stagewright.engine.data.gradients import BUCKET_BYTES
from stagewright.engine.worker.recorder import recorder
from stagewright.graph.stage import Stage

__all__ = ["Sharded"]

NEW_FSDP = TorchVersion(torch.__version__) >= "2.13"
"""Whether FSDP2 takes containers of modules that have a forward of their own."""


class Sharded(DataParallel):
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
        self._given: list[list[tuple[torch.Tensor, torch.Tensor, int]]] = []
        """For each unit that runs now: what it was given, what it took that for, and how often that had changed."""
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
            self._given.clear()
        return hung(outputs, thread)

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
            tied = self._tie(group.post_backward, (args, kwargs))
            pairs = zip(tree_leaves((args, kwargs)), tree_leaves(tied), strict=True)
            self._given.append([(value, own, own._version) for value, own in pairs if value is not own])
            return tied

        def leave(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
            if self._thread is None:
                return outputs
            for value, own, version in self._given.pop():
                if own._version != version:  # changed in place: for autograd, too, what was given is that from now on
                    with _unsafe_preserve_version_counter(own):  # it has these numbers already
                        value.copy_(own)
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
        if not self._thread.requires_grad and (trains(values) or trains(list(module.parameters()))):
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


def _own_units(module: nn.Module, units: Iterable[nn.Module]) -> list[nn.Module]:
    """Units that can be gathered alone: each once, none inside another, none that shares a parameter with the rest.

    FSDP2 would untie a weight that two of its groups hold (GPT-2's embedding and head); the root's group keeps it.
    So it keeps one that the code between units reads.
    """
    listed = list(dict.fromkeys(units))
    inner = {id(below) for unit in listed for below in unit.modules() if below is not unit}
    uses = {id(parameter): 1 for parameter in _read_between(module)}
    for one in module.modules():
        for parameter in one.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1

    def alone(unit: nn.Module) -> bool:
        own: dict[int, int] = {}
        for one in unit.modules():
            for parameter in one.parameters(recurse=False):
                own[id(parameter)] = own.get(id(parameter), 0) + 1
        return bool(own) and all(uses.get(identity) == count for identity, count in own.items())

    def taken(unit: nn.Module) -> bool:
        """Older torch takes no list or dictionary of modules, whatever forward it has (experts, say)."""
        return NEW_FSDP or not isinstance(unit, nn.ModuleList | nn.ModuleDict)

    return [unit for unit in listed if unit is not module and id(unit) not in inner and taken(unit) and alone(unit)]


def _read_between(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that a stage's own code reads, not through the unit that they are in."""
    if not isinstance(module, Stage):
        return []
    own = dict(module.named_parameters(remove_duplicate=False))
    read = (str(node.target) for node in module.graph.nodes if node.op == "get_attr")
    return [own[name] for name in read if name in own]
