"""Divided vocabulary: embeddings, language-model heads and the loss divided over the workers of a tensor axis.

    ids ─► embedding: rows of this worker's tokens, 0 for others ─► all-reduce ─► hidden states
    hidden states ─► head: logits of this worker's tokens ─► cross-entropy of divided logits (``cross_entropy.py``)

Shards differ by at most one row, so any vocabulary can be divided. Tied weights are one parameter, divided once. What
can't be divided with certainty stays whole, with the reason.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType

import torch
from torch import nn

import stagewright.engine.tensor.cross_entropy  # noqa: F401  # registers the loss of divided logits
from stagewright.engine.tensor.axis import TensorAxis
from stagewright.engine.tensor.divided_logits import DividedLogits, Division, divide
from stagewright.engine.tensor.layers import LAYOUTS, Region, ShardLayout
from stagewright.engine.tensor.regions.region_plan import parameter_holders
from stagewright.engine.tensor.regions.requirements import methods_of
from stagewright.errors import UsageError
from stagewright.graph.compilation import mark_eager

# Embeddings that multiply the rows of ``nn.Embedding`` by a number (BART, Gemma 3).
_SCALED_EMBEDDINGS = "ScaledWordEmbedding"
_HARMLESS = ("dtype", "device", "data")  # what code may read of a weight outside of its layer
_SETUP = ("tie_weights", "_tie_weights", "_init_weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPlan:
    """The layers of a model whose vocabulary is divided."""

    size: int
    """Number of tokens."""
    embeddings: tuple[str, ...]
    heads: tuple[str, ...]
    """Linear layers from hidden states to logits."""
    replicated: str = ""
    """Why other embeddings or heads of the vocabulary stay whole; "" if there are none."""


def find_vocabulary(model: nn.Module, num_workers: int, others: Iterable[str] = ()) -> VocabularyPlan:
    """Find a model's embeddings and heads; raise if there are none that can be divided.

    ``others``: layers that belong to regions.
    """
    modules = dict(model.named_modules())
    size = _vocabulary_size(model, modules)
    kind = type(model).__name__
    if size is None:
        raise UsageError(
            f"vocab_parallel = true divides the embedding and head of a vocabulary, and {kind} has none: leave it out"
        )
    if size < num_workers:
        raise UsageError(
            f"vocab_parallel = true divides a vocabulary over tensor = {num_workers} workers, and that of {kind} has "
            f"{size} tokens: leave it out"
        )
    in_regions = set(others)
    candidates = {
        name: module for name, module in modules.items() if name not in in_regions and _has_rows(module, size)
    }
    reasons = {name: reason for name, module in candidates.items() if (reason := _reason_whole(name, module, model))}
    holders = parameter_holders(model)
    for name, module in candidates.items():
        reason = _untied_reason(name, module, candidates, reasons, holders, modules)
        if reason and name not in reasons:
            reasons[name] = reason
    divided = [name for name in candidates if name not in reasons]
    if not divided:
        raise UsageError(
            f"vocab_parallel = true can't divide the vocabulary of {kind}: {next(iter(reasons.values()))}; leave it out"
        )
    return VocabularyPlan(
        size=size,
        embeddings=tuple(name for name in divided if isinstance(modules[name], nn.Embedding)),
        heads=tuple(name for name in divided if isinstance(modules[name], nn.Linear)),
        replicated=next(iter(reasons.values()), ""),
    )


def shard_vocabulary(model: nn.Module, plan: VocabularyPlan, axis: TensorAxis, *, gather: bool = False) -> None:
    """Divide embeddings and heads in place; ``gather``: gather logits at once, for code that is compiled."""
    layout = ShardLayout(dim=0, sections=(1,), axis=axis, full_size=plan.size)
    modules, holders = dict(model.named_modules()), parameter_holders(model)
    done: set[int] = set()
    for name in (*plan.embeddings, *plan.heads):
        layer = modules[name]
        for parameter in layer.parameters(recurse=False):
            if id(parameter) not in done:
                done.add(id(parameter))
                # Keep the parameter object: the caller may hold references to it.
                parameter.grad = None
                parameter.data = layout.shard(parameter.data)
            for holder in holders[id(parameter)]:
                owner, _, attribute = holder.rpartition(".")
                modules[owner].__dict__.setdefault(LAYOUTS, {})[attribute] = layout
        kind = type(layer)
        style = _Embedding if isinstance(layer, nn.Embedding) else _Head
        if (style, kind) not in _classes:
            _classes[style, kind] = type(f"Vocab{kind.__name__}", (style, kind), {})
        layer.__class__ = _classes[style, kind]
        layer._rows, layer._region, layer._gather = layout, Region(axis), gather
        if gather:
            mark_eager(layer)


_classes: dict[tuple[type, type], type] = {}


class _Embedding(nn.Module):
    """An embedding with the rows of some tokens: zeros for others, then an all-reduce."""

    _rows: ShardLayout
    _region: Region
    padding_idx: int | None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, held = self._rows, self._rows.sizes[self._rows.axis.index]
        assert rows.full_size is not None
        _require_tokens(ids, rows.full_size)
        index = ids - rows.start
        is_outside = (index < 0) | (index >= held)
        padding = self.padding_idx
        try:
            if padding is not None:
                padding -= rows.start
                self.padding_idx, padding = padding if 0 <= padding < held else None, self.padding_idx
            values = super().forward(index.masked_fill(is_outside, 0))
        finally:
            self.padding_idx = padding
        return self._region.axis.reduce_from_region(values.masked_fill(is_outside[..., None], 0))


class _Head(nn.Module):
    """A head with the logits of some tokens."""

    _rows: ShardLayout
    _region: Region
    _gather: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axis = self._region.axis
        local = super().forward(axis.copy_to_region(x))
        logits = divide(local, Division(axis=axis, sizes=self._rows.sizes, dim=local.dim() - 1))
        return logits.to_whole() if self._gather and isinstance(logits, DividedLogits) else logits


def _require_tokens(ids: torch.Tensor, size: int) -> None:
    """Raise where an id is no token, as an embedding does on one device."""
    is_outside = ((ids < 0) | (ids >= size)).any()
    if ids.device.type != "cpu":
        torch._assert_async(~is_outside)
    elif bool(is_outside):
        raise IndexError("index out of range in self")


def _vocabulary_size(model: nn.Module, modules: dict[str, nn.Module]) -> int | None:
    """Return the tokens of the configuration, or else the rows of an embedding that a linear layer maps back to."""
    rows = [module.num_embeddings for module in modules.values() if isinstance(module, nn.Embedding)]
    get_text_config = getattr(getattr(model, "config", None), "get_text_config", None)
    size = getattr(get_text_config() if get_text_config else None, "vocab_size", None)
    if isinstance(size, int) and size in rows:
        return size
    outputs = {module.out_features for module in modules.values() if isinstance(module, nn.Linear)}
    return max((count for count in rows if count in outputs), default=None)


def _has_rows(module: nn.Module, size: int) -> bool:
    """Return whether a layer has one row for each token."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings == size
    return isinstance(module, nn.Linear) and module.out_features == size and module.in_features != size


def _reason_whole(name: str, module: nn.Module, model: nn.Module) -> str:
    """Return why a layer must stay whole; "" if it can be divided."""
    kind = type(module)
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            return f"{name} has max_norm, which changes rows that other workers hold"
        if module.sparse or module.scale_grad_by_freq:
            option = "sparse" if module.sparse else "scale_grad_by_freq"
            return f"{name} has {option} = True, whose gradients depend on all tokens"
        if kind.forward is not nn.Embedding.forward and not kind.__name__.endswith(_SCALED_EMBEDDINGS):
            return f"{name} ({kind.__name__}) has its own forward"
    elif kind is not nn.Linear:
        return f"{name} ({kind.__name__}) is no plain linear layer"
    reader = _reader_of_weight(model, name.rpartition(".")[2])
    return f"{reader} uses the weight of {name} outside of that layer" if reader else ""


def _untied_reason(
    name: str,
    module: nn.Module,
    candidates: dict[str, nn.Module],
    reasons: dict[str, str],
    holders: dict[int, list[str]],
    modules: dict[str, nn.Module],
) -> str:
    """Return why a layer must stay whole because of another holder of its parameters."""
    for parameter in module.parameters(recurse=False):
        for holder in holders[id(parameter)]:
            owner, _, attribute = holder.rpartition(".")
            if owner in reasons and owner != name:
                return f"{name} is tied to {owner}, and {reasons[owner]}"
            if owner not in candidates and (attribute != "bias" or _reads(type(modules[owner]), attribute)):
                return f"{name} is tied to {holder}, which can't be divided"
    return ""


def _reads(kind: type, attribute: str) -> bool:
    """Return whether the methods of a class may read an attribute of this name."""
    return any(attribute in code.co_names for code in methods_of(kind) if not _is_setup(code))


def _reader_of_weight(model: nn.Module, layer: str) -> str:
    """Return the class whose code reads ``….layer.weight`` for more than its data type and device; "" if none does."""
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        if not kind.__module__.startswith("torch."):
            for code in methods_of(kind):
                if not _is_setup(code) and _reads_weight(code, layer):
                    return kind.__name__
    return ""


def _is_setup(code: CodeType) -> bool:
    """Return whether a method belongs to the setup of a model, before its vocabulary is divided."""
    is_accessor = code.co_name.startswith(("get_", "set_", "resize_", "_resize_"))
    return is_accessor or code.co_name in _SETUP or code.co_qualname.startswith("PreTrainedModel.")


def _reads_weight(code: CodeType, layer: str) -> bool:
    """Return whether code reads ``….layer.weight``, other than its data type and device."""
    names = [entry.argval if entry.opname.startswith("LOAD_") else None for entry in dis.get_instructions(code)]
    triples = zip(names, names[1:], [*names[2:], None], strict=False)
    return any(first == layer and second == "weight" and third not in _HARMLESS for first, second, third in triples)
