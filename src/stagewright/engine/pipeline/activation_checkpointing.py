"""Activation checkpointing: a stage drops its activations after forward and recomputes them in backward.

    saved between forward and backward     none          everything that autograd saves
                                           always        the stage's inputs
                                           except-last   the stage's inputs; everything of the last micro-batch,
                                                         whose backward follows at once under GPipe
                                           per stage     one yes or no for each stage
                                           per unit      see ``unit_checkpointing``
                                           attention     see ``attention_checkpointing``

The recomputed forward must equal the first. It draws the same random numbers (from its random key if one is set, else
from the saved generator states), updates no running statistics, leaves its inputs unchanged and runs under the same
autocast. Other buffers that a forward changes (spectral norm vectors, quantizer ranges) are copied before the first
forward and restored for the second, whose writes are dropped. Which buffers change is learned from past forwards, so a
buffer that changes for the first time is not restored that once.

A backward split in two (zero-bubble schedules) would recompute a stage once for its inputs and again for each group of
weights, and hold everything in between, which defeats the purpose. So a recomputed stage runs its whole backward in the
first half (``engine.pipeline.step``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from stagewright.engine.batch.batch_norm import find_tracked_norms, freeze_statistics
from stagewright.engine.batch.random_key import RandomKey, current_key, is_keyed, reseed, use_key
from stagewright.engine.worker.recorder import recorder
from stagewright.errors import UsageError
from stagewright.graph.stage import Stage
from stagewright.structure import map_tensors

RecomputePolicy: TypeAlias = Literal["none", "always", "except-last"] | Sequence[bool]
"""Which micro-batches of which stages are recomputed."""


def is_recomputed(policy: RecomputePolicy, *, stage: int, microbatch: int, num_microbatches: int) -> bool:
    """Return whether a stage recomputes a micro-batch."""
    if policy in ("none", "always"):
        return policy == "always"
    if policy == "except-last":
        return microbatch < num_microbatches - 1
    if isinstance(policy, str):
        raise UsageError(f"unknown recompute {policy!r}; use none, always, except-last or one yes or no for each stage")
    if stage >= len(policy):
        raise UsageError(f"recompute has {len(policy)} entries, but there is a stage {stage}; give one for each stage")
    return bool(policy[stage])


class CheckpointedForward:
    """The forward of one stage, ``forward(inputs, microbatch)``, recomputed in backward if the policy says so."""

    def __init__(
        self,
        stage: Stage,
        *,
        policy: RecomputePolicy,
        index: int,
        num_microbatches: int,
        recompute_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        wrapper: Callable[..., Any] | None = None,
    ) -> None:
        """Set up a stage.

        ``recompute_context()`` is entered around every recomputed forward. ``wrapper``, such as DDP, is called instead
        of the stage and calls it; it is called for the first forward only, not for the recomputed one.
        """
        self.stage = stage
        self.policy = policy
        self.index = index
        self.num_microbatches = num_microbatches
        """Micro-batches of this step; set at each step, because a smaller last batch may have fewer."""
        self.recompute_context = recompute_context
        self.norms = find_tracked_norms(stage)
        self.will_recompute = False
        """Whether backward recomputes the last micro-batch."""
        self._buffers = ChangingBuffers(stage)
        self._mutated = find_mutated_inputs(stage)
        self._marker: Any = None
        self._plain_forward: Callable[..., tuple[Any, ...]] = stage if wrapper is None else stage.forward
        self._entry: Any = self._forward if wrapper is None else wrapper
        self._is_fsdp = hasattr(wrapper, "recompute_callbacks")
        if wrapper is not None:
            stage.__dict__["forward"] = self._forward  # inside the wrapper and the stage's hooks

    def __call__(self, inputs: Sequence[Any], microbatch: int) -> tuple[Any, ...]:
        """Return the stage's outputs for one micro-batch."""
        self.will_recompute = torch.is_grad_enabled() and is_recomputed(
            self.policy, stage=self.index, microbatch=microbatch, num_microbatches=self.num_microbatches
        )
        return self._entry(*inputs)  # type: ignore[no-any-return]

    def _forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the first forward of a micro-batch."""
        if not self.will_recompute:
            return self._plain_forward(*inputs)
        key = current_key() if is_keyed(self.stage) else None
        versions, copies = self._buffers.versions(), self._buffers.copy()
        with set_checkpoint_early_stop(not self._is_fsdp):  # FSDP replicas must gather all parameters again
            outputs = checkpoint(
                self._run,
                *inputs,
                use_reentrant=False,
                preserve_rng_state=key is None,
                context_fn=lambda: (
                    nullcontext(),
                    RecomputeContext(self.norms, copies, key=key, inner=self.recompute_context),
                ),
            )
        self._buffers.learn(versions, copies)
        if self._is_fsdp:
            marker = self._marker
            self._entry.recompute_callbacks.append(lambda: marker.grad_fn.saved_tensors)
        return outputs  # type: ignore[no-any-return]

    def _run(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the stage on copies of the inputs it mutates, so that the recomputed forward gets the originals."""
        if self._is_fsdp:
            self._marker = _Marker.apply(torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
        if any(self._mutated):
            pairs = zip(inputs, self._mutated, strict=True)
            inputs = tuple(map_tensors(torch.clone, value) if mutated else value for value, mutated in pairs)
        return self._plain_forward(*inputs)


class _Marker(torch.autograd.Function):
    """The first tensor that autograd saves in a stage: reading it recomputes everything after it."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(number)
        return number.clone()


class RecomputeContext:
    """The context of a recomputed forward; entered once per recomputation."""

    def __init__(
        self,
        norms: Sequence[Any],
        buffers: BufferCopies,
        *,
        key: RandomKey | None,
        inner: Callable[[], AbstractContextManager[Any]],
        call: int | None = None,
    ) -> None:
        """``call``: the random number of the recomputed unit call; None if the forward reseeds by itself."""
        self._norms, self._buffers, self._key, self._inner, self._call = norms, buffers, key, inner, call
        self._stack = ExitStack()
        self._start: Any = 0.0

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(freeze_statistics(self._norms))
            stack.enter_context(_restore_temporarily(self._buffers))
            if self._key is not None:
                stack.enter_context(use_key(self._key))
                if self._call is not None:
                    reseed(self._call)
            stack.enter_context(self._inner())  # last: it tracks what the recomputation saves
            self._stack = stack.pop_all()
        self._start = recorder.now()

    def __exit__(self, *exception: Any) -> None:
        recorder.add("recompute", self._start)
        self._stack.__exit__(*exception)


BufferCopies: TypeAlias = dict[tuple[nn.Module, str], torch.Tensor]
"""Buffers as they were before a forward, by module and name."""


class ChangingBuffers:
    """The buffers of a stage or unit that its forwards change, except batch norm running statistics."""

    def __init__(self, owner: nn.Module) -> None:
        norms = set(find_tracked_norms(owner))
        modules = [module for module in owner.modules() if module not in norms]
        self._all = [
            (module, name) for module in modules for name, value in module._buffers.items() if value is not None
        ]
        self._changing = set(self._all)  # until the first forward shows which do
        self._has_seen_forward = False

    def versions(self) -> list[tuple[torch.Tensor | None, int]]:
        """Return what identifies the current content of all buffers, to detect changes and replacements."""
        values = [module._buffers[name] for module, name in self._all]
        return [(value, -1 if value is None else value._version) for value in values]

    def copy(self) -> BufferCopies:
        """Copy the buffers that may change."""
        values = {key: key[0]._buffers[key[1]] for key in self._all if key in self._changing}
        return {key: value.clone() for key, value in values.items() if value is not None}

    def learn(self, before: list[tuple[torch.Tensor | None, int]], copies: BufferCopies) -> None:
        """Drop the copies of buffers that the forward did not change, and remember which it changed."""
        triples = zip(self._all, before, self.versions(), strict=True)
        changed = {key for key, old, new in triples if new[0] is not old[0] or new[1] != old[1]}
        for key in copies.keys() - changed:
            del copies[key]
        self._changing = self._changing | changed if self._has_seen_forward else changed
        self._has_seen_forward = True


@contextmanager
def _restore_temporarily(buffers: BufferCopies) -> Iterator[None]:
    """Give modules these buffers inside the block; what is written to them is dropped."""
    current = {(module, name): module._buffers[name] for module, name in buffers}
    try:
        for (module, name), value in buffers.items():
            module._buffers[name] = value.clone()
        yield
    finally:
        for (module, name), buffer in current.items():
            module._buffers[name] = buffer


def find_mutated_inputs(stage: Stage) -> tuple[bool, ...]:
    """Return for each input whether the stage changes it in place, directly or through a view."""
    writes = find_writes(stage.graph)
    return tuple(node.name in writes.last for node in stage.graph.nodes if node.op == "placeholder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """In-place changes of a stage's values."""

    storage: dict[str, str]
    """Maps a value to the first one with the same memory."""
    last: dict[str, int]
    """Maps such a first value to the position of the last node that changes its memory."""


def find_writes(graph: fx.Graph) -> Writes:
    """Find the values of a stage that it changes in place, directly or through a view.

    Capture annotates nodes of the whole model's graph; a stage's nodes have the same names.
    """
    storage: dict[str, str] = {}
    last: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for target in node.meta.get("mutates", ()):
            if target.name in storage:
                last[storage[target.name]] = position
        source = node.meta.get("alias_of")
        if source is None and node.op == "call_function" and getattr(node.target, "is_view", True):
            source = next(iter(node.all_input_nodes), None)  # a view, or a function of capture that passes a value on
        storage[node.name] = node.name if source is None else storage.get(source.name, node.name)
    return Writes(storage=storage, last=last)
