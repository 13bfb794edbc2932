"""Recomputation: a stage forgets what happened inside it and runs again when its backward needs it.

    kept between forward and backward      none          everything that autograd saves
                                           always        the stage's inputs
                                           except-last   the stage's inputs; everything of the last micro-batch,
                                                         whose backward comes at once under GPipe
                                           per stage     one yes or no for each stage

A forward that runs again must be the same one: it draws the same random numbers (by its key where one is held, else by
the generators' states), moves no running statistics, leaves its inputs as they were and runs under the same autocast.
Other buffers that a forward both reads and writes (spectral norm's vectors) are used as they are by then.
Backward split in two (zero-bubble schedules) would run a stage again for its inputs and once more for each group of its
weights, and hold all of it in between: what recomputation is to save. So a stage that runs again does its whole
backward in the first half (``engine.pipeline``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from stagewright.capture.stage import Stage
from stagewright.engine.batch_norm import held_statistics, tracked_norms
from stagewright.engine.dropout import RandomKey, current_key, held_key, is_keyed
from stagewright.engine.recorder import recorder
from stagewright.errors import UsageError

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
        with set_checkpoint_early_stop(not shared):  # replicas that share parameters gather all of them once more
            outputs = checkpoint(
                self._run,
                *inputs,
                use_reentrant=False,
                preserve_rng_state=key is None,
                context_fn=lambda: (nullcontext(), _Again(self, key)),
            )
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

    def __init__(self, forward: RecomputedForward, key: RandomKey | None) -> None:
        self._forward, self._key = forward, key
        self._stack = ExitStack()
        self._start: Any = 0.0

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(held_statistics(self._forward.norms))
            if self._key is not None:
                stack.enter_context(held_key(self._key))
            stack.enter_context(self._forward.watch())  # last: it listens to what the recomputation saves
            self._stack = stack.pop_all()
        self._start = recorder.now()

    def __exit__(self, *exception: Any) -> None:
        recorder.add("recompute", self._start)
        self._stack.__exit__(*exception)


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
