"""Find the blocks whose sequence tensor-parallel workers can divide, and where one block passes shards to the next.

A block is a unit, or else a module inside it, that holds regions and beside them only layers that treat each token by
itself: norms, dropout, linear layers, activations. What mixes tokens outside of a region stays whole, with the reason.
Pure functions of the module tree and the graphs of stages; the model is not changed.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from stagewright.engine.tensor.axis import SEQUENCE_DIM
from stagewright.engine.tensor.regions.region_plan import RegionPlan, parameter_holders
from stagewright.errors import UsageError
from stagewright.graph.stage import Stage

_TOKENWISE = (nn.Linear, nn.Dropout, nn.Identity)
_TOKENWISE_NAMES = ("Conv1D", "LayerScale", "DropPath")
_TOKENWISE_ENDINGS = ("LayerNorm", "RMSNorm", "LayerScale", "DropPath")
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One block with a divided sequence."""

    name: str
    length: int | None = None
    """Tokens of the example, where the block receives or returns shards; else None."""
    receives_shard: bool = False
    """Whether the block before passes on its shard, in the same stage."""
    returns_shard: bool = False
    """Whether the block after takes its shard, in the same stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """The blocks with divided sequences."""

    blocks: tuple[BlockPlan, ...]
    partial: frozenset[str]
    """Parameters of which each worker has the gradient of its own tokens: norms, biases of row-parallel layers."""
    whole: str = ""
    """Why the sequence of other blocks is not divided; "" if there are none."""

    def without_chains(self) -> SequencePlan:
        """Return the plan with every block divided and joined by itself."""
        return replace(self, blocks=tuple(BlockPlan(name=block.name) for block in self.blocks))


def plan_sequence_parallel(
    model: nn.Module, regions: Sequence[RegionPlan], stages: Sequence[Stage], num_workers: int
) -> SequencePlan:
    """Choose the blocks of a model that is cut into stages; raise ``UsageError`` if there are none."""
    calls = Counter(call.target for stage in stages for call in stage.calls)
    names: list[str] = []
    reasons: list[str] = []
    for target in calls:
        found, reason = _blocks_in(model, target, regions)
        names += found
        reasons += [reason] if reason else []
    if not names:
        reason = reasons[0] if reasons else "no unit holds whole attention or feed-forward layers and a norm"
        raise UsageError(
            f"sequence_parallel = true can't divide the sequences of {type(model).__name__} over tensor = "
            f"{num_workers} workers: {reason}; leave it out"
        )
    once = {name for name in names if calls[name] == 1}
    blocks = {name: BlockPlan(name=name) for name in names}
    for stage in stages:
        for first, second, length in _chains(stage, once):
            blocks[first] = replace(blocks[first], length=length, returns_shard=True)
            blocks[second] = replace(blocks[second], length=length, receives_shard=True)
    return SequencePlan(
        blocks=tuple(blocks.values()),
        partial=frozenset(_partial_parameters(model, names, regions)),
        whole=reasons[0] if reasons else "",
    )


def _blocks_in(model: nn.Module, target: str, regions: Sequence[RegionPlan]) -> tuple[list[str], str]:
    """Return the outermost blocks in a unit, and why the unit is not one; no reason if it holds no region."""
    if not _regions_in(target, regions):
        return [], ""
    reason = _reason_whole(model, target, regions)
    if not reason:
        return [target], ""
    found: list[str] = []
    for name, _ in model.get_submodule(target).named_modules(prefix=target):
        is_inside = any(name.startswith(f"{block}.") for block in found)
        if name != target and not is_inside and _regions_in(name, regions) and not _reason_whole(model, name, regions):
            found.append(name)
    return found, reason


def _regions_in(name: str, regions: Iterable[RegionPlan]) -> list[RegionPlan]:
    """Return the regions of which a module holds all layers."""
    prefix = f"{name}." if name else ""
    return [region for region in regions if all(layer.startswith(prefix) for layer, _ in region.layers())]


def _reason_whole(model: nn.Module, target: str, regions: Sequence[RegionPlan]) -> str:
    """Return why a module with regions is no block; "" if it is one."""
    own = _regions_in(target, regions)
    for region in regions:
        if region not in own and any(layer.startswith(f"{target}.") for layer, _ in region.layers()):
            return f"{target} holds a part of the split layers of {region.owner}"
    layers = {layer for region in own for layer, _ in region.layers()}
    by_flow = (layer for region in own if region.by_flow for layer, _ in region.layers())
    mixing = [name for name in by_flow if not _is_tokenwise(model.get_submodule(name))]
    if mixing:
        return f"{mixing[0]} ({type(model.get_submodule(mixing[0])).__name__}) may use several tokens at once"
    attentions = [region.owner for region in own if region.is_attention]
    if target in attentions:
        return f"{target} holds attention alone, without the norm before it"
    has_norm = False
    for name, module in model.get_submodule(target).named_modules(prefix=target):
        if name in layers or any(name == owner or name.startswith(f"{owner}.") for owner in attentions):
            continue
        kind = type(module).__name__
        if "Attention" in kind and not any(owner.startswith(f"{name}.") for owner in attentions):
            return f"{name} ({kind}) attends to other tokens, but is not split"
        if name != target and not list(module.children()) and not _is_tokenwise(module):
            return f"{name} ({kind}) may use several tokens at once"
        has_norm = has_norm or kind.endswith("Norm")
    if not has_norm:
        return f"{target} has no norm beside its split layers"
    holders = parameter_holders(model)
    for name, parameter in model.get_submodule(target).named_parameters(prefix=target):
        other = next((holder for holder in holders[id(parameter)] if not holder.startswith(f"{target}.")), None)
        if other is not None:
            return f"{name} is tied to {other}"
    return ""


def _is_tokenwise(module: nn.Module) -> bool:
    """Return whether a layer without children is known to treat each token by itself."""
    kind = type(module)
    is_named = kind.__name__ in _TOKENWISE_NAMES or kind.__name__.endswith(_TOKENWISE_ENDINGS)
    return isinstance(module, _TOKENWISE) or is_named or kind.__module__ in _ACTIVATIONS


def _chains(stage: Stage, blocks: set[str]) -> Iterator[tuple[str, str, int]]:
    """Yield pairs of blocks of which the second alone takes what the first returns, and the tokens of the example."""
    nodes = [node for node in stage.graph.nodes if node.op == "call_module"]
    names = {node: call.target for node, call in zip(nodes, stage.calls, strict=True)}
    for node, target in names.items():
        hidden = _hidden_node(node)
        if target not in blocks or hidden is None or list(hidden.users) != [node]:
            continue
        source = hidden
        if hidden.target is operator.getitem and isinstance(hidden.args[0], fx.Node):
            source = hidden.args[0]
            used = [user for user in source.users if user.users]
            if used != [hidden]:
                continue
        value = hidden.meta.get("val")
        if names.get(source) in blocks and isinstance(value, torch.Tensor) and value.dim() == 3:
            tokens = value.shape[SEQUENCE_DIM]
            if type(tokens) is int:  # the same at every batch size
                yield names[source], target, tokens


def _hidden_node(node: fx.Node) -> fx.Node | None:
    """Return the node of a unit's hidden states, as ``find_hidden`` finds them among its arguments."""
    named = node.kwargs.get("hidden_states")
    if isinstance(named, fx.Node):
        return named
    for argument in node.all_input_nodes:
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return argument
    return None


def _partial_parameters(model: nn.Module, blocks: Sequence[str], regions: Sequence[RegionPlan]) -> Iterator[str]:
    """Yield the parameters of blocks that are used on shards of the sequence."""
    whole = [name for region in regions for name, style in region.layers() if style != "row"]
    whole += [f"{region.row_layer}.weight" for region in regions]
    prefixes = tuple(f"{block}." for block in blocks)
    for name, _ in model.named_parameters():
        if name.startswith(prefixes) and not any(name == layer or name.startswith(f"{layer}.") for layer in whole):
            yield name
