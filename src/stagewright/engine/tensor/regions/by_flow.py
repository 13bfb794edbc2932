"""Find tensor-parallel regions by data flow, in models without attention under a known name.

    x ─ column: conv1 ─ batch norm ─ ReLU ─ row: conv2 ─ all-reduce ─ y

    x ─ column: expand ─┬───────────────────────────────────────────────────────┬─ × ─ row: project ─ all-reduce ─ y
                        └─ mean ─ row: squeeze ─ all-reduce ─ column: excite ───┘

Between a column- and a row-parallel layer, each worker computes its own channels (the features of linear layers), so
nothing there may combine channels. Which operations stand between two layers is read from a symbolic trace (torch.fx)
of the modules' forwards, in train and eval mode; a module that can't be traced is searched inside its children.
Only operations that are known to treat channels alike are accepted. Pure functions; the model is not changed.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from stagewright.engine.tensor.regions.channel_operations import (
    ELEMENTWISE,
    ELEMENTWISE_MODULES,
    LAYERS,
    NORMS,
    PADS,
    POOLING,
    POOLS,
    is_convolution,
    is_mean_over_space,
    leads_to,
    name_of,
)
from stagewright.engine.tensor.regions.region_plan import RegionPlan, join_names, parameter_holders
from stagewright.machine.hollow import hollow_parameter


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
    others = [name for name, module in model.named_modules() if type(module) in LAYERS and name not in used]
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
    if not any(isinstance(layer, LAYERS) for layer in module.modules()):
        return
    try:
        graphs = [_Tracer().trace(module.train(training)) for training in (True, False)]
    except Exception:  # whatever a forward raises that is called with a proxy
        for child_name, child in module.named_children():
            yield from _traces(join_names(name, child_name), child)
        return
    yield name, graphs
    for node in graphs[0].nodes:
        if node.op == "call_module" and next(module.get_submodule(node.target).children(), None) is not None:
            yield from _traces(join_names(name, node.target), module.get_submodule(node.target))


class _Tracer(fx.Tracer):
    """A tracer that calls convolutions of other packages as torch's own."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return super().is_leaf_module(module, name) or is_convolution(module)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module does what its class does: hooks may do anything, and reparametrized weights are computed."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and ("weight" in module._parameters or not isinstance(module, LAYERS))


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
            names = [
                join_names(prefix, name)
                for name in (*region.columns, *region.channelwise, *region.squeezes, region.row)
            ]
            yield RegionPlan(
                owner=_owner(model, names),
                column_layers=tuple(join_names(prefix, name) for name in region.columns),
                row_layer=join_names(prefix, region.row),
                squeeze_layers=tuple(join_names(prefix, name) for name in region.squeezes),
                channelwise_layers=tuple(join_names(prefix, name) for name in region.channelwise),
                divisible=dict(region.divisible),
                by_flow=True,
                calls_dropout=any(other.calls_dropout for others in found for other in others if other == region),
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
    squeezes: tuple[str, ...]
    channelwise: tuple[str, ...]
    divisible: tuple[tuple[str, int], ...]
    calls_dropout: bool = field(default=False, compare=False)


@dataclass(slots=True)
class _Growth:
    """A region while it is being found."""

    width: int
    num_spatial: int
    """Dimensions of space, which follow that of the channels; 0 for linear layers, whose features are last."""
    columns: list[str] = field(default_factory=list)
    channelwise: list[str] = field(default_factory=list)
    rows: dict[str, fx.Node] = field(default_factory=dict)
    squeezes: list[str] = field(default_factory=list)
    divided: set[fx.Node] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    calls_dropout: bool = False

    @property
    def is_linear(self) -> bool:
        return self.num_spatial == 0


class _Search:
    """The search for regions in one graph."""

    def __init__(self, root: nn.Module, graph: fx.Graph, prefix: str, unusable: Collection[str]) -> None:
        self._root, self._graph = root, graph
        self._unusable = {name.removeprefix(f"{prefix}.") if prefix else name for name in unusable}
        self._num_calls = Counter(node.target for node in graph.nodes if node.op == "call_module")

    def regions(self) -> list[_Region]:
        """Return the regions; each layer is in one at most, and a wide region comes before a narrow one."""
        starts = [(node, layer) for node in self._graph.nodes if (layer := self._layer(node)) is not None]
        growths = [
            self._grow(node, _Growth(_width_out(layer), len(getattr(layer, "kernel_size", ()))))
            for node, layer in starts
        ]
        regions: list[_Region] = []
        used: set[str] = set()
        for growth in sorted(filter(None, growths), key=lambda growth: -growth.width):
            layers = {*growth.columns, *growth.channelwise, *growth.rows}
            if used & layers:
                continue
            (row,) = growth.rows.keys() - set(growth.squeezes)
            what = "inner features" if growth.is_linear else "inner channels"
            regions.append(
                _Region(
                    columns=tuple(growth.columns),
                    row=row,
                    squeezes=tuple(growth.squeezes),
                    channelwise=tuple(growth.channelwise),
                    divisible=((what, growth.width), *(("channel groups", count) for count in sorted(growth.groups))),
                    calls_dropout=growth.calls_dropout,
                )
            )
            used |= layers
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
                    growth.rows[str(user.target)] = user
                else:
                    pending.append(user)
        growth.squeezes = self._find_squeezes(growth)
        is_right = len(growth.rows) == 1 + len(growth.squeezes) and not growth.rows.keys() & set(growth.columns)
        return growth if is_right and self._fits(growth) else None

    def _find_squeezes(self, growth: _Growth) -> list[str]:
        """Return the rows that take a mean over space, and whose outputs lead to columns of the same region.

        Each costs an all-reduce of as many values as it has output channels, not of a whole image.
        """
        columns = {node for node in growth.divided if node.op == "call_module" and node.target in growth.columns}
        return [
            name
            for name, node in growth.rows.items()
            if self._is_mean(node.all_input_nodes[0], growth) and leads_to(node, columns)
        ]

    def _is_mean(self, node: fx.Node, growth: _Growth) -> bool:
        """Whether a value is a mean over all of space, but for operations on each of its elements."""
        while node in growth.divided and not self._is_global_pool(node, growth):
            if len(node.all_input_nodes) != 1 or self._layer(node) is not None:
                return False
            node = node.all_input_nodes[0]
        return node in growth.divided

    def _is_global_pool(self, node: fx.Node, growth: _Growth) -> bool:
        """Whether a node returns one value for each channel."""
        if node.op == "call_module":
            module: Any = self._module(str(node.target))
            sizes = getattr(module, "output_size", None) if type(module) in POOLS else None
        elif name_of(node.target).startswith("adaptive"):
            sizes = node.kwargs.get("output_size", node.args[1] if len(node.args) > 1 else None)
        else:
            return is_mean_over_space(node, growth.num_spatial)
        return all(size == 1 for size in (sizes if isinstance(sizes, tuple | list) else (sizes,)))

    def _fits(self, growth: _Growth) -> bool:
        """Whether the layers have the same channels, and columns don't get divided ones."""
        columns = [node for node in growth.divided if node.target in growth.columns and node.op == "call_module"]
        rows = [self._module(name) for name in growth.rows]
        return (
            all(isinstance(row, nn.Linear) == growth.is_linear for row in rows)
            and all(_width_in(row) == growth.width for row in rows)
            and all(_width_out(self._module(name)) == growth.width for name in growth.columns)
            and all(isinstance(self._module(name), nn.Linear) == growth.is_linear for name in growth.columns)
            and not any(operand in growth.divided for node in columns for operand in node.all_input_nodes)
        )

    def _layer(self, node: fx.Node) -> nn.Module | None:
        """Return the layer that a node calls, if it may be column- or row-parallel."""
        if node.op != "call_module" or node.target in self._unusable or self._num_calls[node.target] > 1:
            return None
        module = self._module(str(node.target))
        return module if type(module) in LAYERS and getattr(module, "groups", 1) == 1 else None

    def _is_channelwise(self, node: fx.Node, growth: _Growth) -> bool:
        """Whether a node treats each channel by itself, with weights of each channel at most."""
        if node.op in ("call_function", "call_method"):
            name = name_of(node.target)
            is_dropout = name == "dropout" and growth.is_linear
            growth.calls_dropout |= is_dropout
            is_pool = name in POOLING.split() and not growth.is_linear
            is_mean = not growth.is_linear and is_mean_over_space(node, growth.num_spatial)
            return name in ELEMENTWISE.split() or is_dropout or is_pool or is_mean
        if node.op != "call_module" or node.target in self._unusable or self._num_calls[node.target] > 1:
            return False
        module = self._module(str(node.target))
        if type(module) in ELEMENTWISE_MODULES:
            return True
        if type(module) is nn.Dropout:
            return growth.is_linear or module.p == 0
        if type(module) in (*POOLS, *PADS):
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
    if type(module) in NORMS:
        channels: Any = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
        if channels != growth.width or (growth.is_linear and not isinstance(module, nn.BatchNorm1d)):
            return None
        return {module.num_groups} if isinstance(module, nn.GroupNorm) else set()
    if is_convolution(module):
        convolution: Any = module
        if convolution.groups > 1 and convolution.in_channels == convolution.out_channels == growth.width:
            return {convolution.groups}
    return None


def _width_in(layer: nn.Module) -> int:
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)  # type: ignore[arg-type]


def _width_out(layer: nn.Module) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]
