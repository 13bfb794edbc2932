"""Activation checkpointing by unit: chosen unit calls of a stage are recomputed one by one in backward.

    saved between forward and backward     recomputed unit    its inputs
                                           other unit, glue   everything that autograd saves

    backward    … kept unit ◄── recompute, then backward of one unit ◄── kept unit ◄── …

Only one recomputed unit has its activations at a time. What a recomputed forward must not change, and which random
numbers it draws, is as for whole stages (``activation_checkpointing``). A unit whose inputs are changed in place, by
itself or later, is recomputed from copies of them.

The stage's graph calls a wrapper instead of the unit, so hooks of the unit (FSDP, tensor parallelism) run in both
forwards. A stage with a recomputed unit runs its whole backward in the first half of a split one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from stagewright import structure
from stagewright.engine.batch.batch_norm import find_tracked_norms
from stagewright.engine.batch.random_key import current_key, is_keyed, key_stage
from stagewright.engine.pipeline.activation_checkpointing import ChangingBuffers, RecomputeContext, find_writes
from stagewright.graph.cut import UnitCall
from stagewright.graph.stage import Stage

_MARK = "stagewright_checkpointed_units"
ATTENTION_MARK = "stagewright_checkpointed_attentions"
"""Attribute of a stage whose attentions are recomputed (``attention_checkpointing``)."""
OFFLOAD_MARK = "stagewright_offloaded_units"
"""Attribute of a stage with offloaded units (``activation_offload``)."""


def checkpoint_units(
    stage: Stage,
    names: Collection[str],
    *,
    recompute_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    early_stop: bool = True,
) -> None:
    """Recompute the unit calls of these names, and key the stage's random numbers; does nothing else without any.

    ``recompute_context()`` is entered around every recomputed forward. ``early_stop``: end a recomputation when
    everything that backward needs is there; all workers of a collective inside a unit must agree on it.
    """
    chosen = {call.name for call in stage.calls if call.name in names}
    if chosen:
        stage.__dict__[_MARK] = units = CheckpointedUnits(stage, chosen, recompute_context, early_stop)
        units.apply(stage)
    key_stage(stage)


def checkpoint_variant(stage: Stage, variant: Stage) -> None:
    """Recompute and offload in a variant of a stage what the stage does."""
    for mark in (OFFLOAD_MARK, _MARK):
        if mark in stage.__dict__:
            stage.__dict__[mark].apply(variant)


def has_checkpointed_units(stage: Stage) -> bool:
    """Return whether backward recomputes or fetches activations of units of a stage, or of parts of them."""
    return any(mark in stage.__dict__ for mark in (_MARK, ATTENTION_MARK, OFFLOAD_MARK))


def replace_call(
    owner: Stage, stage: Stage, node: fx.Node, name: str, wrap: Callable[[Callable[[], nn.Module]], Any]
) -> None:
    """Let a node of the stage call ``wrap(module)`` instead of its unit; ``module()`` returns the unit of ``owner``."""
    target = str(node.target)
    node.target = name
    object.__setattr__(stage, name, wrap(lambda: reduce(getattr, target.split("."), owner)))


class CheckpointedUnits:
    """The recomputed unit calls of one stage."""

    def __init__(
        self,
        stage: Stage,
        names: Collection[str],
        recompute_context: Callable[[], AbstractContextManager[Any]],
        early_stop: bool,
    ) -> None:
        self.stage, self.names = stage, names
        self.recompute_context, self.early_stop = recompute_context, early_stop
        self._buffers: dict[nn.Module, ChangingBuffers] = {}

    def apply(self, stage: Stage) -> None:
        """Replace the unit calls of the stage, or of a variant of it, with recomputed ones."""
        assert not is_keyed(stage), "key_stage writes the code that runs"
        nodes = [node for node in stage.graph.nodes if node.op == "call_module"]
        position = {node: index for index, node in enumerate(stage.graph.nodes)}
        writes = find_writes(stage.graph)
        for node, call in zip(nodes, stage.calls, strict=True):
            if call.name in self.names:
                roots = {writes.storage[source.name] for source in node.all_input_nodes}
                is_copied = any(writes.last.get(root, -1) >= position[node] for root in roots)
                wrap = partial(_CheckpointedCall, self, call, is_copied)
                replace_call(self.stage, stage, node, f"stagewright_recomputed_{call.index}", wrap)

    def buffers_of(self, module: nn.Module) -> ChangingBuffers:
        """Return the changing buffers of a unit, which all its calls share."""
        if module not in self._buffers:
            self._buffers[module] = ChangingBuffers(module)
        return self._buffers[module]


class _CheckpointedCall:
    """A unit call that backward recomputes."""

    def __init__(
        self, owner: CheckpointedUnits, call: UnitCall, is_copied: bool, module: Callable[[], nn.Module]
    ) -> None:
        self._owner, self._call, self._module, self._is_copied = owner, call, module, is_copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if not torch.is_grad_enabled():
            return module(*args, **kwargs)
        owner = self._owner
        leaves, spec = structure.flatten((args, kwargs))
        key = current_key() if is_keyed(owner.stage) else None
        # A model that was not captured is one function of the stage.
        holder = module if isinstance(module, nn.Module) else owner.stage
        norms, buffers = find_tracked_norms(holder), owner.buffers_of(holder)
        versions, copies = buffers.versions(), buffers.copy()
        is_copied = self._is_copied
        held = [_copy(leaf) for leaf in leaves] if is_copied else leaves
        first = [(args, kwargs)]  # for the first forward, which may change them in place

        def run(*values: Any) -> Any:
            if first:
                call_args, call_kwargs = first.pop()
            else:
                call_args, call_kwargs = spec.unflatten([_writable(value) if is_copied else value for value in values])
            return module(*call_args, **call_kwargs)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            inner = owner.recompute_context
            return nullcontext(), RecomputeContext(norms, copies, key=key, inner=inner, call=self._call.index + 1)

        with set_checkpoint_early_stop(owner.early_stop):
            outputs = checkpoint(run, *held, use_reentrant=False, preserve_rng_state=key is None, context_fn=contexts)
        buffers.learn(versions, copies)
        return outputs


def _copy(value: Any) -> Any:
    """Copy a tensor to hold it; it needs a gradient if the original does, because autograd then saves the same."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _writable(value: Any) -> Any:
    """Copy a held tensor for one recomputation, which may change it in place: a leaf must not be."""
    return value.clone() if isinstance(value, torch.Tensor) else value
