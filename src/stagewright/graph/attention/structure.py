"""Find the attention modules of a unit, and their linear layers.

An attention module is an ``nn.MultiheadAttention``, or a module whose class is named so (``LlamaAttention``,
``BertSelfAttention``) and that holds parameters or linear layers itself. Of nested ones the innermost counts:
``BertAttention`` holds a ``BertSelfAttention``, whose scores are the ones to recompute.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_NAMES = ("attention", "attn")


def find_attentions(unit: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a unit, itself included, in module order."""
    return list(_innermost(unit))


def linear_layers(attention: nn.Module) -> list[nn.Module]:
    """Return the layers of an attention that multiply by a weight matrix: projections and convolutions."""
    leaves = [module for module in attention.modules() if module is not attention and not any(module.children())]
    return [leaf for leaf in leaves if _has_matrix(leaf) and not isinstance(leaf, nn.Embedding)]


def other_layers(attention: nn.Module) -> list[nn.Module]:
    """Return the other layers of an attention that have parameters: norms of queries and keys, embeddings."""
    linear = set(linear_layers(attention))
    leaves = [module for module in attention.modules() if module is not attention and not any(module.children())]
    return [leaf for leaf in leaves if leaf not in linear and any(True for _ in leaf.parameters())]


def _innermost(module: nn.Module) -> Iterator[nn.Module]:
    inside = [found for child in module.children() for found in _innermost(child)]
    if inside:
        yield from inside
    elif _is_attention(module):
        yield module


def _is_attention(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    is_named = any(name in type(module).__name__.lower() for name in _NAMES)
    holds_weights = any(True for _ in module.parameters(recurse=False)) or any(map(_has_matrix, module.children()))
    return is_named and holds_weights


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
