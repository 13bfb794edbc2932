"""Find the units that divide the sequence of a layer which is captured as several units.

    model.layers.0      input_layernorm   self_attn   post_attention_layernorm   mlp.gate   mlp.experts
                        part              part        part                       whole      whole

Such a layer is opened because its model collects values from inside it, such as the router logits of a mixture of
experts. Its parts take and return shards of the hidden states: split attentions and feed-forward layers, and layers
that treat each token by itself. Its other units take whole values; operations between units take shards or whole values
(``sequence_stage.py``). Pure functions of the module tree and the graphs of stages.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx, nn

from stagewright.engine.tensor.regions.region_plan import RegionPlan, parameter_holders
from stagewright.engine.tensor.sequence_stage import changed_in_place, find_divided, hidden_node, num_tokens
from stagewright.graph.stage import Stage

_TOKENWISE = (nn.Linear, nn.Dropout, nn.Identity)
_TOKENWISE_NAMES = ("Conv1D", "LayerScale", "DropPath")
_TOKENWISE_ENDINGS = ("LayerNorm", "RMSNorm", "LayerScale", "DropPath")
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


def find_parts(
    model: nn.Module, regions: Sequence[RegionPlan], stages: Sequence[Stage], blocks: Sequence[str]
) -> tuple[dict[str, int], str]:
    """Return the parts of opened layers with the tokens of the example, and why there are none ("" if unknown).

    Where there are any, the units among ``blocks`` are parts too, so that shards pass between them.
    """
    lengths = _unit_lengths(stages)
    fitting = [name for name in lengths if name not in blocks and _is_part(model, name, regions)]
    layers = {layer for region in regions if (layer := _opened_layer(model, region, fitting))}
    parts = [name for name in fitting if any(name.startswith(f"{layer}.") for layer in layers)]
    if not parts:
        return {}, ""
    parts += [name for name in blocks if name in lengths]
    for stage in stages:
        changed = changed_in_place(stage.graph, find_divided(stage.graph, set(parts)))
        if changed is not None:
            return {}, f"its code changes the value {changed.name} between two units in place"
    return {name: lengths[name] for name in parts}, ""


def _unit_lengths(stages: Sequence[Stage]) -> dict[str, int]:
    """Return the tokens of each unit that is called once, takes hidden states and returns as many tokens."""
    nodes = [node for stage in stages for node in stage.graph.nodes if node.op == "call_module"]
    targets = [call.target for stage in stages for call in stage.calls]
    calls = Counter(targets)
    lengths = {}
    for node, target in zip(nodes, targets, strict=True):
        hidden = hidden_node(node)
        tokens = None if hidden is None else num_tokens(hidden)
        is_named = calls[target] == 1 and str(node.target) == target
        if tokens is not None and is_named and all(num_tokens(value) == tokens for value in _tensors_of(node)):
            lengths[target] = tokens
    return lengths


def _tensors_of(node: fx.Node) -> list[fx.Node]:
    """Return the tensors of a unit's output that the stage uses; the unit's node if it is not taken apart."""
    if isinstance(node.meta.get("val"), torch.Tensor) or any(
        user.target is not operator.getitem for user in node.users
    ):
        return [node]
    return [user for user in node.users if user.users]


def _opened_layer(model: nn.Module, region: RegionPlan, units: Sequence[str]) -> str:
    """Return the layer around an attention that is a unit, which holds a norm that is another; "" if there is none."""
    if not region.is_attention or region.owner not in units:
        return ""
    layer = region.owner
    while layer := layer.rpartition(".")[0]:
        names = [name for name in units if name.startswith(f"{layer}.")]
        if any(type(model.get_submodule(name)).__name__.endswith("Norm") for name in names):
            holds_whole_model = any(isinstance(module, nn.Embedding) for module in model.get_submodule(layer).modules())
            return "" if holds_whole_model else layer
    return ""


def _is_part(model: nn.Module, name: str, regions: Sequence[RegionPlan]) -> bool:
    """Return whether a unit can take and return shards of the hidden states."""
    is_known = bool(regions_in(name, regions)) or _is_tokenwise(model.get_submodule(name))
    return is_known and not reason_whole(model, name, regions, is_part=True)


def regions_in(name: str, regions: Iterable[RegionPlan]) -> list[RegionPlan]:
    """Return the regions of which a module holds all layers."""
    prefix = f"{name}." if name else ""
    return [region for region in regions if all(layer.startswith(prefix) for layer, _ in region.layers())]


def reason_whole(model: nn.Module, target: str, regions: Sequence[RegionPlan], *, is_part: bool = False) -> str:
    """Return why a module with regions is no block; "" if it is one.

    ``is_part``: the stage divides what the module takes, so that it needs no norm of its own.
    """
    own = regions_in(target, regions)
    for region in regions:
        if region not in own and any(layer.startswith(f"{target}.") for layer, _ in region.layers()):
            return f"{target} holds a part of the split layers of {region.owner}"
    layers = {layer for region in own for layer, _ in region.layers()}
    by_flow = (layer for region in own if region.by_flow for layer, _ in region.layers())
    mixing = [name for name in by_flow if not _is_tokenwise(model.get_submodule(name))]
    if mixing:
        return f"{mixing[0]} ({type(model.get_submodule(mixing[0])).__name__}) may use several tokens at once"
    attentions = [region.owner for region in own if region.is_attention]
    if target in attentions and not is_part:
        return f"{target} holds attention alone, without the norm before it"
    islands = islands_in(model, target, regions)
    has_norm = False
    for name, module in model.get_submodule(target).named_modules(prefix=target):
        if name in layers or any(name == owner or name.startswith(f"{owner}.") for owner in (*attentions, *islands)):
            continue
        kind = type(module).__name__
        if "Attention" in kind and not any(owner.startswith(f"{name}.") for owner in attentions):
            return f"{name} ({kind}) attends to other tokens, but is not split"
        if name != target and not list(module.children()) and not _is_tokenwise(module):
            return f"{name} ({kind}) may use several tokens at once"
        has_norm = has_norm or kind.endswith("Norm")
    if not has_norm and not is_part:
        return f"{target} has no norm beside its split layers"
    holders = parameter_holders(model)
    for name, parameter in model.get_submodule(target).named_parameters(prefix=target):
        other = next((holder for holder in holders[id(parameter)] if not holder.startswith(f"{target}.")), None)
        if other is not None:
            return f"{name} is tied to {other}"
    return ""


def islands_in(model: nn.Module, target: str, regions: Sequence[RegionPlan]) -> list[str]:
    """Return the outermost mixtures of experts in a block that have a router of unknown kind.

    A router may compare tokens, and its model may read statistics of all tokens, so every worker computes them whole.
    Regions inside, such as shared experts, are split as without sequence parallelism; one that reaches out of a mixture
    keeps it from being computed whole.
    """
    found: list[str] = []
    for name, module in model.get_submodule(target).named_modules(prefix=target):
        leaves = [leaf for leaf in module.modules() if not list(leaf.children())]
        holds_experts = any("Expert" in type(child).__name__ for child in module.children())
        if (
            name != target
            and holds_experts
            and not all(map(_is_tokenwise, leaves))
            and not any(_reaches_out(region, name) for region in regions)
            and not any(name.startswith(f"{outer}.") for outer in found)
        ):
            found.append(name)
    return found


def _reaches_out(region: RegionPlan, name: str) -> bool:
    """Return whether a region has layers both inside and outside of a module."""
    return len({layer.startswith(f"{name}.") for layer, _ in region.layers()}) > 1


def _is_tokenwise(module: nn.Module) -> bool:
    """Return whether a layer without children is known to treat each token by itself."""
    kind = type(module)
    is_named = kind.__name__ in _TOKENWISE_NAMES or kind.__name__.endswith(_TOKENWISE_ENDINGS)
    return isinstance(module, _TOKENWISE) or is_named or kind.__module__ in _ACTIVATIONS
