"""Text encoders, some with padded batches."""

from __future__ import annotations

from typing import Any

from families.family import VOCABULARY, Family, pretrained, tokens

__all__ = ["ENCODERS"]

_BLOCKS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "pad_token_id": 1,
    "num_labels": 3,
}


def _encoder(
    name: str, class_name: str, *, padded: bool = False, length: int = 12, remark: str = "", **config: Any
) -> Family:
    remark = "padded batch" if padded else remark
    return pretrained(name, "encoder", class_name, tokens(length, padded=padded), remark=remark, **config)


ENCODERS: tuple[Family, ...] = (
    _encoder("bert", "BertForSequenceClassification", **_BLOCKS),
    _encoder("bert-padded", "BertForSequenceClassification", padded=True, **_BLOCKS),
    _encoder(
        "bert-hidden-states",
        "BertForSequenceClassification",
        remark="returns the hidden state of every layer",
        **_BLOCKS,
        output_hidden_states=True,
    ),
    _encoder("roberta", "RobertaForSequenceClassification", **_BLOCKS),
    _encoder("roberta-padded", "RobertaForSequenceClassification", padded=True, **_BLOCKS),
    _encoder("xlm-roberta", "XLMRobertaForTokenClassification", padded=True, **_BLOCKS),
    _encoder("xlm-roberta-xl", "XLMRobertaXLForSequenceClassification", **_BLOCKS),
    _encoder("camembert", "CamembertForMaskedLM", **_BLOCKS),
    _encoder("roberta-prelayernorm", "RobertaPreLayerNormForSequenceClassification", **_BLOCKS),
    _encoder("albert", "AlbertForSequenceClassification", **_BLOCKS, embedding_size=16, hidden_dropout_prob=0.1),
    _encoder(
        "distilbert",
        "DistilBertForSequenceClassification",
        padded=True,
        vocab_size=VOCABULARY,
        dim=32,
        hidden_dim=64,
        n_layers=3,
        n_heads=4,
        max_position_embeddings=64,
    ),
    _encoder("electra", "ElectraForSequenceClassification", **_BLOCKS, embedding_size=16),
    _encoder(
        "deberta", "DebertaForSequenceClassification", **_BLOCKS, relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    _encoder(
        "deberta-v2",
        "DebertaV2ForSequenceClassification",
        padded=True,
        **_BLOCKS,
        relative_attention=True,
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["c2p", "p2c"],
    ),
    _encoder("mpnet", "MPNetForSequenceClassification", padded=True, **_BLOCKS),
    _encoder(
        "xlnet",
        "XLNetForSequenceClassification",
        vocab_size=VOCABULARY,
        d_model=32,
        n_layer=3,
        n_head=4,
        d_inner=64,
        use_mems_eval=False,
        use_mems_train=False,
    ),
    _encoder(
        "funnel",
        "FunnelForSequenceClassification",
        vocab_size=VOCABULARY,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        block_sizes=[1, 2],
        num_decoder_layers=1,
    ),
    _encoder("longformer", "LongformerForSequenceClassification", length=16, **_BLOCKS, attention_window=8),
    _encoder("squeezebert", "SqueezeBertForSequenceClassification", padded=True, **_BLOCKS, embedding_size=32),
    _encoder(
        "mobilebert",
        "MobileBertForSequenceClassification",
        **_BLOCKS,
        embedding_size=16,
        intra_bottleneck_size=32,
        num_feedforward_networks=2,
    ),
    _encoder("convbert", "ConvBertForSequenceClassification", **_BLOCKS, embedding_size=32, head_ratio=2),
    _encoder("fnet", "FNetForSequenceClassification", **_BLOCKS),
    _encoder(
        "nystromformer",
        "NystromformerForSequenceClassification",
        length=16,
        **_BLOCKS,
        num_landmarks=4,
        segment_means_seq_len=16,
    ),
    _encoder(
        "rembert", "RemBertForSequenceClassification", **_BLOCKS, input_embedding_size=16, output_embedding_size=16
    ),
    _encoder("modernbert", "ModernBertForSequenceClassification", padded=True, **_BLOCKS, local_attention=8),
    _encoder("megatron-bert", "MegatronBertForSequenceClassification", **_BLOCKS),
    _encoder("roformer", "RoFormerForSequenceClassification", **_BLOCKS, embedding_size=32),
    _encoder("nomic-bert", "NomicBertModel", **_BLOCKS),
    _encoder("esm", "EsmForSequenceClassification", **_BLOCKS, mask_token_id=2, position_embedding_type="rotary"),
    _encoder("ernie", "ErnieForSequenceClassification", padded=True, **_BLOCKS),
    _encoder("layoutlm", "LayoutLMForSequenceClassification", **_BLOCKS),
    _encoder("ibert", "IBertForSequenceClassification", **_BLOCKS),
    _encoder("big-bird", "BigBirdForSequenceClassification", **_BLOCKS, attention_type="original_full"),
)
