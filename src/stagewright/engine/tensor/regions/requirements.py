"""What an attention must be so that its heads can be split: read from its parameters and from its code.

Each function raises an error with the reason where the meaning of something is uncertain.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from types import CodeType

from torch import nn

from stagewright.errors import UsageError

HEAD_SIZES = ("head_dim", "attention_head_size", "head_size")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_WIDTHS = ("all_head_size", "split_size")
_ROTARY = ("rotary_ndims", "rotary_dim")
_LATENT = ("qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")
_UNAFFECTED = (*HEAD_SIZES, *_ROTARY, *_LATENT, "layer_idx", "layer_id", "sliding_window", "num_key_value_groups")
_HEAD_PARAMETERS = ("sinks",)  # attention sinks: a logit of each head that takes part in its softmax
_CONFIG_SIZES = (*HEAD_COUNTS, *_KEY_HEAD_COUNTS, "hidden_size", "n_embd", "d_model")


def attributes_to_divide(
    owner: nn.Module, where: str, heads: int, key_heads: int, head_size: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the attributes of the owner and of its configuration that must be divided by the number of workers.

    Raise if that is uncertain for one.
    """
    read = {name for code in methods_of(type(owner)) for name in code.co_names}
    if any("embed_dim" in code.co_varnames for code in methods_of(type(owner))):
        raise UsageError(
            f"{where}: its code takes the total width of its heads, embed_dim, from the input, which is wider than one "
            "worker's heads; tensor parallelism can't change that: use data or pipeline instead"
        )
    divisible = {
        **dict.fromkeys(HEAD_COUNTS, heads),
        **dict.fromkeys(_KEY_HEAD_COUNTS, key_heads),
        **dict.fromkeys(_WIDTHS, heads * head_size),
    }
    config_attributes = []
    sizes = {heads, key_heads, heads * head_size, key_heads * head_size, 3 * heads * head_size}
    for name in sorted(read):
        value = vars(owner).get(name)
        if value is None and name in _CONFIG_SIZES and "config" in read:
            if getattr(vars(owner).get("config"), name, None) == divisible.get(name, 0):
                config_attributes.append(name)
                continue
            raise UsageError(
                f"{where}: its code reads {name} of the whole model from the configuration; tensor parallelism can't "
                "divide it for one worker: use data or pipeline instead"
            )
        if type(value) is int and name not in divisible and name not in _UNAFFECTED and value in sizes:
            raise UsageError(
                f"{where}: its code reads {name} = {value}, which may be the size of all heads or the width of the "
                "model; tensor parallelism can't tell which: use data or pipeline instead"
            )
    own = [
        name for name, value in divisible.items() if type(vars(owner).get(name)) is int and vars(owner)[name] == value
    ]
    return tuple(own), tuple(config_attributes)


def methods_of(kind: type) -> Iterator[CodeType]:
    """Yield the code of a module class's methods, without ``__init__``."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for name, member in vars(base).items():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if name != "__init__" and code is not None:
                yield code


def find_head_parameters(owner: nn.Module, heads: int) -> tuple[str, ...]:
    """Return the parameters of an attention that are known to have one value per head, and that its code passes on."""
    read = {name for code in methods_of(type(owner)) for name in code.co_names}
    own = dict(owner.named_parameters(recurse=False))
    return tuple(name for name in _HEAD_PARAMETERS if name in own and name in read and own[name].shape == (heads,))


def require_only(
    owner: nn.Module, layers: list[nn.Module], where: str, heads: int, parameters: Collection[str] = ()
) -> None:
    """Raise if a region has parameters, or buffers with one value per head, outside of the given layers.

    ``parameters``: those of the owner itself that are known.
    """
    expected = {id(parameter) for layer in layers for parameter in layer.parameters()}
    expected |= {id(owner.get_parameter(name)) for name in parameters}
    others = [name for name, parameter in owner.named_parameters() if id(parameter) not in expected]
    others += [name for name, buffer in owner.named_buffers() if heads > 1 and buffer.numel() == heads]
    if others:
        raise UsageError(
            f"{where}: {others[0]!r} is among the layers to split, but how to split it is unknown; "
            "use data or pipeline instead"
        )


def require_untied(layers: list[nn.Module], holders: dict[int, list[str]], where: str) -> None:
    for layer in layers:
        names = holders.get(id(layer.get_parameter("weight")), [])
        if len(names) > 1:
            raise UsageError(
                f"{where}: the weight {names[0]!r} is tied to {names[1]!r}, which would need the same split; "
                "use data or pipeline instead"
            )
