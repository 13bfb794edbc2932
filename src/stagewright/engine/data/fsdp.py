"""FSDP2 replicas: each holds a shard of the parameters, gradients and optimizer states.

All replicas must all-gather and reduce-scatter their units in the same order, even if their samples use different
units. An autograd chain through all units, the *thread*, fixes that order:

    forward    ── E₁ unit 1 X₁ ── E₂ unit 2 X₂ ── … ── outputs
    backward   ── E₁        X₁ ── E₂        X₂ ── … ──    X all-gathers a unit's parameters,
                                                          E reduce-scatters its gradients

Parameters are gathered for each pass of each micro-batch. ``fsdp_step`` gathers them once per step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from stagewright import structure
from stagewright.engine.data.keep_differentiable import any_requires_grad, keep_outputs_differentiable
from stagewright.engine.data.sharded_replica import ShardedReplica, parameter_group
from stagewright.engine.tensor.axis import Axis


class FSDPReplica(ShardedReplica):
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
        *,
        every_microbatch: bool = False,
        counter: Axis | None = None,
        replicate: Any = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Shard the parameters; ``every_microbatch`` and ``counter`` are for the stages of a pipeline.

        ``every_microbatch``: reduce-scatter gradients in each backward, and reshard the root group after each forward,
        as other micro-batches run before its backward. The others: see ``ShardedReplica``.
        """
        super().__init__(
            module,
            group,
            norms,
            mesh,
            units,
            device,
            read_weights,
            reshard_after_forward=True if every_microbatch else None,
            counter=counter,
            replicate=replicate,
            accumulates_shards=every_microbatch,
            on_change=on_change,
        )
        self._every_microbatch = every_microbatch
        self._thread: torch.Tensor | None = None
        self._inputs: list[list[tuple[torch.Tensor, torch.Tensor, int]]] = []
        """For each running unit: its inputs, the tensors they were replaced by, and the version counters of these."""
        self.recompute_callbacks: list[Callable[[], Any]] = []
        """Recompute the running forward; called when backward reaches its last unit.

        Units all-gather their parameters for it, which all replicas must do at the same point, even if their samples
        use different units.
        """
        for fsdp_module in self._groups[:-1]:
            self._attach_to_thread(fsdp_module)
        if every_microbatch:
            self._prefetch_in_reverse()

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
        root.set_requires_gradient_sync(self._every_microbatch)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def _prefetch_in_reverse(self) -> None:
        """Prefetch the unit before in backward; FSDP2's order of past forwards mixes those of other micro-batches."""
        units = [unit for unit in self._groups[:-1] if parameter_group(unit) is not None]
        for before, unit in itertools.pairwise(units):
            unit.set_modules_to_backward_prefetch([before])
        for group in filter(None, map(parameter_group, self._groups)):
            group._record_post_forward = lambda: None
            group._backward_prefetch = lambda: None

    def _attach_to_thread(self, unit: FSDPModule) -> None:
        """Let the thread trigger the unit's all-gather and reduce-scatter in backward.

        By default FSDP2 triggers them when gradients reach a unit's outputs and inputs, which depends on the samples.
        """
        state: Any = unit._get_fsdp_state()
        group = parameter_group(unit)
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
