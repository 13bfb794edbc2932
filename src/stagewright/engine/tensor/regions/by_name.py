"""Find the tensor-parallel regions of a model by the layer names that transformer families use.

A pattern is matched at every module. A match by name is then verified by shapes and by what the attention's code
reads, and rejected if its meaning is uncertain: a wrong guess would silently train a different function. Rejected
layers stay replicated, with the reason. Where no name matches, layers are split by channels (``by_flow.py``); a model
of which no layer can be split is refused.
Pure functions of the module tree; the model is not changed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from stagewright.engine.tensor.regions.by_flow import find_channel_regions
from stagewright.engine.tensor.regions.input_width import read_of_input_width
from stagewright.engine.tensor.regions.latent_attention import is_latent_attention, plan_latent_attention
from stagewright.engine.tensor.regions.patterns import ATTENTION, FEED_FORWARD, Pattern
from stagewright.engine.tensor.regions.region_plan import RegionPlan, join_names, layer_sizes, parameter_holders
from stagewright.engine.tensor.regions.requirements import (
    HEAD_COUNTS,
    HEAD_SIZES,
    attributes_to_divide,
    find_head_parameters,
    require_only,
    require_untied,
)
from stagewright.errors import UsageError

# Norms that an attention may apply to each head, with weights of one head's size.
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
_WIDE_NORMS = ("q_norm", "k_norm")
_PACKED_QKV = ("qkv", "qkv_proj", "query_key_value", "Wqkv", "W_pack", "c_attn", "in_proj")
# Weights with one value per head that a model adds to attention scores, often from outside the attention module.
_HEAD_BIASES = ("relative_position_bias", "relative_attention_bias", "rel_pos_bias")


def find_regions(model: nn.Module) -> tuple[tuple[RegionPlan, ...], str]:
    """Find the regions of a model, in module order; raise if there are none.

    Also return why other attentions or feed-forward layers stay replicated: the first reason, "" if there are none.
    """
    modules = dict(model.named_modules())
    holders = parameter_holders(model)
    regions, reasons = _find_attentions(model, modules, holders)
    row_layers = {region.row_layer for region in regions}
    blocks = [_block(name, modules) for name, module in modules.items() if _is_attention(module)]
    matches = {name: pattern for name, module in modules.items() if (pattern := _match(module, FEED_FORWARD))}
    counts = Counter(type(modules[name]) for name in matches)
    for name, pattern in matches.items():
        module = modules[name]
        # A pair of layers that occurs once, outside of a block, may be anything.
        is_inside = any(name == block or not block or name.startswith(f"{block}.") for block in blocks)
        is_known = is_inside or bool(pattern.owner_classes) or counts[type(module)] > 1
        if not is_known or join_names(name, pattern.row) in row_layers:
            continue
        try:
            regions.append(_feed_forward(name, module, pattern, holders))
        except UsageError as error:
            reasons.append(str(error))
    if all(region.is_attention for region in regions):
        by_flow, others = find_channel_regions(model)
        if not regions and not by_flow:
            raise UsageError(reasons[0] if reasons else _no_attention(model, modules))
        if not regions:
            reasons = [_stay_replicated(others)] if others else []
        known = {layer for region in regions for layer, _ in region.layers()}
        regions += [region for region in by_flow if not known & {layer for layer, _ in region.layers()}]
    order = {name: index for index, name in enumerate(modules)}
    reason = reasons[0].removesuffix("use data or pipeline instead").rstrip(" ;:") if reasons else ""
    return tuple(sorted(regions, key=lambda region: order[region.column_layers[0]])), reason


def _block(name: str, modules: dict[str, nn.Module]) -> str:
    """Return the block around an attention: the nearest ancestor with more parameters (GPT-Neo wraps it twice)."""
    num_parameters = sum(1 for _ in modules[name].parameters())
    while name:
        name = name.rpartition(".")[0]
        if name in modules and sum(1 for _ in modules[name].parameters()) > num_parameters:
            break
    return name


def _find_attentions(
    model: nn.Module, modules: dict[str, nn.Module], holders: dict[int, list[str]]
) -> tuple[list[RegionPlan], list[str]]:
    """Return the attentions that can be split, and why others can't."""
    regions, reasons = [], []
    for name, module in modules.items():
        pattern = _match(module, ATTENTION)
        try:
            if is_latent_attention(module):
                regions.append(plan_latent_attention(name, module, holders))
            elif pattern is not None:
                regions.append(_attention(name, module, pattern, holders))
            elif type(module) is nn.MultiheadAttention:
                regions.append(_multihead(name, module, holders))
        except UsageError as error:
            reasons.append(str(error))
    if not regions and not reasons:
        reasons.append(_no_attention(model, modules))
    for name, _ in model.named_parameters():
        if any(bias in name for bias in _HEAD_BIASES):
            reason = (
                f"tensor parallelism can't split {type(model).__name__}: {name} holds one value per head, but how "
                "the heads use it is unknown; use data or pipeline instead"
            )
            return [], [*reasons, reason]
    return regions, reasons


def _match(module: nn.Module, patterns: tuple[Pattern, ...]) -> Pattern | None:
    for pattern in patterns:
        layers = [_below(module, path) for path in (*pattern.columns, pattern.row)]
        owner = _below(module, pattern.owner)
        if all(type(layer).__name__ in pattern.layer_classes for layer in layers) and (
            not pattern.owner_classes or type(owner).__name__ in pattern.owner_classes
        ):
            return pattern
    return None


def _is_attention(module: nn.Module) -> bool:
    is_known = type(module) is nn.MultiheadAttention or is_latent_attention(module)
    return is_known or _match(module, ATTENTION) is not None


def _multihead(name: str, module: nn.MultiheadAttention, holders: dict[int, list[str]]) -> RegionPlan:
    """Return the region of torch's own attention, which packs query, key and value into one weight."""
    where = f"{name} (MultiheadAttention)"
    if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
        raise UsageError(
            f"{where}: tensor parallelism can't split it with kdim, vdim, add_bias_kv or add_zero_attn; use data or "
            "pipeline instead"
        )
    require_untied([module.out_proj], holders, where)
    return RegionPlan(
        owner=name,
        column_layers=(name,),
        row_layer=join_names(name, "out_proj"),
        sections=(1, 1, 1),
        divisible={"attention heads": module.num_heads},
    )


def _attention(name: str, module: nn.Module, pattern: Pattern, holders: dict[int, list[str]]) -> RegionPlan:
    owner = module.get_submodule(pattern.owner)
    where = f"{join_names(name, pattern.owner)} ({type(owner).__name__})"
    columns, row = [module.get_submodule(path) for path in pattern.columns], module.get_submodule(pattern.row)
    width_in, width = layer_sizes(columns[0])
    if pattern.columns == ("c_attn",) and width != 3 * width_in:
        raise UsageError(
            f"{where}: c_attn has {width} output features for {width_in} input features, so it does not pack "
            "query, key and value as GPT-2 does; tensor parallelism can't split it: use data or pipeline instead"
        )
    row_in, _ = layer_sizes(row)
    if len(columns) == 1:
        width, key_width = row_in, (width - row_in) // 2
    else:
        key_width = layer_sizes(columns[1])[1]
    head_size = _head_size(owner, width, where)
    if (
        row_in != width
        or width % head_size
        or key_width % head_size
        or any(layer_sizes(layer)[1] != key_width for layer in columns[2:])
    ):
        raise UsageError(
            f"{where}: {width} query features, {key_width} key features, heads of {head_size}, {row_in} inputs of "
            f"{pattern.row}; tensor parallelism needs whole heads, all used by the output layer: use data or pipeline "
            "instead"
        )
    heads, key_heads = width // head_size, key_width // head_size
    if len(columns) == 1 and key_heads == 1 < heads:
        raise UsageError(
            f"{where}: all {heads} query heads use one key/value head, which tensor parallelism can't split; use data "
            "or pipeline instead"
        )
    if getattr(getattr(owner, "config", None), "alibi", False):
        raise UsageError(
            f"{where}: its mask has the position biases (ALiBi) of all heads, which tensor parallelism can't split; "
            "use data or pipeline instead"
        )
    norms = tuple(path for path in _HEAD_NORMS if _is_head_norm(getattr(owner, path, None), head_size))
    wide = tuple(
        path
        for path in _WIDE_NORMS
        if path not in norms and _is_wide_norm(getattr(owner, path, None), (width, key_width))
    )
    known = [*columns, row, *(owner.get_submodule(path) for path in (*norms, *wide))]
    head_parameters = find_head_parameters(owner, heads)
    require_only(owner, known, where, heads, head_parameters)
    require_untied([*columns, row], holders, where)
    width_read = read_of_input_width(owner, {path.rpartition(".")[2] for path in pattern.columns})
    if width_read:
        raise UsageError(
            f"{where}: its code takes the total width of its heads from the input ({width_read}), which is wider than "
            "one worker's heads; tensor parallelism can't change that: use data or pipeline instead"
        )
    attributes, config_attributes = attributes_to_divide(owner, where, heads, key_heads, head_size)
    return RegionPlan(
        owner=join_names(name, pattern.owner),
        column_layers=tuple(join_names(name, path) for path in pattern.columns),
        row_layer=join_names(name, pattern.row),
        shared_layers=tuple(join_names(join_names(name, pattern.owner), path) for path in norms),
        wide_norms=tuple(join_names(join_names(name, pattern.owner), path) for path in wide),
        head_parameters=tuple(join_names(join_names(name, pattern.owner), path) for path in head_parameters),
        sections=(heads, key_heads, key_heads) if pattern.num_sections == 3 else (1,),
        divisible={"attention heads": heads, "key/value heads": key_heads},
        attributes=attributes,
        config_attributes=config_attributes,
    )


def _feed_forward(name: str, module: nn.Module, pattern: Pattern, holders: dict[int, list[str]]) -> RegionPlan:
    where = f"{name} ({type(module).__name__})"
    columns, row = [module.get_submodule(path) for path in pattern.columns], module.get_submodule(pattern.row)
    width_in, width = layer_sizes(columns[0])
    row_in, _ = layer_sizes(row)
    if any(layer_sizes(layer) != (width_in, width) for layer in columns) or row_in * pattern.num_sections != width:
        raise UsageError(
            f"{where}: {' and '.join(pattern.columns)} have {width} output features but {pattern.row} has {row_in} "
            "input features, so the code in between mixes features; tensor parallelism can't split it: use data or "
            "pipeline instead"
        )
    is_direct = all("." not in path for path in pattern.columns) and not list(module.parameters(recurse=False))
    is_certain = bool(pattern.owner_classes)
    if is_direct and not is_certain and not any(map(_is_attention, module.modules())):
        require_only(module, [*columns, row], where, 0)
    require_untied([*columns, row], holders, where)
    return RegionPlan(
        owner=name,
        column_layers=tuple(join_names(name, path) for path in pattern.columns),
        row_layer=join_names(name, pattern.row),
        sections=(1,) * pattern.num_sections,
        divisible={"inner features": row_in},
    )


def _head_size(owner: nn.Module, width: int, where: str) -> int:
    for name in HEAD_SIZES:
        if type(getattr(owner, name, None)) is int:
            return int(getattr(owner, name))
    for name in HEAD_COUNTS:
        if type(getattr(owner, name, None)) is int:
            return width // int(getattr(owner, name))
    raise UsageError(
        f"{where}: no attribute gives the size or the number of its heads ({', '.join(HEAD_SIZES + HEAD_COUNTS)}), "
        "so tensor parallelism can't split between heads: use data or pipeline instead"
    )


def _is_head_norm(layer: Any, head_size: int) -> bool:
    return isinstance(layer, nn.Module) and all(parameter.shape == (head_size,) for parameter in layer.parameters())


def _is_wide_norm(layer: Any, widths: tuple[int, ...]) -> bool:
    """Return whether a layer is an RMS norm over all heads, without anything but its weight."""
    if not type(layer).__name__.endswith("RMSNorm") or not hasattr(layer, "variance_epsilon"):
        return False
    return [parameter.shape for parameter in layer.parameters()] in [[(width,)] for width in widths]


def _stay_replicated(names: list[str]) -> str:
    """Say which layers are in no region of a model without attention under a known name."""
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{others}, because their output is the model's, or is normalized, reshaped, added or used twice"


def _no_attention(model: nn.Module, modules: dict[str, nn.Module]) -> str:
    kind = type(model).__name__
    fix = "use data or pipeline instead"
    for name, module in modules.items():
        for child in _PACKED_QKV:
            if "Attention" in type(module).__name__ and isinstance(getattr(module, child, None), nn.Module):
                return (
                    f"tensor parallelism can't split {kind}: {join_names(name, child)} ({type(module).__name__}) packs "
                    f"query, key and value in an unknown order; {fix}"
                )
    return (
        f"tensor parallelism can't split {kind}: no module has query, key and value layers under a known name (q_proj, "
        f"query, q_lin, c_attn), and no two layers have only operations between them that treat channels alike; {fix}"
    )


def _below(module: nn.Module, path: str) -> nn.Module | None:
    submodule: Any = module
    for part in path.split(".") if path else ():
        submodule = getattr(submodule, "_modules", {}).get(part)
    return submodule if isinstance(submodule, nn.Module) else None
