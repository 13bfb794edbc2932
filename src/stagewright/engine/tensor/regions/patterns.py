"""Names of the layers that tensor parallelism splits, as transformer families use them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Names of the layers of one region, as in ``RegionPlan``, relative to the module where the pattern matches."""

    columns: tuple[str, ...]
    row: str
    owner: str = ""
    num_sections: int = 1
    layer_classes: tuple[str, ...] = ("Linear",)
    owner_classes: tuple[str, ...] = ()
    """Owner classes for which the pattern is certain, whatever else they hold; empty: any class."""


_CONV1D = ("Conv1D",)
_FALCON = ("FalconLinear",)
ATTENTION = (
    Pattern(columns=("q_proj", "k_proj", "v_proj"), row="o_proj"),  # Llama, Mistral, Qwen, ViT, DeiT
    Pattern(columns=("q_proj", "k_proj", "v_proj"), row="out_proj"),  # OPT, BART, CLIP, GPT-J
    Pattern(columns=("q_proj", "k_proj", "v_proj"), row="dense"),  # Phi
    Pattern(columns=("self.query", "self.key", "self.value"), row="output.dense", owner="self"),  # BERT, RoBERTa
    Pattern(columns=("attention.query", "attention.key", "attention.value"), row="output.dense", owner="attention"),
    Pattern(columns=("q_lin", "k_lin", "v_lin"), row="out_lin"),  # DistilBERT
    Pattern(columns=("c_attn",), row="c_proj", num_sections=3, layer_classes=_CONV1D),  # GPT-2
    # GPT-NeoX packs query, key and value head by head, so each head is contiguous.
    Pattern(columns=("query_key_value",), row="dense", owner_classes=("GPTNeoXAttention", "PersimmonAttention")),
    # Falcon packs the queries of one key/value head with that head.
    Pattern(columns=("query_key_value",), row="dense", layer_classes=_FALCON, owner_classes=("FalconAttention",)),
    Pattern(columns=("qkv_proj",), row="o_proj", num_sections=3, owner_classes=("Phi3Attention",)),
    Pattern(columns=("Wqkv",), row="Wo", num_sections=3, owner_classes=("ModernBertAttention",)),
)
FEED_FORWARD = (
    Pattern(columns=("gate_proj", "up_proj"), row="down_proj"),
    Pattern(columns=("up_proj",), row="down_proj"),  # Nemotron, DINOv3
    Pattern(columns=("fc1",), row="fc2"),
    Pattern(columns=("c_fc",), row="c_proj", layer_classes=("Conv1D", "Linear")),  # GPT-2; GPT-Neo, StarCoder 2
    Pattern(columns=("intermediate.dense",), row="output.dense"),
    Pattern(columns=("dense_h_to_4h",), row="dense_4h_to_h", layer_classes=("Linear", *_FALCON)),
    Pattern(columns=("fc_in",), row="fc_out"),  # GPT-J
    Pattern(columns=("lin1",), row="lin2"),
    Pattern(columns=("intermediate_dense",), row="output_dense"),  # wav2vec 2
    Pattern(columns=("wi_0", "wi_1"), row="wo"),  # T5 1.1, mT5
    Pattern(columns=("wi",), row="wo"),  # T5
    Pattern(columns=("linear1",), row="linear2", owner_classes=("TransformerEncoderLayer", "TransformerDecoderLayer")),
    Pattern(columns=("layer_1",), row="layer_2", owner_classes=("XLNetFeedForward",)),
    Pattern(columns=("linear_1",), row="linear_2", owner_classes=("FunnelPositionwiseFFN",)),
    Pattern(columns=("intermediate",), row="output", owner_classes=("ProphetNetFeedForward",)),
    Pattern(columns=("ffn",), row="ffn_output", owner_classes=("AlbertLayer",)),
    Pattern(columns=("dense1",), row="dense2"),  # PVT
    Pattern(columns=("pwconv1",), row="pwconv2", owner_classes=("ConvNextLayer",)),
    Pattern(columns=("key",), row="value", owner_classes=("RwkvFeedForward",)),
    # Gate and input are halves of one layer's output.
    Pattern(columns=("gate_up_proj",), row="down_proj", num_sections=2, owner_classes=("Phi3MLP", "GlmMLP", "Glm4MLP")),
    Pattern(columns=("Wi",), row="Wo", num_sections=2, owner_classes=("ModernBertMLP",)),
)
