"""Layers and operations that treat the channels of an image, or the features of a vector, each by itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (nn.Linear, *CONVOLUTIONS)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
ELEMENTWISE_MODULES = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
)
POOLS = (
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
)
PADS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
ELEMENTWISE = """
    abs add add_ celu clamp clamp_ clone contiguous div div_ elu exp gelu hardsigmoid hardswish hardtanh iadd imul isub
    itruediv leaky_relu logsigmoid mish mul mul_ neg pow relu relu6 relu_ selu sigmoid silu softplus softsign square
    sub sub_ tanh truediv
"""
POOLING = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d
    max_pool3d
"""
_NAMESPACES = (torch, functional, operator, torch.Tensor)


def is_convolution(module: nn.Module) -> bool:
    """Whether a module computes what torch's convolutions do: a subclass may have a constructor of its own."""
    kind = next((kind for kind in CONVOLUTIONS if isinstance(module, kind)), None)
    names = ("forward", "_conv_forward", "__call__", "__getattr__")
    return kind is not None and all(getattr(type(module), name) is getattr(kind, name) for name in names)


def is_mean_over_space(node: fx.Node, num_spatial: int) -> bool:
    """Whether a node is ``x.mean((2, 3), keepdim=True)`` or the like, for images."""
    if name_of(node.target) != "mean" or len(node.args) > 3:
        return False
    dims: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    keeps = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
    dims = dims if isinstance(dims, tuple | list) else (dims,)
    if keeps is not True or not all(isinstance(dim, int) for dim in dims):
        return False
    return sorted(dim % (2 + num_spatial) for dim in dims) == list(range(2, 2 + num_spatial))


def leads_to(start: fx.Node, ends: Collection[fx.Node]) -> bool:
    """Whether one of the nodes is computed from another."""
    pending, seen = [start], {start}
    while pending:
        node = pending.pop()
        if node in ends:
            return True
        pending += [user for user in node.users if user not in seen]
        seen |= set(node.users)
    return False


def name_of(target: Callable[..., Any] | str) -> str:
    """Return the name of a torch function or of a method, "" for other functions."""
    if isinstance(target, str):
        return target
    name = getattr(target, "__name__", "")
    known = (getattr(namespace, name, None) for namespace in _NAMESPACES)
    return name if any(target is function for function in known) else ""
