"""Where in a model the regions for tensor parallelism lie, found by the names that transformer families use.

A pattern is tried at every module (the anchor). What matches by name is then checked by shape and by what the
attention's code reads, and refused where the meaning is not certain: a wrong guess would train on quietly.
Pure functions of the module tree; nothing is changed here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from stagewright.errors import UsageError

__all__ = ["RegionPlan", "find_regions", "layer_sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pattern:
    """Names of the layers of one region, below its anchor."""

    columns: tuple[str, ...]
    """Layers that split their outputs."""
    row: str
    """The layer that splits its inputs."""
    owner: str = ""
    """The module whose code runs between columns and row."""
    num_sections: int = 1
    """How many equal sections a column layer packs side by side (query, key, value)."""
    kinds: tuple[str, ...] = ("Linear",)
    """Classes of the layers."""
    owners: tuple[str, ...] = ()
    """Classes of the owner for which the pattern is certain; empty: any."""


_CONV = ("Conv1D",)
_ATTENTION = (
    _Pattern(columns=("q_proj", "k_proj", "v_proj"), row="o_proj"),  # Llama, Mistral, Qwen, ViT, DeiT
    _Pattern(columns=("q_proj", "k_proj", "v_proj"), row="out_proj"),  # OPT, BART, CLIP, GPT-J
    _Pattern(columns=("q_proj", "k_proj", "v_proj"), row="dense"),  # Phi
    _Pattern(columns=("self.query", "self.key", "self.value"), row="output.dense", owner="self"),  # BERT, RoBERTa
    _Pattern(columns=("attention.query", "attention.key", "attention.value"), row="output.dense", owner="attention"),
    _Pattern(columns=("q_lin", "k_lin", "v_lin"), row="out_lin"),  # DistilBERT
    _Pattern(columns=("c_attn",), row="c_proj", num_sections=3, kinds=_CONV),  # GPT-2
    # GPT-NeoX packs query, key and value head by head, so whole heads lie together.
    _Pattern(columns=("query_key_value",), row="dense", owners=("GPTNeoXAttention",)),
)
_FEED_FORWARD = (
    _Pattern(columns=("gate_proj", "up_proj"), row="down_proj"),
    _Pattern(columns=("up_proj",), row="down_proj"),  # Nemotron, DINOv3
    _Pattern(columns=("fc1",), row="fc2"),
    _Pattern(columns=("c_fc",), row="c_proj", kinds=("Conv1D", "Linear")),  # GPT-2; GPT-Neo, StarCoder 2
    _Pattern(columns=("intermediate.dense",), row="output.dense"),
    _Pattern(columns=("dense_h_to_4h",), row="dense_4h_to_h"),
    _Pattern(columns=("fc_in",), row="fc_out"),  # GPT-J
    _Pattern(columns=("lin1",), row="lin2"),
    _Pattern(columns=("intermediate_dense",), row="output_dense"),  # wav2vec 2
)
# Layers that may stand inside an attention: they treat every head alike, with weights of one head's size.
_SHARED = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
_FUSED = ("qkv", "qkv_proj", "query_key_value", "Wqkv", "W_pack", "c_attn", "in_proj")
# Weights with a number for each head that a model adds to scores, often from outside the attention.
_BIASES = ("relative_position_bias", "relative_attention_bias", "rel_pos_bias")

_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size")
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_WIDTHS = ("all_head_size", "split_size")
_ROTARY = ("rotary_ndims", "rotary_dim")
_HARMLESS = (*_HEAD_SIZES, *_ROTARY, "layer_idx", "layer_id", "sliding_window", "num_key_value_groups")
_READ_FROM_CONFIG = (*_COUNTS, *_KEY_COUNTS, "hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """The layers of one region and how they are divided."""

    owner: str
    """The module whose code runs inside."""
    columns: tuple[str, ...]
    """Layers that split their outputs."""
    row: str
    """The layer that splits its inputs."""
    shared: tuple[str, ...] = ()
    """Layers inside that every worker holds whole and whose gradients are summed."""
    num_sections: int = 1
    """Equal sections that a column layer packs side by side."""
    width_in: int
    """Features of the value that enters; its gradient is all-reduced."""
    width_out: int
    """Features of the value that leaves; it is all-reduced."""
    divisible: dict[str, int] = field(default_factory=dict)
    """What the number of workers must divide, by what it is called in messages."""
    attributes: tuple[str, ...] = ()
    """Numbers of the owner (heads, widths) that become each worker's own share."""


def find_regions(model: nn.Module) -> tuple[RegionPlan, ...]:
    """Every region of a model's transformer blocks, in the order of its modules; refuses what is not certain."""
    modules = dict(model.named_modules())
    holders = _holders(model)
    found: list[RegionPlan] = []
    blocks: dict[str, None] = {}
    for name, module in modules.items():
        pattern = _match(module, _ATTENTION)
        if pattern is not None:
            found.append(_attention(name, module, pattern, holders))
            blocks[_block(name, modules)] = None
    if not found:
        raise UsageError(_no_attention(model, modules))
    for name, _ in model.named_parameters():
        if any(one in name for one in _BIASES):
            raise UsageError(
                f"tensor parallelism can't split {type(model).__name__}: {name} holds a number for each head, and how "
                "it reaches the heads is not known; use data or pipeline instead"
            )
    for block in blocks:
        for name, module in modules.items():
            inside = name == block or not block or name.startswith(f"{block}.")
            pattern = _match(module, _FEED_FORWARD) if inside else None
            if pattern is not None and not any(one.row == _join(name, pattern.row) for one in found):
                found.append(_feed_forward(name, module, pattern, holders))
    order = {name: at for at, name in enumerate(modules)}
    return tuple(sorted(found, key=lambda region: order[region.columns[0]]))


def _block(name: str, modules: dict[str, nn.Module]) -> str:
    """The block around an attention: the first module above it with other weights too (GPT-Neo wraps it twice)."""
    own = sum(1 for _ in modules[name].parameters())
    while name:
        name = name.rpartition(".")[0]
        if name in modules and sum(1 for _ in modules[name].parameters()) > own:
            break
    return name


def layer_sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer of either kind."""
    weight = layer.get_parameter("weight")
    return (weight.shape[1], weight.shape[0]) if isinstance(layer, nn.Linear) else (weight.shape[0], weight.shape[1])


def _match(module: nn.Module, patterns: tuple[_Pattern, ...]) -> _Pattern | None:
    for pattern in patterns:
        layers = [_below(module, path) for path in (*pattern.columns, pattern.row)]
        owner = _below(module, pattern.owner)
        if all(type(one).__name__ in pattern.kinds for one in layers) and (
            not pattern.owners or type(owner).__name__ in pattern.owners
        ):
            return pattern
    return None


def _attention(name: str, module: nn.Module, pattern: _Pattern, holders: dict[int, list[str]]) -> RegionPlan:
    owner = _below(module, pattern.owner)
    assert owner is not None
    where = f"{_join(name, pattern.owner)} ({type(owner).__name__})"
    columns, row = [_layer(module, path) for path in pattern.columns], _layer(module, pattern.row)
    width_in, width = layer_sizes(columns[0])
    keys = width
    if pattern.columns == ("c_attn",):
        if width != 3 * width_in:
            raise UsageError(
                f"{where}: c_attn gives {width} features from {width_in}, so it is not query, key and value side by "
                "side as in GPT-2; tensor parallelism can't tell how to cut it: use data or pipeline instead"
            )
        width = keys = width // 3
    elif len(columns) == 1:
        width = keys = width // 3
    else:
        keys = layer_sizes(columns[1])[1]
    head_size = _head_size(owner, width, where)
    row_in, width_out = layer_sizes(row)
    if (
        row_in != width
        or width % head_size
        or keys % head_size
        or any(layer_sizes(one)[1] != keys for one in columns[2:])
    ):
        raise UsageError(
            f"{where}: queries have {width} features, keys {keys}, heads {head_size} and {pattern.row} takes {row_in}; "
            "tensor parallelism needs whole heads that the output layer takes all: use data or pipeline instead"
        )
    heads, key_heads = width // head_size, keys // head_size
    shared = tuple(path for path in _SHARED if _is_head_norm(getattr(owner, path, None), head_size))
    _refuse_other_parameters(owner, [*columns, row, *(_layer(owner, path) for path in shared)], where, heads)
    _refuse_tied([*columns, row], holders, where)
    return RegionPlan(
        owner=_join(name, pattern.owner),
        columns=tuple(_join(name, path) for path in pattern.columns),
        row=_join(name, pattern.row),
        shared=tuple(_join(_join(name, pattern.owner), path) for path in shared),
        num_sections=pattern.num_sections,
        width_in=width_in,
        width_out=width_out,
        divisible={"attention heads": heads, "key/value heads": key_heads},
        attributes=_audit(owner, where, heads, key_heads, head_size),
    )


def _feed_forward(name: str, module: nn.Module, pattern: _Pattern, holders: dict[int, list[str]]) -> RegionPlan:
    where = f"{name} ({type(module).__name__})"
    columns, row = [_layer(module, path) for path in pattern.columns], _layer(module, pattern.row)
    width_in, width = layer_sizes(columns[0])
    row_in, width_out = layer_sizes(row)
    if any(layer_sizes(one) != (width_in, width) for one in columns) or row_in != width:
        raise UsageError(
            f"{where}: {' and '.join(pattern.columns)} give {width} features but {pattern.row} takes {row_in}, so "
            "something in between mixes features; tensor parallelism can't cut it: use data or pipeline instead"
        )
    alone = all("." not in path for path in pattern.columns) and len(list(module.parameters(recurse=False))) == 0
    if alone and not any(_match(one, _ATTENTION) for one in module.modules()):
        _refuse_other_parameters(module, [*columns, row], where, 0)
    _refuse_tied([*columns, row], holders, where)
    return RegionPlan(
        owner=name,
        columns=tuple(_join(name, path) for path in pattern.columns),
        row=_join(name, pattern.row),
        width_in=width_in,
        width_out=width_out,
        divisible={"inner features": width},
    )


def _audit(owner: nn.Module, where: str, heads: int, key_heads: int, head_size: int) -> tuple[str, ...]:
    """Numbers that the owner's code reads and that must become a share; refuses a number that may be one."""
    read = {name for code in _methods(type(owner)) for name in code.co_names}
    if any("embed_dim" in code.co_varnames for code in _methods(type(owner))):
        raise UsageError(
            f"{where}: its code takes the width of its heads together, embed_dim, from its input, which is wider than "
            "one worker's heads; tensor parallelism can't change that: use data or pipeline instead"
        )
    known = {
        **dict.fromkeys(_COUNTS, heads),
        **dict.fromkeys(_KEY_COUNTS, key_heads),
        **dict.fromkeys(_WIDTHS, heads * head_size),
    }
    sizes = {heads, key_heads, heads * head_size, key_heads * head_size, 3 * heads * head_size}
    for name in sorted(read):
        value = vars(owner).get(name)
        if value is None and name in _READ_FROM_CONFIG and "config" in read:
            raise UsageError(
                f"{where}: its code reads {name} from the configuration, which holds the whole model's; tensor "
                "parallelism can't give each worker its share of it: use data or pipeline instead"
            )
        if type(value) is int and name not in known and name not in _HARMLESS and value in sizes:
            raise UsageError(
                f"{where}: its code reads {name} = {value}, which may stand for all heads or for the width of the "
                "model; tensor parallelism can't tell which: use data or pipeline instead"
            )
    return tuple(
        name for name, value in known.items() if type(vars(owner).get(name)) is int and vars(owner)[name] == value
    )


def _methods(kind: type) -> Iterator[Any]:
    for one in kind.__mro__:
        if one is nn.Module:
            return
        for name, member in vars(one).items():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if name != "__init__" and code is not None:
                yield code


def _head_size(owner: nn.Module, width: int, where: str) -> int:
    for name in _HEAD_SIZES:
        if type(getattr(owner, name, None)) is int:
            return int(getattr(owner, name))
    for name in _COUNTS:
        if type(getattr(owner, name, None)) is int:
            return width // int(getattr(owner, name))
    raise UsageError(
        f"{where}: it names neither the size nor the number of its heads ({', '.join(_HEAD_SIZES + _COUNTS)}), so "
        "tensor parallelism can't cut between heads: use data or pipeline instead"
    )


def _is_head_norm(layer: Any, head_size: int) -> bool:
    return isinstance(layer, nn.Module) and all(one.shape == (head_size,) for one in layer.parameters())


def _refuse_other_parameters(owner: nn.Module, known: list[nn.Module], where: str, heads: int) -> None:
    """Everything with weights inside a region must be understood."""
    ours = {id(parameter) for layer in known for parameter in layer.parameters()}
    others = [name for name, parameter in owner.named_parameters() if id(parameter) not in ours]
    others += [name for name, buffer in owner.named_buffers() if heads > 1 and buffer.numel() == heads]
    if others:
        raise UsageError(
            f"{where}: {others[0]!r} stands among the layers that would be split, and how to divide it is not known; "
            "use data or pipeline instead"
        )


def _refuse_tied(layers: list[nn.Module], holders: dict[int, list[str]], where: str) -> None:
    for layer in layers:
        names = holders.get(id(layer.get_parameter("weight")), [])
        if len(names) > 1:
            raise UsageError(
                f"{where}: the weight {names[0]!r} is tied to {names[1]!r}, which would have to be split alike; "
                "use data or pipeline instead"
            )


def _holders(model: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append(_join(prefix, name))
    return found


def _no_attention(model: nn.Module, modules: dict[str, nn.Module]) -> str:
    kind = type(model).__name__
    way_out = "use data or pipeline instead"
    for name, module in modules.items():
        for child in _FUSED:
            if "Attention" in type(module).__name__ and isinstance(getattr(module, child, None), nn.Module):
                return (
                    f"tensor parallelism can't split {kind}: {_join(name, child)} ({type(module).__name__}) packs "
                    f"query, key and value in an order that is not known for certain; {way_out}"
                )
    return (
        f"tensor parallelism can't split {kind}: it divides attention heads and the layers around them, and no module "
        f"holds query, key and value layers under a known name (q_proj, query, q_lin, c_attn); {way_out}"
    )


def _below(module: nn.Module, path: str) -> nn.Module | None:
    found: Any = module
    for part in path.split(".") if path else ():
        found = getattr(found, "_modules", {}).get(part)
    return found if isinstance(found, nn.Module) else None


def _layer(module: nn.Module, path: str) -> nn.Module:
    found = _below(module, path)
    assert found is not None
    return found


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
