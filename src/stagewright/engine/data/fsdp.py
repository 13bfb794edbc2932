"""FSDP2 replicas: each holds a shard of the parameters, gradients and optimizer states.

All replicas must all-gather and reduce-scatter their units in the same order, even if their samples use different
units. An autograd chain through all units, the *thread*, fixes that order:

    forward    ── E₁ unit 1 X₁ ── E₂ unit 2 X₂ ── … ── outputs
    backward   ── E₁        X₁ ── E₂        X₂ ── … ──    X all-gathers a unit's parameters,
                                                          E reduce-scatters its gradients
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.torch_version import TorchVersion

from stagewright import structure
from stagewright.engine.data.data_parallel import DataParallelReplica
from stagewright.engine.data.gradient_allreduce import BUCKET_BYTES
from stagewright.engine.data.keep_differentiable import any_requires_grad, keep_outputs_differentiable
from stagewright.engine.worker.recorder import recorder
from stagewright.graph.stage import Stage

NEW_FSDP = TorchVersion(torch.__version__) >= "2.13"
"""Whether FSDP2 accepts module containers that define a forward."""


class FSDPReplica(DataParallelReplica):
    """A module under FSDP2: one parameter group per unit, and one for the rest."""

    def __init__(
        self,
        module: nn.Module,
        group: Any,
        norms: list[Any],
        mesh: DeviceMesh,
        units: Iterable[nn.Module],
        device: torch.device,
        read_weights: Callable[[nn.Module], None] | None = None,
    ) -> None:
        super().__init__(module, group, norms)
        self._device = device
        # FSDP2 can't shard a scalar parameter: scalars stay replicated and are all-reduced after backward.
        self._scalars = [parameter for parameter in module.parameters() if parameter.ndim == 0]
        for scalar in self._scalars:
            scalar.data = scalar.data.to(device)
        ignored = set(self._scalars)
        members = [*_separable_units(module, units), module]
        self._groups: list[FSDPModule] = []
        for unit in members:
            if read_weights is not None:
                read_weights(unit)
            self._groups.append(fully_shard(unit, mesh=mesh, ignored_params=ignored))
        self._unused_here: set[int] = set()
        self._thread: torch.Tensor | None = None
        self._inputs: list[list[tuple[torch.Tensor, torch.Tensor, int]]] = []
        """For each running unit: its inputs, the tensors they were replaced by, and the version counters of these."""
        self.recompute_callbacks: list[Callable[[], Any]] = []
        """Recompute the running forward; called when backward reaches its last unit.

        Units all-gather their parameters for it, which all replicas must do at the same point, even if their samples
        use different units.
        """
        for fsdp_module in self._groups:
            fsdp_module.set_gradient_divide_factor(1.0)
            fsdp_module.set_force_sum_reduction_for_comms(True)
            fsdp_module.set_custom_all_gather(_RecordedCollective(all_gather, self))  # type: ignore[arg-type]
            scatter = reduce_scatter if device.type != "cpu" else _all_to_all_and_sum
            fsdp_module.set_custom_reduce_scatter(_RecordedCollective(scatter, self))  # type: ignore[arg-type]
            self._fill_missing_gradients(fsdp_module)
            fsdp_module._get_fsdp_state()._register_pre_backward_hook = lambda output: output  # type: ignore[method-assign]
        for fsdp_module in self._groups[:-1]:
            self._attach_to_thread(fsdp_module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._thread = torch.zeros((), device=self._device)
        self.recompute_callbacks = []
        try:
            outputs = self.module(*args, **kwargs)
            self._start_thread(self.module, outputs)
            self._link(lambda: self._groups[-1]._get_fsdp_state()._pre_backward(None), ())  # type: ignore[arg-type]
            thread = self._thread
        finally:
            self._thread = None  # units recomputed in backward are not on the thread
            self._inputs.clear()
        return keep_outputs_differentiable(outputs, thread)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        root = self._groups[-1]
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def synchronize(self, weight: float) -> None:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        used = self._used_parameters(trained, self._unused_here)
        self._unused_here.clear()
        scalars = {id(scalar) for scalar in self._scalars}
        self._all_reduce_gradients([parameter for parameter in used if id(parameter) in scalars], BUCKET_BYTES)
        self._average_statistics(weight)

    def _attach_to_thread(self, unit: FSDPModule) -> None:
        """Let the thread trigger the unit's all-gather and reduce-scatter in backward.

        By default FSDP2 triggers them when gradients reach a unit's outputs and inputs, which depends on the samples.
        """
        state: Any = unit._get_fsdp_state()
        group = state._fsdp_param_group
        if group is None:  # the unit has only scalar parameters
            return
        group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._thread is None:
                return None
            self._start_thread(module, (args, kwargs))
            linked = self._link(group.post_backward, (args, kwargs))
            pairs = zip(structure.leaves((args, kwargs)), structure.leaves(linked), strict=True)
            self._inputs.append([(value, copy, copy._version) for value, copy in pairs if value is not copy])
            return linked

        def leave(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
            if self._thread is None:
                return outputs
            for value, copy, version in self._inputs.pop():
                if copy._version != version:  # changed in place: autograd must see the change in the original input
                    with _unsafe_preserve_version_counter(copy):  # it shares memory, so it has the values already
                        value.copy_(copy)
            callbacks = self.recompute_callbacks

            def gather() -> None:
                state._pre_backward(None)
                while callbacks:
                    callbacks.pop()()

            return self._link(gather, outputs)

        cast(nn.Module, unit).register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        cast(nn.Module, unit).register_forward_hook(leave)

    def _start_thread(self, module: nn.Module, values: Any) -> None:
        """Start the thread at the first module that backward may reach: frozen leading modules are not on it."""
        assert self._thread is not None
        if not self._thread.requires_grad and (
            any_requires_grad(values) or any_requires_grad(list(module.parameters()))
        ):
            self._thread = torch.zeros_like(self._thread, requires_grad=True)

    def _link(self, callback: Callable[[], Any], values: Any) -> Any:
        """Add a node to the thread that all differentiable values pass through; it runs ``callback`` in backward."""
        if self._thread is None or not self._thread.requires_grad:
            return values
        leaves, spec = structure.flatten(values)
        indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        node = _ThreadNode.apply(callback, self._thread, *(leaves[i] for i in indices))  # type: ignore[no-untyped-call]
        self._thread = node[0]
        for i, leaf in zip(indices, node[1:], strict=True):
            leaves[i] = leaf
        return spec.unflatten(leaves)

    def _fill_missing_gradients(self, unit: FSDPModule) -> None:
        """Fill missing gradients of a unit with zeros before they are reduce-scattered.

        FSDP2 sums the gradients that exist, and assumes that they belong to the same parameters on all replicas. The
        setting for this in torch 2.13 does not report which gradients were missing.
        """
        group: Any = unit._get_fsdp_state()._fsdp_param_group
        if group is None:  # no parameters outside of its units
            return
        scatter = group.post_backward

        def post_backward(*unused: Any) -> None:
            for parameter in group.fsdp_params if group.reduce_grads else ():
                full, shard = parameter.unsharded_param, parameter.sharded_param
                if full.grad is not None or parameter.unsharded_accumulated_grad is not None:
                    self._unused_here.discard(id(shard))
                elif full.requires_grad:
                    full.grad = torch.zeros_like(full)
                    if shard.grad is None:
                        self._unused_here.add(id(shard))
            scatter(*unused)

        group.post_backward = post_backward


class _ThreadNode(torch.autograd.Function):
    """Identity; runs ``callback`` when backward has the gradients of all outputs, or knows that they have none."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], Any], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.callback = callback
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        ctx.callback()
        return None, *gradients


class _RecordedCollective:
    """A collective of FSDP2 whose time and traffic are recorded: blocking on CPUs, asynchronous on GPUs."""

    def __init__(self, run: Callable[..., Any], replica: DataParallelReplica) -> None:
        self._run, self._replica = run, replica

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a communication buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        start = recorder.now()
        work = self._run(output_tensor, input_tensor, *args, **options)
        largest = max(output_tensor, input_tensor, key=torch.Tensor.numel)
        stream = "collective" if largest.is_cuda else "compute"
        recorder.add("collective", start, stream=stream, num_bytes=largest.nbytes, note="data")
        self._replica.payload_bytes += largest.nbytes
        return work


# Newer torch renames these and warns about the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_to_all_and_sum(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *, group: Any, **_: Any) -> None:
    """Reduce-scatter by all-to-all: Gloo's reduce-scatter is an all-reduce that discards the rest, twice the bytes."""
    shards = torch.empty_like(input_tensor)
    dist.all_to_all_single(shards, input_tensor, group=group)
    torch.sum(shards.view(-1, output_tensor.numel()), dim=0, out=output_tensor.view(-1))


def _separable_units(module: nn.Module, units: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the units that can be FSDP groups: unique, not nested, sharing no parameter with the rest of the module.

    FSDP2 would untie a weight in two of its groups (GPT-2's embedding and head), so such weights stay in the root
    group. So do parameters that the code between units reads.
    """
    candidates = list(dict.fromkeys(units))
    nested = {id(child) for unit in candidates for child in unit.modules() if child is not unit}
    uses = _count_uses(module)
    uses.update(map(id, _read_between_units(module)))

    def is_unshared(unit: nn.Module) -> bool:
        inside = _count_uses(unit)
        return bool(inside) and all(uses.get(identity) == count for identity, count in inside.items())

    def is_accepted(unit: nn.Module) -> bool:
        """Older torch accepts no ModuleList or ModuleDict, even one with a forward (experts, for example)."""
        return NEW_FSDP or not isinstance(unit, nn.ModuleList | nn.ModuleDict)

    return [
        unit
        for unit in candidates
        if unit is not module and id(unit) not in nested and is_accepted(unit) and is_unshared(unit)
    ]


def _count_uses(module: nn.Module) -> Counter[int]:
    """Count the modules that hold each parameter, by its identity."""
    return Counter(id(parameter) for child in module.modules() for parameter in child.parameters(recurse=False))


def _read_between_units(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that a stage's graph reads directly, not through the unit that holds them."""
    if not isinstance(module, Stage):
        return set()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    targets = (str(node.target) for node in module.graph.nodes if node.op == "get_attr")
    return {parameters[name] for name in targets if name in parameters}
