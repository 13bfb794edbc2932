"""torch's own attention (``nn.MultiheadAttention`` and its function) with this worker's positions.

Its layers project tokens one by one, so they compute this worker's; between them is the attention that is divided. The
weights of attention are not computed: ``find`` has refused a model that uses them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from stagewright.engine.tensor.multihead import added_mask

_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


@dataclass(frozen=True, slots=True)
class MultiheadCall:
    """The arguments of one call of ``multi_head_attention_forward``, whose tensors have their tokens first."""

    arguments: dict[str, Any]

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> MultiheadCall:
        """Name the arguments of a call."""
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        return cls(bound.arguments)

    @property
    def sources(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What queries, keys and values are made of."""
        return self.arguments["query"], self.arguments["key"], self.arguments["value"]

    @property
    def given_masks(self) -> list[torch.Tensor]:
        """The masks that are given, also one that ``is_causal`` stands for."""
        masks = (self.arguments["attn_mask"], self.arguments["key_padding_mask"])
        return [mask for mask in masks if mask is not None]

    @property
    def is_causal(self) -> bool:
        """Whether the causal mask is not given but computed; as in torch, only where it is the one mask."""
        arguments = self.arguments
        return bool(arguments["is_causal"]) and arguments["key_padding_mask"] is None and not arguments["need_weights"]

    @property
    def dropout(self) -> float:
        """The dropout of the weights."""
        return float(self.arguments["dropout_p"]) if self.arguments["training"] else 0.0

    def extra_key(self) -> str:
        """Return the option by which each sequence gets one key more, or ""."""
        if self.arguments["bias_k"] is not None:
            return "add_bias_kv"
        return "add_zero_attn" if self.arguments["add_zero_attn"] else ""

    def masks(self) -> list[torch.Tensor]:
        """Return the masks as added to scores of the shape [samples, heads, queries, keys]."""
        query, _, _ = self.sources
        attention, padding = self.arguments["attn_mask"], self.arguments["key_padding_mask"]
        masks = []
        if attention is not None and not self.is_causal:
            added = added_mask(attention, query.dtype)
            masks.append(added if attention.dim() == 2 else added.view(query.shape[1], -1, *added.shape[1:]))
        if padding is not None:
            masks.append(added_mask(padding, query.dtype)[:, None, None, :])
        return masks

    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values as [samples, heads, tokens, features]."""
        arguments = self.arguments
        if arguments["use_separate_proj_weight"]:
            weights = [arguments[f"{name}_proj_weight"] for name in "qkv"]
        else:
            weights = arguments["in_proj_weight"].chunk(3)
        biases = [None] * 3 if arguments["in_proj_bias"] is None else arguments["in_proj_bias"].chunk(3)

        def project(index: int) -> torch.Tensor:
            features: torch.Tensor = functional.linear(self.sources[index], weights[index], biases[index])
            return features.view(*features.shape[:2], arguments["num_heads"], -1).permute(1, 2, 0, 3)

        return project(0), project(1), project(2)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """Apply the output layer to what the heads return."""
        # Tokens first in memory, as torch has it: a dropout that follows draws its mask in the order of memory.
        joined = attended.permute(2, 0, 1, 3).flatten(2)
        return functional.linear(joined, self.arguments["out_proj_weight"], self.arguments["out_proj_bias"])
