"""What FSDP2 replicas have in common: parameter groups, one per unit of a module and one for the rest, and collectives
that are recorded and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from stagewright.engine.data.data_parallel import DataParallelReplica
from stagewright.engine.data.gradient_allreduce import BUCKET_BYTES
from stagewright.engine.tensor.axis import Axis, all_to_all_and_sum, reduce_scatter
from stagewright.engine.worker.recorder import recorder
from stagewright.graph.stage import Stage

NEW_FSDP = TorchVersion(torch.__version__) >= "2.13"
"""Whether FSDP2 accepts module containers that define a forward."""


class ShardedReplica(DataParallelReplica):
    """A module whose units are FSDP2's parameter groups; the rest of it is the last one, the root group."""

    def __init__(
        self,
        module: nn.Module,
        group: Any,
        norms: list[Any],
        mesh: DeviceMesh,
        units: Iterable[nn.Module],
        device: torch.device,
        read_weights: Callable[[nn.Module], None] | None = None,
        *,
        reshard_after_forward: bool | None = None,
        counter: Axis | None = None,
        replicate: Any = None,
        accumulates_shards: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Shard the parameters.

        ``read_weights``: reads the parameters of a unit before it is sharded. ``reshard_after_forward``: as in
        ``fully_shard``; None: units are resharded, the root is not. ``counter``: counts the bytes; None: this replica.
        ``replicate``: with HSDP, the group of replicas that hold the same shards. ``accumulates_shards``: they
        all-reduce their gradients at the end of a step, because each micro-batch reduce-scatters. ``on_change``: called
        when parameters were gathered or freed, or gradients reduced.
        """
        super().__init__(module, group, norms)
        self._replicate, self._accumulates_shards, self._on_change = replicate, accumulates_shards, on_change
        self._device, self._counter = device, counter or self
        # FSDP2 can't shard a scalar parameter: scalars stay replicated and are all-reduced after backward.
        self._scalars = [parameter for parameter in module.parameters() if parameter.ndim == 0]
        for scalar in self._scalars:
            scalar.data = scalar.data.to(device)
        self._unused_here: set[int] = set()
        """Identities of the shards that this replica did not use in this step."""
        self._groups: list[FSDPModule] = []
        for unit in [*_separable_units(module, units), module]:
            if read_weights is not None:
                read_weights(unit)
            ignored = set(self._scalars)
            sharded = fully_shard(unit, mesh=mesh, ignored_params=ignored, reshard_after_forward=reshard_after_forward)
            self._set_up(sharded)
            self._groups.append(sharded)

    def all_reduce(self, value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Sum ``value`` in place over the replicas, or reduce it by another operation."""
        return super().all_reduce(value, op) if self._counter is self else self._counter.all_reduce(value, op)

    def synchronize(self, weight: float) -> None:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        used = self._used_parameters(trained, self._unused_here)
        self._unused_here.clear()
        scalars = {id(scalar) for scalar in self._scalars}
        self._all_reduce_gradients([parameter for parameter in used if id(parameter) in scalars], BUCKET_BYTES)
        if self._replicate is not None and self._accumulates_shards:
            for parameter in used:
                if isinstance(parameter.grad, DTensor):
                    self._all_reduce_shards(parameter.grad.to_local())
        self._average_statistics(weight)

    def gathered_parameters(self) -> list[nn.Parameter]:
        """Return the full parameters, to be counted as memory; their storage is empty while they are sharded."""
        groups = filter(None, map(parameter_group, self._groups))
        held = [parameter for group in groups for parameter in group.fsdp_params]
        return [parameter._unsharded_param for parameter in held if hasattr(parameter, "_unsharded_param")]

    def _all_reduce_shards(self, gradients: torch.Tensor) -> None:
        """Sum reduce-scattered gradients, in place, over the replicas that hold the same shards."""
        start = recorder.now()
        if gradients.numel():  # a shard may be empty
            dist.all_reduce(gradients, group=self._replicate)
        stream = "collective" if gradients.is_cuda else "compute"
        recorder.add("collective", start, stream=stream, num_bytes=gradients.nbytes, note="data")
        self._counter.payload_bytes += gradients.nbytes

    def _set_up(self, unit: FSDPModule) -> None:
        """Sum gradients instead of averaging, record collectives, and leave FSDP2's backward hooks to the engine."""
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_all_gather(_RecordedCollective(all_gather, self._counter))  # type: ignore[arg-type]
        scatter = reduce_scatter if self._device.type != "cpu" else all_to_all_and_sum
        unit.set_custom_reduce_scatter(_RecordedCollective(scatter, self._counter))  # type: ignore[arg-type]
        if self._replicate is not None and not self._accumulates_shards:
            unit.set_all_reduce_hook(self._all_reduce_shards)
        _fill_missing_gradients(unit, self._unused_here)
        _notify(parameter_group(unit), self._on_change)
        unit._get_fsdp_state()._register_pre_backward_hook = lambda output: output  # type: ignore[method-assign]


def parameter_group(unit: FSDPModule) -> Any:
    """Return FSDP2's parameter group of a unit; None if it has no parameters of its own, or only scalars."""
    return unit._get_fsdp_state()._fsdp_param_group


def _notify(group: Any, on_change: Callable[[], None]) -> None:
    """Call ``on_change`` whenever the parameters of a group were gathered or freed."""
    if group is None:
        return
    gather, free = group.wait_for_unshard, group._to_sharded

    def wait_for_unshard() -> None:
        is_new = not group.is_unsharded
        gather()
        if is_new and group.is_unsharded:
            on_change()

    def to_sharded() -> None:
        is_new = not group.is_sharded
        free()
        if is_new:
            on_change()

    group.wait_for_unshard, group._to_sharded = wait_for_unshard, to_sharded


def _fill_missing_gradients(unit: FSDPModule, unused: set[int]) -> None:
    """Fill missing gradients of a unit with zeros before they are reduce-scattered.

    FSDP2 sums the gradients that exist, and assumes that they belong to the same parameters on all replicas. The
    setting for this in torch 2.13 does not report which gradients were missing: ``unused`` receives their shards.
    """
    group = parameter_group(unit)
    if group is None:
        return
    scatter = group.post_backward

    def post_backward(*arguments: Any) -> None:
        for parameter in group.fsdp_params if group.reduce_grads else ():
            full, shard = parameter.unsharded_param, parameter.sharded_param
            if full.grad is not None or parameter.unsharded_accumulated_grad is not None:
                unused.discard(id(shard))
            elif full.requires_grad:
                full.grad = torch.zeros_like(full)
                if shard.grad is None:
                    unused.add(id(shard))
        scatter(*arguments)

    group.post_backward = post_backward


class _RecordedCollective:
    """A collective of FSDP2 whose time and traffic are recorded: blocking on CPUs, asynchronous on GPUs."""

    def __init__(self, run: Callable[..., Any], axis: Axis) -> None:
        self._run, self._axis = run, axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a communication buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        start = recorder.now()
        work = self._run(output_tensor, input_tensor, *args, **options)
        largest = max(output_tensor, input_tensor, key=torch.Tensor.numel)
        stream = "collective" if largest.is_cuda else "compute"
        recorder.add("collective", start, stream=stream, num_bytes=largest.nbytes, note="data")
        self._axis.payload_bytes += largest.nbytes
        return work


# Newer torch renames this and warns about the old name.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
    """Return the parameters that the graphs of stages read directly, not through the unit that holds them."""
    found: set[nn.Parameter] = set()
    for stage in module.modules():
        if isinstance(stage, Stage):
            parameters = dict(stage.named_parameters(remove_duplicate=False))
            targets = (str(node.target) for node in stage.graph.nodes if node.op == "get_attr")
            found |= {parameters[name] for name in targets if name in parameters}
    return found
