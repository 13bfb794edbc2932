"""The dimensions of a transformer, read from a configuration without building the model.

Dense and mixture-of-experts (MoE) models, grouped-query and multi-head latent attention (MLA).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError

# Families with gated feed-forward layers, regardless of the activation's name.
_GATED = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3",
    "deepseek_v2", "deepseek_v3", "olmo", "olmo2", "olmoe", "bitnet", "vaultgemma", "dbrx",
)  # fmt: skip
# Families with tied embeddings unless the configuration says otherwise.
_TIED = (
    "gpt2", "bert", "t5", "opt", "gemma", "gemma2", "gemma3_text", "gpt_neo", "bloom", "starcoder2", "cohere",
    "falcon", "gpt_bigcode", "mpt", "vaultgemma",
)  # fmt: skip
# Families without a table of positions are the gated ones and these.
_ROTARY = ("gpt_neox", "gptj", "starcoder2", "cohere", "falcon", "phi", "stablelm", "mpt")
# Keys of models with layers that are neither attention nor feed-forward.
_STATE_SPACE = ("mamba_d_state", "mamba_num_heads", "ssm_state_size", "state_size", "ssm_cfg", "lru_width")
# Families whose configuration classes apply dropout where the file does not say.
_DROPOUT = {("gpt2", "resid_pdrop"): 0.1, ("opt", "dropout"): 0.1, ("bert", "hidden_dropout_prob"): 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed experts of mixture-of-experts layers."""

    num_experts: int
    """Routed experts of a layer."""
    top_k: int
    """Experts that each token visits."""
    feed_forward: int
    """Feed-forward size of an expert."""
    shared_feed_forward: int = 0
    """Feed-forward size of the experts that every token visits."""
    dense_layers: int = 0
    """Leading layers without experts."""
    every: int = 1
    """Of the other layers, every n-th has experts."""

    def layers_before(self, end: int) -> int:
        """Return how many of the first layers have experts.

        >>> Experts(num_experts=8, top_k=1, feed_forward=64, every=2).layers_before(5)
        2
        """
        return max(0, end // self.every - self.dense_layers // self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA), as in DeepSeek-V2."""

    query_rank: int
    """Size of the compressed queries; 0: not compressed."""
    key_value_rank: int
    """Size of the compressed keys and values."""
    rotary_width: int
    """Rotary part of a head's queries and keys."""
    value_width: int
    """Size of a head's values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The dimensions of a transformer."""

    num_layers: int
    width: int
    """Hidden size."""
    num_heads: int
    num_key_heads: int
    """Key/value heads."""
    feed_forward: int
    """Feed-forward size."""
    num_matrices: int
    """Matrices of a feed-forward layer: 2, or 3 with a gate."""
    vocabulary: int
    """Vocabulary size."""
    sequence_length: int
    tied: bool
    """Whether embedding and head share one matrix."""
    head_width: int | None = None
    """Size of an attention head; None: width / num_heads."""
    rotary: bool = False
    """Whether positions are rotary embeddings; False: a learned table."""
    dropout: bool = False
    """Whether training applies dropout."""
    experts: Experts | None = None
    """Routed experts; None: a dense model."""
    latent: LatentAttention | None = None
    """Latent attention; None: grouped-query attention."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_heads", "num_key_heads", "feed_forward", "vocabulary"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} = {getattr(self, name)}, but a transformer needs at least 1")
        if self.head_width is None and self.width % self.num_heads:
            raise UsageError(f"a width of {self.width} can't be divided into {self.num_heads} heads; state head_dim")

    @property
    def head_size(self) -> int:
        """Size of an attention head."""
        return self.width // self.num_heads if self.head_width is None else self.head_width

    @property
    def attention_width(self) -> int:
        """Size of all query heads together."""
        return self.num_heads * self.head_size

    @property
    def key_width(self) -> int:
        """Size of all key heads together."""
        return self.num_key_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Size of a head's queries and keys as attention gets them, with the rotary part of latent attention."""
        return self.head_size + (0 if self.latent is None else self.latent.rotary_width)

    @property
    def value_size(self) -> int:
        """Size of a head's values."""
        return self.head_size if self.latent is None else self.latent.value_width

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return 0 if self.experts is None else self.experts.layers_before(self.num_layers)

    @property
    def attention_parameters(self) -> int:
        """Parameters of a block's attention, without norms and biases."""
        if self.latent is None:
            return self.width * (2 * self.attention_width + 2 * self.key_width)
        latent, heads = self.latent, self.num_heads
        query_width = heads * (self.head_size + latent.rotary_width)
        query = (
            self.width * latent.query_rank + latent.query_rank * query_width
            if latent.query_rank
            else self.width * query_width
        )
        down = self.width * (latent.key_value_rank + latent.rotary_width)
        up = latent.key_value_rank * heads * (self.head_size + latent.value_width)
        return query + down + up + heads * latent.value_width * self.width

    @property
    def dense_parameters(self) -> int:
        """Parameters of a dense feed-forward layer."""
        return self.num_matrices * self.width * self.feed_forward

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return 0 if self.experts is None else self.num_matrices * self.width * self.experts.feed_forward

    @property
    def shared_parameters(self) -> int:
        """Parameters of router and shared experts of one layer."""
        if self.experts is None:
            return 0
        shared = self.num_matrices * self.width * self.experts.shared_feed_forward
        return shared + self.width * self.experts.num_experts

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        ends = self.vocabulary * self.width * (1 if self.tied else 2)
        moe = self.num_moe_layers
        total = self.num_layers * self.attention_parameters + (self.num_layers - moe) * self.dense_parameters + ends
        if self.experts is not None:
            total += moe * (self.experts.num_experts * self.expert_parameters + self.shared_parameters)
        return total

    @property
    def active_parameters(self) -> int:
        """Parameters that each token visits."""
        if self.experts is None:
            return self.parameters
        idle = self.experts.num_experts - self.experts.top_k
        return self.parameters - self.num_moe_layers * idle * self.expert_parameters

    @property
    def model_flops_per_token(self) -> float:
        """Floating-point operations of forward and backward per token, without recomputation.

        6 for each active parameter of a matrix product, and attention over the whole (not the causal) matrix, as MFU is
        usually stated (PaLM, appendix B).
        """
        matrices = self.active_parameters - (0 if self.tied else self.vocabulary * self.width)
        attention = self.num_layers * self.num_heads * (self.key_size + self.value_size) * self.sequence_length
        return 6.0 * (matrices + attention)

    def with_length(self, length: int | None) -> TransformerShape:
        """Return the shape for another sequence length; None: unchanged."""
        return self if length is None else replace(self, sequence_length=length)

    @classmethod
    def from_config(cls, config: dict[str, Any], where: str, length: int | None = None) -> TransformerShape:
        """Read a Hugging Face configuration."""
        config = _flat(config.get("text_config", config))
        _refuse_other_models(config, where)

        def number(*names: str) -> int:
            for name in names:
                if isinstance(config.get(name), int):
                    return int(config[name])
            raise UsageError(f"{where} has none of {', '.join(names)}, so it is not a transformer configuration")

        width, heads = (
            number("hidden_size", "n_embd", "d_model"),
            number("num_attention_heads", "n_head", "num_heads", "n_heads"),
        )
        kind = str(config.get("model_type", ""))
        names = ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
        inner = next((int(config[name]) for name in names if isinstance(config.get(name), int)), 4 * width)
        gated = kind in _GATED or "silu" in str(config.get("hidden_act", ""))
        lengths = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
        longest = next((config[name] for name in lengths if config.get(name)), 2048)
        drops = ("hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "dropout")
        dropout = any(float(config.get(name, _DROPOUT.get((kind, name))) or 0) > 0 for name in drops)
        latent = None
        if config.get("kv_lora_rank"):
            latent = LatentAttention(
                query_rank=int(config.get("q_lora_rank") or 0),
                key_value_rank=int(config["kv_lora_rank"]),
                rotary_width=int(config.get("qk_rope_head_dim") or 64),
                value_width=int(config.get("v_head_dim") or 128),
            )
        head_width = config.get("qk_nope_head_dim") if latent is not None else config.get("head_dim")
        return cls(
            num_layers=number("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
            width=width,
            num_heads=heads,
            num_key_heads=_key_heads(config, heads),
            feed_forward=inner,
            num_matrices=3 if gated else 2,
            vocabulary=number("vocab_size"),
            sequence_length=length or int(longest),
            tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
            head_width=None if head_width is None else int(head_width),
            rotary=gated or kind in _ROTARY,
            dropout=dropout,
            experts=_experts(config),
            latent=latent,
        )

    @classmethod
    def read(cls, path: str | Path, length: int | None = None) -> TransformerShape:
        """Read a config.json, or the one in a folder."""
        file = Path(path).expanduser()
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            raise UsageError(f"there is no configuration {file}; give a folder with a config.json")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{file} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise UsageError(f"{file} holds a {type(config).__name__}, but a configuration is an object")
        return cls.from_config(config, str(file), length)


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without the groups in which DBRX and MPT put attention and feed-forward layers."""
    groups = [config[name] for name in ("attn_config", "ffn_config") if isinstance(config.get(name), dict)]
    flat = dict(config)
    for group in groups:
        flat |= {name: value for name, value in group.items() if name not in config}
    return flat


def _refuse_other_models(config: dict[str, Any], where: str) -> None:
    """Raise UsageError for models that are not a stack of transformer blocks: their numbers would be read wrongly."""
    if config.get("is_encoder_decoder"):
        kind = "an encoder-decoder"
    elif any(config.get(name) for name in _STATE_SPACE):
        kind = "a model with state-space or recurrent layers"
    elif config.get("zero_expert_num"):
        kind = "a model with experts that compute nothing"
    else:
        return
    raise UsageError(
        f"{where} is {kind}, but an analytic forecast knows stacks of transformer blocks only: forecast it without "
        "--analytic"
    )


def _key_heads(config: dict[str, Any], heads: int) -> int:
    """Return the key/value heads; Falcon and StarCoder state multi-query attention as a flag."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
    return next((int(config[name]) for name in names if config.get(name)), heads)


def _experts(config: dict[str, Any]) -> Experts | None:
    """Read the routed experts under the names that Mixtral, Qwen, DeepSeek, Llama 4, DBRX and others give them."""

    def number(*names: str) -> int:
        return next((config[name] for name in names if isinstance(config.get(name), int)), 0)

    count = number("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if count < 2 or config.get("is_moe") is False:
        return None
    inner = number("moe_intermediate_size", "intermediate_size", "ffn_hidden_size")
    shared = number("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    if config.get("model_type") == "llama4_text":
        shared = 1
    return Experts(
        num_experts=count,
        top_k=number("num_experts_per_tok", "moe_top_k", "num_experts_per_token", "moe_topk", "moe_k") or 2,
        feed_forward=inner,
        shared_feed_forward=number("shared_expert_intermediate_size", "shared_intermediate_size") or shared * inner,
        dense_layers=number("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
        every=number("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval") or 1,
    )
