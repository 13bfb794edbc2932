"""Multi-head latent attention (DeepSeek-V2 and V3, and models after them), split by heads.

    x ─┬─ q_a ─ norm ─ copy ─ column: q_b ──────────────────────────┐
       └─ kv_a ─┬─ latent ─ norm ─ copy ─ column: kv_b ─────────────┼─ heads ─ row: o ─ all-reduce ─ y
                └─ copy ─ rotary part of the keys, of all heads ────┘

Low-rank projections are replicated: each worker computes them whole. The copies stand behind them, because a latent is
narrower than the hidden states, and because the gradients of these layers are then whole without further all-reduces.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from stagewright.engine.tensor.regions.region_plan import RegionPlan, join_names, layer_sizes
from stagewright.engine.tensor.regions.requirements import attributes_to_divide, require_only, require_untied
from stagewright.errors import UsageError

_KEYS, _KEY_NORM, _KEYS_UP, _OUTPUT = "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"
_QUERY_LATENT, _QUERY_UP, _QUERY = ("q_a_proj", "q_a_layernorm"), "q_b_proj", "q_proj"
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")


def is_latent_attention(module: nn.Module) -> bool:
    """Return whether a module has the layers of latent attention under their usual names."""
    linear = [getattr(module, name, None) for name in (_KEYS, _KEYS_UP, _OUTPUT, _query(module))]
    norms = [getattr(module, name, None) for name in (_KEY_NORM, *_query_latent(module)[1:])]
    return all(type(layer) is nn.Linear for layer in linear) and all(isinstance(norm, nn.Module) for norm in norms)


def plan_latent_attention(name: str, owner: nn.Module, holders: dict[int, list[str]]) -> RegionPlan:
    """Return the region of a latent attention; raise ``UsageError`` if its layers are not as in DeepSeek."""
    where = f"{name} ({type(owner).__name__})"
    sizes = {size: getattr(owner, size, None) for size in _SIZES}
    if any(type(size) is not int for size in sizes.values()):
        missing = next(key for key, size in sizes.items() if type(size) is not int)
        raise UsageError(
            f"{where}: it has no attribute {missing}, so how its latent attention is made up of heads is unknown; "
            "tensor parallelism can't split it: use data or pipeline instead"
        )
    values: Any = sizes
    rank, rotary, value_width = values["kv_lora_rank"], values["qk_rope_head_dim"], values["v_head_dim"]
    widths = {path: layer_sizes(owner.get_submodule(path)) for path in (_KEYS, _KEYS_UP, _OUTPUT, _query(owner))}
    heads = widths[_OUTPUT][0] // value_width
    expected = {
        _KEYS: (widths[_KEYS][0], rank + rotary),
        _KEYS_UP: (rank, heads * (values["qk_nope_head_dim"] + value_width)),
        _OUTPUT: (heads * value_width, widths[_OUTPUT][1]),
        _query(owner): (widths[_query(owner)][0], heads * values["qk_head_dim"]),
    }
    if wrong := [path for path in expected if widths[path] != expected[path]]:
        path = wrong[0]
        raise UsageError(
            f"{where}: {path} maps {widths[path][0]} features to {widths[path][1]}, and {heads} heads of latent "
            f"attention need {expected[path][0]} and {expected[path][1]}; tensor parallelism can't split it: use data "
            "or pipeline instead"
        )
    split = [owner.get_submodule(path) for path in (_query(owner), _KEYS_UP, _OUTPUT)]
    latent = (*_query_latent(owner), _KEY_NORM)
    require_only(owner, [*split, *(owner.get_submodule(path) for path in (*latent, _KEYS))], where, heads)
    require_untied(split, holders, where)
    attributes, config_attributes = attributes_to_divide(owner, where, heads, heads, values["qk_head_dim"])
    return RegionPlan(
        owner=name,
        latent_layers=tuple(join_names(name, path) for path in latent),
        latent_keys=(join_names(name, _KEYS), rank),
        column_layers=(join_names(name, _query(owner)), join_names(name, _KEYS_UP)),
        row_layer=join_names(name, _OUTPUT),
        divisible={"attention heads": heads},
        attributes=attributes,
        config_attributes=config_attributes,
    )


def _query(module: nn.Module) -> str:
    """Return the layer that returns the queries of all heads."""
    return _QUERY_UP if isinstance(getattr(module, _QUERY_UP, None), nn.Module) else _QUERY


def _query_latent(module: nn.Module) -> tuple[str, ...]:
    """Return the layers before it."""
    return _QUERY_LATENT if _query(module) == _QUERY_UP else ()
