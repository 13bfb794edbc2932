"""One observed call of a unit: what its attention calls work on.

hidden ──────────── queries ─┐
encoder's output ── keys ────┼─ attention        where keys come from: autograd's graph
padding, causal ─── masks ───┘                   of which inputs masks are made: the tensors that functions return
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from stagewright import structure
from stagewright.engine.context.multihead import MultiheadCall
from stagewright.engine.context.sources import Sources


class UnitCall:
    """One call of a unit: its inputs, and what its attention calls work on."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._hidden: int | None = None
        self._keys: list[int] = []
        self._makes_masks = False
        self._sequence_dim: int | None = None
        self._inputs: list[torch.Tensor] = []
        self._roots: dict[int, torch.Tensor] = {}
        """The tensors where autograd's graph begins, by the number of the input with features."""
        self._origins: dict[int, set[int]] = {}
        """Of which other inputs a tensor is made, by its identity."""
        self._held: list[torch.Tensor] = []
        """Tensors whose identities must not be reused."""
        self._of_masks: set[int] = set()
        self._of_states: set[int] = set()
        """Inputs that attention masks, and hidden states, are made of."""

    def trace(self, value: torch.Tensor) -> torch.Tensor:
        """Return an input as a tensor that can be traced back to."""
        number = len(self._inputs)
        if _has_features(value):
            self._roots[number] = value.detach().requires_grad_()
            if self._hidden is None:
                self._hidden = number
            value = self._roots[number].clone()  # the block may change its input in place
        else:
            self._origins.setdefault(id(value), set()).add(number)
        self._inputs.append(value)
        return value

    def follow(self, arguments: Any, result: Any) -> None:
        """Note that a function has made its result of these arguments."""
        given = structure.tensors(arguments)
        origins = self._made_of(given)
        if not origins:
            return
        for tensor in structure.tensors(result) or given[:1]:  # an assignment to items returns nothing
            if tensor.requires_grad:
                self._of_states |= origins
            else:
                self._origins.setdefault(id(tensor), set()).update(origins)
                self._held.append(tensor)

    def add(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> str:
        """Add a call of ``scaled_dot_product_attention``; return why it can't be divided, or ""."""
        if self._hidden is None:
            return _NO_STATES
        length = self._inputs[self._hidden].shape[1]
        if query.dim() != 4 or query.shape[-2] != length:
            return f"has hidden states of {length} tokens, of which attention gets queries of shape {[*query.shape]}"
        masks = [] if mask is None else [mask]
        return self._add(1, (query, key, value), (length, key.shape[-2]), masks)

    def add_multihead(self, call: MultiheadCall) -> str:
        """Add a call of torch's own attention; return why it can't be divided, or ""."""
        query, key, _ = call.sources
        if self._hidden is None or query.dim() != 3:
            return _NO_STATES
        shape, hidden = tuple(query.shape[:2]), tuple(self._inputs[self._hidden].shape[:2])
        if hidden not in (shape, shape[::-1]):
            return f"has hidden states of shape {[*hidden]}, of which attention gets queries of shape {[*shape]}"
        dim = 0 if hidden == shape else 1
        if shape[0] == shape[1]:
            known = _sequence_dim(query, self._roots[self._hidden])
            if known is None:
                return f"has {shape[0]} samples of as many tokens in its example (another batch size tells them apart)"
            dim = known
        return self._add(dim, call.sources, (query.shape[0], key.shape[0]), call.given_masks)

    def _add(
        self,
        sequence_dim: int,
        sources: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        lengths: tuple[int, int],
        masks: Sequence[torch.Tensor],
    ) -> str:
        assert self._hidden is not None
        if self._sequence_dim not in (None, sequence_dim):
            return "has tokens in dimension 0 for one call of attention, and in dimension 1 for another"
        self._sequence_dim = sequence_dim
        traced = self._traced(sources[1])
        candidates = [self._hidden] if not traced or self._hidden in traced else sorted(traced)
        key_inputs = [number for number in candidates if self._inputs[number].shape[sequence_dim] == lengths[1]]
        if not key_inputs:
            own = ", ".join(str(self._inputs[number].shape[sequence_dim]) for number in candidates)
            return f"attends from {lengths[0]} to {lengths[1]} tokens, made of inputs of {own}"
        self._keys.append(key_inputs[0])
        self._makes_masks |= any(all(mask is not value for value in self._inputs) for mask in masks)
        self._of_masks |= self._made_of(masks)
        for mask in masks:
            of_states = set().union(*map(self._traced, sources))
            biases = self._traced(mask) - of_states
            self._of_masks |= {number for number in biases if tuple(self._inputs[number].shape[-2:]) == lengths}
        return ""

    def sources(self) -> Sources | None:
        """Return what the attention calls work on, ``None`` if there was none."""
        if not self._keys:
            return None
        assert self._hidden is not None
        assert self._sequence_dim is not None
        return Sources(
            hidden=self._hidden,
            keys=tuple(self._keys),
            masks=tuple(sorted(self._of_masks - self._of_states)),
            makes_masks=self._makes_masks,
            sequence_dim=self._sequence_dim,
        )

    def _traced(self, value: torch.Tensor) -> set[int]:
        """Return the numbers of the inputs with features that a tensor is computed from."""
        roots = set(_roots(value))
        return {number for number, root in self._roots.items() if id(root) in roots}

    def _made_of(self, values: Iterable[torch.Tensor]) -> set[int]:
        return set().union(*(self._origins.get(id(value), ()) for value in values))


_NO_STATES = "takes no hidden states of the shape [samples, tokens, features]"


def _has_features(value: torch.Tensor) -> bool:
    """Whether a tensor may be hidden states: samples, tokens, features."""
    return value.is_floating_point() and value.dim() == 3


def _sequence_dim(query: torch.Tensor, hidden: torch.Tensor) -> int | None:
    """Return the dimension of tokens in hidden states of which a query of as many tokens as samples is made.

    The query of sample 1 is made of this sample alone.
    """
    chosen = query[0, 1]
    factors = torch.linspace(1, 2, chosen.numel(), dtype=chosen.dtype, device=chosen.device)
    (gradient,) = torch.autograd.grad((chosen * factors).sum(), hidden, retain_graph=True, allow_unused=True)
    if gradient is None or bool(gradient[0, 1].any()) == bool(gradient[1, 0].any()):
        return None
    return 0 if bool(gradient[0, 1].any()) else 1


def _roots(value: torch.Tensor) -> Iterable[int]:
    """Yield the identities of the tensors where the autograd graph of a value begins."""
    waiting, done = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in done:
            continue
        done.add(node)
        if hasattr(node, "variable"):
            yield id(node.variable)
        waiting.extend(next_node for next_node, _ in node.next_functions)
