"""Find the tensor-parallel regions of a model by the layer names that transformer families use.

A pattern is matched at every module. A match by name is then verified by shapes and by what the attention's code
reads, and rejected if its meaning is uncertain: a wrong guess would silently train a different function.
Pure functions of the module tree; the model is not changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from stagewright.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pattern:
    """Names of the layers of one region, as in ``RegionPlan``, relative to the module where the pattern matches."""

    columns: tuple[str, ...]
    row: str
    owner: str = ""
    num_sections: int = 1
    layer_classes: tuple[str, ...] = ("Linear",)
    owner_classes: tuple[str, ...] = ()
    """Owner classes for which the pattern is certain; empty: any class."""


_CONV1D = ("Conv1D",)
_ATTENTION = (
    _Pattern(columns=("q_proj", "k_proj", "v_proj"), row="o_proj"),  # Llama, Mistral, Qwen, ViT, DeiT
    _Pattern(columns=("q_proj", "k_proj", "v_proj"), row="out_proj"),  # OPT, BART, CLIP, GPT-J
    _Pattern(columns=("q_proj", "k_proj", "v_proj"), row="dense"),  # Phi
    _Pattern(columns=("self.query", "self.key", "self.value"), row="output.dense", owner="self"),  # BERT, RoBERTa
    _Pattern(columns=("attention.query", "attention.key", "attention.value"), row="output.dense", owner="attention"),
    _Pattern(columns=("q_lin", "k_lin", "v_lin"), row="out_lin"),  # DistilBERT
    _Pattern(columns=("c_attn",), row="c_proj", num_sections=3, layer_classes=_CONV1D),  # GPT-2
    # GPT-NeoX packs query, key and value head by head, so each head is contiguous.
    _Pattern(columns=("query_key_value",), row="dense", owner_classes=("GPTNeoXAttention",)),
)
_FEED_FORWARD = (
    _Pattern(columns=("gate_proj", "up_proj"), row="down_proj"),
    _Pattern(columns=("up_proj",), row="down_proj"),  # Nemotron, DINOv3
    _Pattern(columns=("fc1",), row="fc2"),
    _Pattern(columns=("c_fc",), row="c_proj", layer_classes=("Conv1D", "Linear")),  # GPT-2; GPT-Neo, StarCoder 2
    _Pattern(columns=("intermediate.dense",), row="output.dense"),
    _Pattern(columns=("dense_h_to_4h",), row="dense_4h_to_h"),
    _Pattern(columns=("fc_in",), row="fc_out"),  # GPT-J
    _Pattern(columns=("lin1",), row="lin2"),
    _Pattern(columns=("intermediate_dense",), row="output_dense"),  # wav2vec 2
)
# Norms that an attention may apply to each head, with weights of one head's size.
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
_PACKED_QKV = ("qkv", "qkv_proj", "query_key_value", "Wqkv", "W_pack", "c_attn", "in_proj")
# Weights with one value per head that a model adds to attention scores, often from outside the attention module.
_HEAD_BIASES = ("relative_position_bias", "relative_attention_bias", "rel_pos_bias")

_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_WIDTHS = ("all_head_size", "split_size")
_ROTARY = ("rotary_ndims", "rotary_dim")
_UNAFFECTED = (*_HEAD_SIZES, *_ROTARY, "layer_idx", "layer_id", "sliding_window", "num_key_value_groups")
_CONFIG_SIZES = (*_HEAD_COUNTS, *_KEY_HEAD_COUNTS, "hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """The layers of one region and their parallel styles."""

    owner: str
    """Module whose forward runs inside the region."""
    column_layers: tuple[str, ...]
    """Column-parallel layers: output features are sharded."""
    row_layer: str
    """Row-parallel layer: input features are sharded."""
    shared_layers: tuple[str, ...] = ()
    """Replicated layers inside the region; their gradients are all-reduced."""
    num_sections: int = 1
    """Number of equal sections packed into a column-parallel layer (3 for query, key and value)."""
    divisible: dict[str, int] = field(default_factory=dict)
    """Sizes that the number of workers must divide, by their name in error messages."""
    attributes: tuple[str, ...] = ()
    """Attributes of the owner (number of heads, widths) to divide by the number of workers."""

    def layers(self) -> Iterator[tuple[str, str]]:
        """Yield the name and parallel style of each layer: ``column``, ``shared`` or ``row``."""
        yield from ((name, "column") for name in self.column_layers)
        yield from ((name, "shared") for name in self.shared_layers)
        yield self.row_layer, "row"


def find_regions(model: nn.Module) -> tuple[RegionPlan, ...]:
    """Find the regions of all transformer blocks, in module order; raise if the meaning of a layer is uncertain."""
    modules = dict(model.named_modules())
    holders = _holders(model)
    regions: list[RegionPlan] = []
    blocks: dict[str, None] = {}
    for name, module in modules.items():
        pattern = _match(module, _ATTENTION)
        if pattern is not None:
            regions.append(_attention(name, module, pattern, holders))
            blocks[_block(name, modules)] = None
    if not regions:
        raise UsageError(_no_attention(model, modules))
    for name, _ in model.named_parameters():
        if any(bias in name for bias in _HEAD_BIASES):
            raise UsageError(
                f"tensor parallelism can't split {type(model).__name__}: {name} holds one value per head, but how "
                "the heads use it is unknown; use data or pipeline instead"
            )
    for block in blocks:
        for name, module in modules.items():
            inside = name == block or not block or name.startswith(f"{block}.")
            pattern = _match(module, _FEED_FORWARD) if inside else None
            if pattern is not None and not any(region.row_layer == _join(name, pattern.row) for region in regions):
                regions.append(_feed_forward(name, module, pattern, holders))
    order = {name: index for index, name in enumerate(modules)}
    return tuple(sorted(regions, key=lambda region: order[region.column_layers[0]]))


def _block(name: str, modules: dict[str, nn.Module]) -> str:
    """Return the block around an attention: the nearest ancestor with more parameters (GPT-Neo wraps it twice)."""
    num_parameters = sum(1 for _ in modules[name].parameters())
    while name:
        name = name.rpartition(".")[0]
        if name in modules and sum(1 for _ in modules[name].parameters()) > num_parameters:
            break
    return name


def layer_sizes(layer: nn.Module) -> tuple[int, int]:
    """Return the input and output features of an nn.Linear or Conv1D."""
    weight = layer.get_parameter("weight")
    return (weight.shape[1], weight.shape[0]) if isinstance(layer, nn.Linear) else (weight.shape[0], weight.shape[1])


def _match(module: nn.Module, patterns: tuple[_Pattern, ...]) -> _Pattern | None:
    for pattern in patterns:
        layers = [_below(module, path) for path in (*pattern.columns, pattern.row)]
        owner = _below(module, pattern.owner)
        if all(type(layer).__name__ in pattern.layer_classes for layer in layers) and (
            not pattern.owner_classes or type(owner).__name__ in pattern.owner_classes
        ):
            return pattern
    return None


def _attention(name: str, module: nn.Module, pattern: _Pattern, holders: dict[int, list[str]]) -> RegionPlan:
    owner = module.get_submodule(pattern.owner)
    where = f"{_join(name, pattern.owner)} ({type(owner).__name__})"
    columns, row = [module.get_submodule(path) for path in pattern.columns], module.get_submodule(pattern.row)
    width_in, width = layer_sizes(columns[0])
    if pattern.columns == ("c_attn",) and width != 3 * width_in:
        raise UsageError(
            f"{where}: c_attn has {width} output features for {width_in} input features, so it does not pack "
            "query, key and value as GPT-2 does; tensor parallelism can't split it: use data or pipeline instead"
        )
    if len(columns) == 1:
        width //= 3
    key_width = width if len(columns) == 1 else layer_sizes(columns[1])[1]
    head_size = _head_size(owner, width, where)
    row_in, _ = layer_sizes(row)
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
    norms = tuple(path for path in _HEAD_NORMS if _is_head_norm(getattr(owner, path, None), head_size))
    _require_only(owner, [*columns, row, *(owner.get_submodule(path) for path in norms)], where, heads)
    _require_untied([*columns, row], holders, where)
    return RegionPlan(
        owner=_join(name, pattern.owner),
        column_layers=tuple(_join(name, path) for path in pattern.columns),
        row_layer=_join(name, pattern.row),
        shared_layers=tuple(_join(_join(name, pattern.owner), path) for path in norms),
        num_sections=pattern.num_sections,
        divisible={"attention heads": heads, "key/value heads": key_heads},
        attributes=_attributes_to_divide(owner, where, heads, key_heads, head_size),
    )


def _feed_forward(name: str, module: nn.Module, pattern: _Pattern, holders: dict[int, list[str]]) -> RegionPlan:
    where = f"{name} ({type(module).__name__})"
    columns, row = [module.get_submodule(path) for path in pattern.columns], module.get_submodule(pattern.row)
    width_in, width = layer_sizes(columns[0])
    row_in, _ = layer_sizes(row)
    if any(layer_sizes(layer) != (width_in, width) for layer in columns) or row_in != width:
        raise UsageError(
            f"{where}: {' and '.join(pattern.columns)} have {width} output features but {pattern.row} has {row_in} "
            "input features, so the code in between mixes features; tensor parallelism can't split it: use data or "
            "pipeline instead"
        )
    is_direct = all("." not in path for path in pattern.columns) and not list(module.parameters(recurse=False))
    if is_direct and not any(_match(submodule, _ATTENTION) for submodule in module.modules()):
        _require_only(module, [*columns, row], where, 0)
    _require_untied([*columns, row], holders, where)
    return RegionPlan(
        owner=name,
        column_layers=tuple(_join(name, path) for path in pattern.columns),
        row_layer=_join(name, pattern.row),
        divisible={"inner features": width},
    )


def _attributes_to_divide(owner: nn.Module, where: str, heads: int, key_heads: int, head_size: int) -> tuple[str, ...]:
    """Return the attributes that must be divided by the number of workers; raise if that is uncertain for one."""
    read = {name for code in _methods(type(owner)) for name in code.co_names}
    if any("embed_dim" in code.co_varnames for code in _methods(type(owner))):
        raise UsageError(
            f"{where}: its code takes the total width of its heads, embed_dim, from the input, which is wider than one "
            "worker's heads; tensor parallelism can't change that: use data or pipeline instead"
        )
    divisible = {
        **dict.fromkeys(_HEAD_COUNTS, heads),
        **dict.fromkeys(_KEY_HEAD_COUNTS, key_heads),
        **dict.fromkeys(_WIDTHS, heads * head_size),
    }
    sizes = {heads, key_heads, heads * head_size, key_heads * head_size, 3 * heads * head_size}
    for name in sorted(read):
        value = vars(owner).get(name)
        if value is None and name in _CONFIG_SIZES and "config" in read:
            raise UsageError(
                f"{where}: its code reads {name} of the whole model from the configuration; tensor parallelism can't "
                "divide it for one worker: use data or pipeline instead"
            )
        if type(value) is int and name not in divisible and name not in _UNAFFECTED and value in sizes:
            raise UsageError(
                f"{where}: its code reads {name} = {value}, which may be the size of all heads or the width of the "
                "model; tensor parallelism can't tell which: use data or pipeline instead"
            )
    return tuple(
        name for name, value in divisible.items() if type(vars(owner).get(name)) is int and vars(owner)[name] == value
    )


def _methods(kind: type) -> Iterator[Any]:
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for name, member in vars(base).items():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if name != "__init__" and code is not None:
                yield code


def _head_size(owner: nn.Module, width: int, where: str) -> int:
    for name in _HEAD_SIZES:
        if type(getattr(owner, name, None)) is int:
            return int(getattr(owner, name))
    for name in _HEAD_COUNTS:
        if type(getattr(owner, name, None)) is int:
            return width // int(getattr(owner, name))
    raise UsageError(
        f"{where}: no attribute gives the size or the number of its heads ({', '.join(_HEAD_SIZES + _HEAD_COUNTS)}), "
        "so tensor parallelism can't split between heads: use data or pipeline instead"
    )


def _is_head_norm(layer: Any, head_size: int) -> bool:
    return isinstance(layer, nn.Module) and all(parameter.shape == (head_size,) for parameter in layer.parameters())


def _require_only(owner: nn.Module, layers: list[nn.Module], where: str, heads: int) -> None:
    """Raise if a region has parameters, or buffers with one value per head, outside of the given layers."""
    expected = {id(parameter) for layer in layers for parameter in layer.parameters()}
    others = [name for name, parameter in owner.named_parameters() if id(parameter) not in expected]
    others += [name for name, buffer in owner.named_buffers() if heads > 1 and buffer.numel() == heads]
    if others:
        raise UsageError(
            f"{where}: {others[0]!r} is among the layers to split, but how to split it is unknown; "
            "use data or pipeline instead"
        )


def _require_untied(layers: list[nn.Module], holders: dict[int, list[str]], where: str) -> None:
    for layer in layers:
        names = holders.get(id(layer.get_parameter("weight")), [])
        if len(names) > 1:
            raise UsageError(
                f"{where}: the weight {names[0]!r} is tied to {names[1]!r}, which would need the same split; "
                "use data or pipeline instead"
            )


def _holders(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its identity: several for a tied weight."""
    holders: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(_join(prefix, name))
    return holders


def _no_attention(model: nn.Module, modules: dict[str, nn.Module]) -> str:
    kind = type(model).__name__
    fix = "use data or pipeline instead"
    for name, module in modules.items():
        for child in _PACKED_QKV:
            if "Attention" in type(module).__name__ and isinstance(getattr(module, child, None), nn.Module):
                return (
                    f"tensor parallelism can't split {kind}: {_join(name, child)} ({type(module).__name__}) packs "
                    f"query, key and value in an unknown order; {fix}"
                )
    return (
        f"tensor parallelism can't split {kind}: it splits attention heads and the layers around them, but no module "
        f"has query, key and value layers under a known name (q_proj, query, q_lin, c_attn); {fix}"
    )


def _below(module: nn.Module, path: str) -> nn.Module | None:
    submodule: Any = module
    for part in path.split(".") if path else ():
        submodule = getattr(submodule, "_modules", {}).get(part)
    return submodule if isinstance(submodule, nn.Module) else None


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
