"""Find tensor-parallel regions by data flow, in models without attention under a known name.

    x ─ column: conv1 ─ batch norm ─ ReLU ─ row: conv2 ─ all-reduce ─ y

Between a column- and a row-parallel layer, each worker computes its own channels (the features of linear layers), so
nothing there may combine channels. Which operations stand between two layers is read from a symbolic trace (torch.fx)
of the modules' forwards, in train and eval mode; a module that can't be traced is searched inside its children.
Only operations that are known to treat channels alike are accepted. Pure functions; the model is not changed.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from stagewright.engine.tensor.regions.region_plan import RegionPlan, join_names, parameter_holders
from stagewright.machine.hollow import hollow_parameter

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
_ELEMENTWISE_MODULES = (
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
_POOLS = (
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
_ELEMENTWISE = """
    abs add add_ celu clamp clamp_ clone contiguous div div_ elu exp gelu hardsigmoid hardswish hardtanh iadd imul isub
    itruediv leaky_relu logsigmoid mish mul mul_ neg pow relu relu6 relu_ selu sigmoid silu softplus softsign square
    sub sub_ tanh truediv
"""
_POOLING = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d
    max_pool3d
"""
_NAMESPACES = (torch, functional, operator, torch.Tensor)


def find_channel_regions(model: nn.Module) -> tuple[list[RegionPlan], list[str]]:
    """Return the regions of a model, and the linear and convolution layers that are in none."""
    copied = _copy_for_tracing(model)
    if copied is None:
        return [], []
    holders = parameter_holders(model)
    unusable = {
        name for name, module in model.named_modules() if not _is_plain(module) or _is_tied(name, module, holders)
    }
    regions = [region for name, graphs in _traces("", copied) for region in _regions_of(name, copied, graphs, unusable)]
    used = {name for region in regions for name, _ in region.layers()}
    others = [name for name, module in model.named_modules() if type(module) in _LAYERS and name not in used]
    return regions, others


def _copy_for_tracing(model: nn.Module) -> nn.Module | None:
    """Return a copy without weights and values, which a forward may change; None if the model can't be copied."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    memo |= {id(parameter): hollow_parameter(parameter) for parameter in model.parameters()}
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # whatever an attribute of the user's raises
        return None


def _traces(name: str, module: nn.Module) -> Iterator[tuple[str, list[fx.Graph]]]:
    """Yield the largest modules that can be traced, with their graphs in train and eval mode."""
    if not any(isinstance(layer, _LAYERS) for layer in module.modules()):
        return
    try:
        graphs = [fx.Tracer().trace(module.train(training)) for training in (True, False)]
    except Exception:  # whatever a forward raises that is called with a proxy
        for child_name, child in module.named_children():
            yield from _traces(join_names(name, child_name), child)
        return
    yield name, graphs
    for node in graphs[0].nodes:
        if node.op == "call_module" and next(module.get_submodule(node.target).children(), None) is not None:
            yield from _traces(join_names(name, node.target), module.get_submodule(node.target))


def _is_plain(module: nn.Module) -> bool:
    """Whether a module does what its class does: hooks may do anything, and reparametrized weights are computed."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and ("weight" in module._parameters or type(module) not in _LAYERS)


def _is_tied(name: str, module: nn.Module, holders: Mapping[int, list[str]]) -> bool:
    return any(len(holders[id(parameter)]) > 1 for parameter in module.parameters(recurse=False))


def _regions_of(
    prefix: str, model: nn.Module, graphs: list[fx.Graph], unusable: Collection[str]
) -> Iterator[RegionPlan]:
    """Yield the regions that are the same in all graphs of one module."""
    root = model.get_submodule(prefix)
    found = [_Search(root, graph, prefix, unusable).regions() for graph in graphs]
    for region in found[0]:
        if all(region in others for others in found[1:]):
            names = [join_names(prefix, name) for name in (*region.columns, *region.channelwise, region.row)]
            yield RegionPlan(
                owner=_owner(model, names),
                column_layers=tuple(join_names(prefix, name) for name in region.columns),
                row_layer=join_names(prefix, region.row),
                channelwise_layers=tuple(join_names(prefix, name) for name in region.channelwise),
                divisible=dict(region.divisible),
                by_flow=True,
            )


def _owner(model: nn.Module, names: list[str]) -> str:
    """Return the innermost module that holds all layers and has a forward of its own."""
    holders = [name.split(".")[:-1] for name in names]
    equal = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*holders, strict=False))
    parts = [part for part, *_ in equal]
    while parts and isinstance(model.get_submodule(".".join(parts)), nn.ModuleList | nn.ModuleDict):
        parts = parts[:-1]
    return ".".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """The layers of a region, by their names in the traced module."""

    columns: tuple[str, ...]
    row: str
    channelwise: tuple[str, ...]
    divisible: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class _Growth:
    """A region while it is being found."""

    width: int
    is_linear: bool
    columns: list[str] = field(default_factory=list)
    channelwise: list[str] = field(default_factory=list)
    rows: set[str] = field(default_factory=set)
    divided: set[fx.Node] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)


class _Search:
    """The search for regions in one graph."""

    def __init__(self, root: nn.Module, graph: fx.Graph, prefix: str, unusable: Collection[str]) -> None:
        self._root, self._graph = root, graph
        self._unusable = {name.removeprefix(f"{prefix}.") if prefix else name for name in unusable}
        self._num_calls = Counter(node.target for node in graph.nodes if node.op == "call_module")

    def regions(self) -> list[_Region]:
        """Return the regions in the order of the graph; each layer is in one at most."""
        regions: list[_Region] = []
        used: set[str] = set()
        for node in self._graph.nodes:
            layer = self._layer(node)
            if layer is None or node.target in used:
                continue
            growth = self._grow(node, _Growth(_width_out(layer), isinstance(layer, nn.Linear)))
            if growth is None or used & {*growth.columns, *growth.channelwise, *growth.rows}:
                continue
            (row,) = growth.rows
            what = "inner features" if growth.is_linear else "inner channels"
            regions.append(
                _Region(
                    columns=tuple(growth.columns),
                    row=row,
                    channelwise=tuple(growth.channelwise),
                    divisible=((what, growth.width), *(("channel groups", count) for count in sorted(growth.groups))),
                )
            )
            used |= {*growth.columns, *growth.channelwise, row}
        return regions

    def _grow(self, start: fx.Node, growth: _Growth) -> _Growth | None:
        """Divide the output of a layer and all that follows from it; None if something combines its channels."""
        pending = [start]
        while pending:
            node = pending.pop()
            if node in growth.divided:
                continue
            if self._layer(node) is not None:
                growth.columns.append(str(node.target))
            elif self._is_channelwise(node, growth):
                pending.extend(node.all_input_nodes)  # operands of an addition or a product are divided alike
            else:
                return None
            growth.divided.add(node)
            for user in node.users:
                if self._layer(user) is not None and user.all_input_nodes == [node]:
                    growth.rows.add(str(user.target))
                else:
                    pending.append(user)
        is_right = len(growth.rows) == 1 and not growth.rows & set(growth.columns)
        return growth if is_right and self._fits(growth) else None

    def _fits(self, growth: _Growth) -> bool:
        """Whether the layers have the same channels, and columns don't get divided ones."""
        columns = [node for node in growth.divided if node.target in growth.columns and node.op == "call_module"]
        row = self._module(next(iter(growth.rows)))
        return (
            isinstance(row, nn.Linear) == growth.is_linear
            and _width_in(row) == growth.width
            and all(_width_out(self._module(name)) == growth.width for name in growth.columns)
            and all(isinstance(self._module(name), nn.Linear) == growth.is_linear for name in growth.columns)
            and not any(operand in growth.divided for node in columns for operand in node.all_input_nodes)
        )

    def _layer(self, node: fx.Node) -> nn.Module | None:
        """Return the layer that a node calls, if it may be column- or row-parallel."""
        if node.op != "call_module" or node.target in self._unusable or self._num_calls[node.target] > 1:
            return None
        module = self._module(str(node.target))
        return module if type(module) in _LAYERS and getattr(module, "groups", 1) == 1 else None

    def _is_channelwise(self, node: fx.Node, growth: _Growth) -> bool:
        """Whether a node treats each channel by itself, with weights of each channel at most."""
        if node.op in ("call_function", "call_method"):
            name = _name_of(node.target)
            is_dropout = name == "dropout" and growth.is_linear
            is_pool = name in _POOLING.split() and not growth.is_linear
            return name in _ELEMENTWISE.split() or is_dropout or is_pool
        if node.op != "call_module" or node.target in self._unusable or self._num_calls[node.target] > 1:
            return False
        module = self._module(str(node.target))
        if type(module) in _ELEMENTWISE_MODULES:
            return True
        if type(module) is nn.Dropout:
            return growth.is_linear or module.p == 0
        if type(module) in _POOLS:
            return not growth.is_linear
        groups = _channel_groups(module, growth)
        if groups is None:
            return False
        growth.channelwise.append(str(node.target))
        growth.groups |= groups
        return True

    def _module(self, name: str) -> nn.Module:
        return self._root.get_submodule(name)


def _channel_groups(module: nn.Module, growth: _Growth) -> set[int] | None:
    """Return what the workers must divide for a layer with weights of each channel; None if it has no such weights."""
    if type(module) in _NORMS:
        channels: Any = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
        if channels != growth.width or (growth.is_linear and not isinstance(module, nn.BatchNorm1d)):
            return None
        return {module.num_groups} if isinstance(module, nn.GroupNorm) else set()
    if type(module) in _CONVOLUTIONS:
        convolution: Any = module
        if convolution.groups > 1 and convolution.in_channels == convolution.out_channels == growth.width:
            return {convolution.groups}
    return None


def _name_of(target: Callable[..., Any] | str) -> str:
    """Return the name of a torch function or of a method, "" for other functions."""
    if isinstance(target, str):
        return target
    name = getattr(target, "__name__", "")
    known = (getattr(namespace, name, None) for namespace in _NAMESPACES)
    return name if any(target is function for function in known) else ""


def _width_in(layer: nn.Module) -> int:
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)  # type: ignore[arg-type]


def _width_out(layer: nn.Module) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]
