"""Recomputation: a stage forgets what happened inside it and runs again when its backward needs it.

    kept between forward and backward      none          everything that autograd saves
                                           always        the stage's inputs
                                           except-last   the stage's inputs; everything of the last micro-batch,
                                                         whose backward comes at once under GPipe
                                           per stage     one yes or no for each stage

A forward that runs again must be the same one: it draws the same random numbers (by its key where one is held, else by
the generators' states), moves no running statistics, leaves its inputs as they were and runs under the same autocast.
Other buffers that a forward changes (spectral norm's vectors, ranges of a quantiser) are kept as the first forward
found them, for the second to find them so; what that one writes is dropped. Which those are, forwards show (one that
never changed before is used as it is by then, once).
Backward split in two (zero-bubble schedules) would run a stage again for its inputs and once more for each group of its
weights, and hold all of it in between: what recomputation is to save. So a stage that runs again does its whole
backward in the first half (``engine.pipeline``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from stagewright.engine.batch.batch_norm import held_statistics, tracked_norms
from stagewright.engine.batch.dropout import RandomKey, current_key, held_key, is_keyed
from stagewright.engine.worker.recorder import recorder
from stagewright.errors import UsageError
from stagewright.graph.stage import Stage

__all__ = ["Policy", "RecomputedForward", "changed_inputs", "recomputes"]

Policy: TypeAlias = Literal["none", "always", "except-last"] | Sequence[bool]
"""Which micro-batches of which stages are recomputed."""


def recomputes(policy: Policy, *, stage: int, microbatch: int, num_microbatches: int) -> bool:
    """Whether a micro-batch is recomputed in a stage."""
    if policy in ("none", "always"):
        return policy == "always"
    if policy == "except-last":
        return microbatch < num_microbatches - 1
    if isinstance(policy, str):
        raise UsageError(f"unknown recompute {policy!r}; use none, always, except-last or one yes or no for each stage")
    if stage >= len(policy):
        raise UsageError(f"recompute has {len(policy)} entries, but there is a stage {stage}; give one for each stage")
    return bool(policy[stage])


class RecomputedForward:
    """Runs a stage for the executor: ``forward(inputs, microbatch)``, recomputed later or not, as the policy says."""

    def __init__(
        self,
        stage: Stage,
        *,
        policy: Policy,
        index: int,
        num_microbatches: int,
        watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
        through: Callable[..., Any] | None = None,
    ) -> None:
        """``watch()`` is entered around every second forward. ``through`` is called in place of the stage and calls it,
        as a data-parallel wrapper does: it sees each first forward and no second one."""
        self.stage = stage
        self.policy = policy
        self.index = index
        """The stage's place in the pipeline."""
        self.num_microbatches = num_microbatches
        """Micro-batches of this step: a smaller last batch may have fewer, so the executor sets it."""
        self.watch = watch
        self.norms = tracked_norms(stage)
        self._buffers = _OwnBuffers(stage)
        self._changed = changed_inputs(stage)
        self._again = False
        self._mark: Any = None
        self._plain: Callable[..., tuple[Any, ...]] = stage if through is None else stage.forward
        self._through: Any = self._forward if through is None else through
        if through is not None:
            stage.__dict__["forward"] = self._forward  # inside the wrapper and the stage's own hooks

    @property
    def forgets(self) -> bool:
        """Whether the micro-batch that ran last will run again."""
        return self._again

    def __call__(self, inputs: Sequence[Any], microbatch: int) -> tuple[Any, ...]:
        """The stage's outputs for one micro-batch."""
        self._again = torch.is_grad_enabled() and recomputes(
            self.policy, stage=self.index, microbatch=microbatch, num_microbatches=self.num_microbatches
        )
        return self._through(*inputs)  # type: ignore[no-any-return]

    def _forward(self, *inputs: Any) -> tuple[Any, ...]:
        """The first forward of a micro-batch."""
        if not self._again:
            return self._plain(*inputs)
        key = current_key() if is_keyed(self.stage) else None
        shared = hasattr(self._through, "run_again")
        marks, found = self._buffers.marks(), self._buffers.copies()
        with set_checkpoint_early_stop(not shared):  # replicas that share parameters gather all of them once more
            outputs = checkpoint(
                self._run,
                *inputs,
                use_reentrant=False,
                preserve_rng_state=key is None,
                context_fn=lambda: (nullcontext(), _Again(self, key, found)),
            )
        self._buffers.learn(marks, found)
        if shared:
            mark = self._mark
            self._through.run_again.append(lambda: mark.grad_fn.saved_tensors)
        return outputs  # type: ignore[no-any-return]

    def _run(self, *inputs: Any) -> tuple[Any, ...]:
        """The stage on inputs that it may change: a second forward must find them as they were."""
        if hasattr(self._through, "run_again"):
            self._mark = _Mark.apply(torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
        if any(self._changed):
            pairs = zip(inputs, self._changed, strict=True)
            inputs = tuple(value.clone() if changed else value for value, changed in pairs)
        return self._plain(*inputs)


class _Mark(torch.autograd.Function):
    """A number that backward saves first of all: whoever asks for it has everything after it run again."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(number)
        return number.clone()


class _Again:
    """What a second forward runs under. Entered once for each recomputation of a micro-batch."""

    def __init__(self, forward: RecomputedForward, key: RandomKey | None, buffers: _Copies) -> None:
        self._forward, self._key, self._buffers = forward, key, buffers
        self._stack = ExitStack()
        self._start: Any = 0.0

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(held_statistics(self._forward.norms))
            stack.enter_context(_swapped(self._buffers))
            if self._key is not None:
                stack.enter_context(held_key(self._key))
            stack.enter_context(self._forward.watch())  # last: it listens to what the recomputation saves
            self._stack = stack.pop_all()
        self._start = recorder.now()

    def __exit__(self, *exception: Any) -> None:
        recorder.add("recompute", self._start)
        self._stack.__exit__(*exception)


_Copies: TypeAlias = dict[tuple[nn.Module, str], torch.Tensor]
"""Buffers as a forward found them, by their module and their name there."""


class _OwnBuffers:
    """Buffers of a stage that its forwards change, but for batch norms' running statistics."""

    def __init__(self, stage: nn.Module) -> None:
        norms = set(tracked_norms(stage))
        modules = [module for module in stage.modules() if module not in norms]
        self._every = [(module, name) for module in modules for name, one in module._buffers.items() if one is not None]
        self._changing = set(self._every)  # until a forward has shown which do
        self._seen_one = False

    def marks(self) -> list[tuple[torch.Tensor | None, int]]:
        """What tells whether one of them has been changed or replaced since."""
        values = [module._buffers[name] for module, name in self._every]
        return [(value, -1 if value is None else value._version) for value in values]

    def copies(self) -> _Copies:
        """Of all that may change."""
        values = {place: place[0]._buffers[place[1]] for place in self._every if place in self._changing}
        return {place: value.clone() for place, value in values.items() if value is not None}

    def learn(self, before: list[tuple[torch.Tensor | None, int]], found: _Copies) -> None:
        """After a forward: what it left as it was need not be kept."""
        pairs = zip(self._every, before, self.marks(), strict=True)
        changed = {place for place, was, now in pairs if now[0] is not was[0] or now[1] != was[1]}
        for place in found.keys() - changed:
            del found[place]
        self._changing = self._changing | changed if self._seen_one else changed
        self._seen_one = True


@contextmanager
def _swapped(buffers: _Copies) -> Iterator[None]:
    """Modules have these buffers meanwhile, and lose what is written to them."""
    now = {(module, name): module._buffers[name] for module, name in buffers}
    try:
        for (module, name), value in buffers.items():
            module._buffers[name] = value.clone()
        yield
    finally:
        for (module, name), own in now.items():
            module._buffers[name] = own


def changed_inputs(stage: Stage) -> tuple[bool, ...]:
    """For each input, whether the stage changes it in place, itself or through a view.

    Notes that capture left in the graph name the nodes of the whole model's graph; a stage's nodes have the same names.
    """
    home: dict[str, str] = {}  # node -> the input whose storage it shares
    changed: set[str] = set()
    for node in stage.graph.nodes:
        if node.op == "placeholder":
            home[node.name] = node.name
            continue
        changed.update(home[one.name] for one in node.meta.get("mutates", ()) if one.name in home)
        source = node.meta.get("alias_of")
        if source is None and node.op == "call_function" and getattr(node.target, "is_view", True):
            source = next(iter(node.all_input_nodes), None)  # a view, or capture's own function that hands a value on
        if source is not None and source.name in home:
            home[node.name] = home[source.name]
    return tuple(node.name in changed for node in stage.graph.nodes if node.op == "placeholder")
