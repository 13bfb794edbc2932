"""Selective activation checkpointing: recompute what attention computes between its linear layers.

    x ─┬─ query ─┐
       ├─ key   ─┼─ rotary embedding ─ scores ─ softmax ─ dropout ─ · values ─ output layer ─ y
       └─ value ─┘
      saved        dropped after forward, recomputed in backward            saved

The linear layers are not repeated: their outputs are kept for the recomputation, and what they save for themselves is
saved as without checkpointing. The first linear layer whose input is neither an input of the attention nor the output
of another of its layers is the output layer: from there on everything is saved. An attention without linear layers of
its own (``nn.MultiheadAttention``) is recomputed as a whole.

Calls are replaced outside of a module's hooks, so hooks of tensor parallelism run in both forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stagewright import structure
from stagewright.errors import UsageError
from stagewright.graph.attention.structure import find_attentions, linear_layers, other_layers
from stagewright.graph.tracing.intercept import Call, intercept_calls
from stagewright.machine.saved_tensor_hooks import Hooks, remove_innermost, restore, without_innermost

ForwardContexts = Callable[
    [nn.Module, "AttentionCall"], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
]
"""Returns what is entered around the first forward of an attention, and what around the recomputed one."""


def _no_contexts(
    attention: nn.Module, call: AttentionCall
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


def _ignore(module: nn.Module) -> None:
    """Do nothing."""


@contextmanager
def checkpointed_attentions(
    units: Iterable[nn.Module],
    *,
    contexts: ForwardContexts = _no_contexts,
    on_core_end: Callable[[nn.Module], None] = _ignore,
    on_reuse: Callable[[nn.Module], None] = _ignore,
) -> Iterator[None]:
    """Recompute the attentions of these units until the block ends.

    ``on_core_end`` is called with an attention where its saved part begins again, in first forwards only.
    ``on_reuse`` is called with a linear layer whose kept output is used in a recomputation.
    """
    attentions = dict.fromkeys(attention for unit in units for attention in find_attentions(unit))
    with ExitStack() as stack:
        for attention in attentions:
            wrapper = _CheckpointedAttention(attention, contexts, on_core_end, on_reuse)
            stack.enter_context(intercept_calls({attention: wrapper.wrap}))
            stack.enter_context(intercept_calls(wrapper.linear_calls()))
            stack.enter_context(intercept_calls(dict.fromkeys(other_layers(attention), wrapper.wrap_other)))
        yield


class AttentionCall:
    """One call of an attention: the outputs of its linear layers, for the recomputation."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._kept: list[torch.Tensor | _Holder] = []
        self._versions: list[tuple[nn.Module, torch.Tensor, int]] = []  # of kept outputs, while the first forward runs
        self._storages: dict[int, object] | None = {}  # of inputs and layers' outputs, while the first forward runs
        self._hooks: Hooks | None = None
        self._num_reused = 0
        for tensor in inputs:
            self.remember(tensor)

    @property
    def is_recomputed(self) -> bool:
        """Whether the first forward is done."""
        return self._storages is None

    @property
    def is_past_core(self) -> bool:
        """Whether the output layer was reached."""
        return self._hooks is not None

    def held_storages(self) -> set[int]:
        """Return the addresses of the kept outputs."""
        return {_storage(kept.tensor if isinstance(kept, _Holder) else kept)[0] for kept in self._kept}

    def remember(self, value: object) -> None:
        """Remember an output of a layer inside the attention, in the first forward."""
        if self._storages is not None and isinstance(value, torch.Tensor):
            self._storages.update([_storage(value)])

    def knows(self, values: Iterable[object]) -> bool:
        """Whether a tensor among these is an input of the attention or the output of one of its layers."""
        assert self._storages is not None
        return any(isinstance(value, torch.Tensor) and _storage(value)[0] in self._storages for value in values)

    def leave_core(self) -> None:
        """Save everything from now on."""
        self._hooks = remove_innermost()

    def end(self) -> None:
        """End the first forward or the recomputation."""
        if self._hooks is not None:
            restore(self._hooks)
        self._hooks, self._storages, self._num_reused = None, None, 0
        self._versions.clear()

    def changed_layer(self) -> nn.Module | None:
        """Return a layer whose kept output was changed in place."""
        return next((layer for layer, output, version in self._versions if output._version != version), None)

    def keep(self, layer: nn.Module, output: torch.Tensor) -> None:
        """Keep the output of a linear layer; hooks of saved tensors, such as those that count memory, see it."""
        self.remember(output)
        self._versions.append((layer, output, output._version))
        self._kept.append(_Holder(output) if output.requires_grad else output)

    def reuse(self) -> torch.Tensor:
        """Return the next kept output."""
        kept = self._kept[self._num_reused]
        self._num_reused += 1
        return kept.tensor.detach().requires_grad_() if isinstance(kept, _Holder) else kept


class _CheckpointedAttention:
    """The calls of one attention and of its layers."""

    def __init__(
        self,
        attention: nn.Module,
        contexts: ForwardContexts,
        on_core_end: Callable[[nn.Module], None],
        on_reuse: Callable[[nn.Module], None],
    ) -> None:
        self._attention = attention
        self._contexts, self._on_core_end, self._on_reuse = contexts, on_core_end, on_reuse
        self._names = {module: name for name, module in attention.named_modules()}
        self._running: list[AttentionCall] = []

    def wrap(self, original: Call) -> Call:
        """Return the call of the attention itself."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            leaves, spec = structure.flatten((args, kwargs))
            # Equal arguments stay one object: attention may check whether the query is the key.
            distinct = {id(leaf): leaf for leaf in leaves}
            held, positions = list(distinct.values()), list(distinct)
            order = [positions.index(id(leaf)) for leaf in leaves]
            current = AttentionCall([leaf for leaf in held if isinstance(leaf, torch.Tensor)])
            contexts = self._contexts(self._attention, current)

            def run(*values: Any) -> Any:
                call_args, call_kwargs = spec.unflatten([values[index] for index in order])
                self._running.append(current)
                try:
                    output = original(*call_args, **call_kwargs)
                    if (layer := current.changed_layer()) is not None:
                        raise self._error(layer, "is changed in place")
                    if not current.is_recomputed and not current.is_past_core:
                        self._on_core_end(self._attention)
                    return output
                finally:
                    self._running.pop()
                    current.end()

            return checkpoint(run, *held, use_reentrant=False, context_fn=lambda: contexts)

        return call

    def linear_calls(self) -> dict[nn.Module, Callable[[Call], Call]]:
        """Return what makes the call of each linear layer."""
        return {layer: partial(self._wrap_linear, layer) for layer in linear_layers(self._attention)}

    def _wrap_linear(self, layer: nn.Module, original: Call) -> Call:
        """Return the call of a linear layer, which is not repeated."""

        def call(*args: Any, **kwargs: Any) -> Any:
            current = self._running[-1] if self._running else None
            if current is None or current.is_past_core:
                return original(*args, **kwargs)
            if current.is_recomputed:
                self._on_reuse(layer)
                return current.reuse()
            if not current.knows((*args, *kwargs.values())):
                self._on_core_end(self._attention)
                current.leave_core()
                return original(*args, **kwargs)
            with without_innermost():
                output = original(*args, **kwargs)
                if not isinstance(output, torch.Tensor):
                    raise self._error(layer, f"is a {type(output).__name__}")
                current.keep(layer, output)
            return output

        return call

    def _error(self, layer: nn.Module, reason: str) -> UsageError:
        return UsageError(
            f'recompute = "attention" can\'t recompute {type(self._attention).__name__}: the output of its layer '
            f"{self._names[layer]} {reason}; name units in recompute instead"
        )

    def wrap_other(self, original: Call) -> Call:
        """Return the call of another layer, which is repeated."""

        def call(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if self._running:
                self._running[-1].remember(output)
            return output

        return call


class _Holder:
    """Keeps a tensor as autograd does, beside the graph: hooks pack and unpack it, and changes in place are errors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Before torch 2.13 a node frees what it saved when its output is freed.
        self._output: Any = _Save.apply(tensor.detach().requires_grad_())  # type: ignore[no-untyped-call]

    @property
    def tensor(self) -> torch.Tensor:
        """The kept tensor."""
        tensor: torch.Tensor = self._output.grad_fn.saved_tensors[0]
        return tensor


class _Save(torch.autograd.Function):
    """A node that saves its input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return tensor.new_empty(())


def _storage(tensor: torch.Tensor) -> tuple[int, object]:
    """Return the address of a tensor's storage, and what keeps the address from being reused."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage
