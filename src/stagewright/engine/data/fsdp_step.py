"""FSDP2 replicas of a worker's stages, with parameters gathered once per step and not for each micro-batch.

    start of a step             all-gather all parameters; they stay for all micro-batches
    backward                    gradients accumulate unsharded
    last backward of a stage    reduce-scatter the gradients of its units, free their parameters

Workers gather at the start because most of them wait then for their first micro-batch. Nothing happens inside a
backward, so every schedule can run, also those that split it. All stages of a worker are one FSDP2 module: a weight
that two of them share is in its root group, and reduced when both are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from stagewright.engine.data.sharded_replica import ShardedReplica, parameter_group


class StepFSDPReplica(ShardedReplica):
    """The stages of a worker under FSDP2, gathered for a whole step."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        group: Any,
        norms: list[Any],
        mesh: DeviceMesh,
        units: Iterable[nn.Module],
        device: torch.device,
        read_weights: Callable[[nn.Module], None] | None = None,
        *,
        on_change: Callable[[], None] = lambda: None,
        replicate: Any = None,
    ) -> None:
        """Shard the parameters; ``on_change``, ``replicate``: see ``ShardedReplica``."""
        module = _Stages(stages.values())
        inside = set(module.modules())
        own = [unit for unit in units if unit in inside]
        super().__init__(
            module,
            group,
            norms,
            mesh,
            own,
            device,
            read_weights,
            reshard_after_forward=False,
            replicate=replicate,
            on_change=on_change,
        )
        self._stages = dict(stages)
        self._done: set[int] = set()
        self._trained: dict[int, list[nn.Parameter]] = {}
        self._root: Any = self._groups[-1]._get_fsdp_state()
        self._root._lazy_init()
        self._held: list[tuple[Any, frozenset[int]]] = []
        """FSDP2's parameter groups, in the order of backward, each with the stages that use it."""
        members = {index: set(map(id, stage.modules())) for index, stage in self._stages.items()}
        for unit in reversed(self._groups):
            parameters = parameter_group(unit)
            if parameters is None:
                continue
            parameters._register_post_backward_hook = lambda args, kwargs: (args, kwargs)
            parameters._record_post_forward = lambda: None
            users = {index for index, identities in members.items() if id(unit) in identities}
            self._held.append((parameters, frozenset(users or self._stages)))

    def gather(self, stage: int | None = None) -> None:
        """All-gather the parameters of a stage, or of all."""
        if self._root._state_ctx.iter_forward_root is None:
            self._root._root_pre_forward(self.module, (None,), {})  # torch < 2.13 fails on a GPU without an argument
        for parameters, users in reversed(self._held):
            if (stage is None or stage in users) and not parameters.is_unsharded:
                parameters.unshard()
                parameters.wait_for_unshard()

    def trained_parameters(self, stage: int) -> list[nn.Parameter]:
        """Return the gathered parameters of a stage that are trained; only between its forward and its end."""
        if stage not in self._trained:
            held = self._stages[stage].parameters()
            self._trained[stage] = [parameter for parameter in held if parameter.requires_grad]
        return self._trained[stage]

    def stage_done(self, stage: int) -> None:
        """Reduce-scatter the gradients of parameters that only finished stages use, and free these parameters."""
        self._done.add(stage)
        for parameters, users in self._held:
            if stage in users and users <= self._done:
                parameters.post_backward()

    def synchronize(self, weight: float) -> None:
        self._root._root_post_backward_final_callback()  # waits for the reduce-scatters
        self._end_pass()
        self._done.clear()
        super().synchronize(weight)

    def reshard(self) -> None:
        """Free gathered parameters after a forward without backward."""
        for parameters, _ in self._held:
            parameters.reshard()
        self._end_pass()

    def _end_pass(self) -> None:
        """Free the buffer of the last all-gather, as FSDP2 does after the forward of its root."""
        context, last = self._root._comm_ctx, self._root._comm_ctx.all_gather_state
        if last is not None:
            context.all_gather_copy_in_stream.wait_event(last.event)
            context.all_gather_stream.wait_event(last.event)
            context.all_gather_state = None
        self._root._state_ctx.iter_forward_root = None


class _Stages(nn.Module):
    """The stages of a worker as one module; FSDP2 accepts no ModuleList."""

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        for index, stage in enumerate(stages):
            self.add_module(str(index), stage)
