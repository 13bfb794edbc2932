"""Built-in text models, built by transformers from a configuration."""

from __future__ import annotations

from typing import Any

from stagewright.errors import UsageError
from stagewright.extras import require
from stagewright.zoo.blueprint import Blueprint, Options
from stagewright.zoo.model import Objective, TextInput
from stagewright.zoo.named.catalog import Entry


def build(entry: Entry, options: Options, layers: int | None) -> Blueprint:
    """Create the blueprint of a text model; `layers` is the number of layers of a family."""
    require("transformers", f"the model {entry.name!r}")
    import transformers  # imported here, because it takes seconds that user-defined models don't need

    num_classes: int | None = options.num_classes or 2
    objective: Objective = "classify"
    config: Any
    model_class: Any
    if entry.name == "roberta-base":
        config = transformers.RobertaConfig(
            vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
        )
        model_class = transformers.RobertaForSequenceClassification
    elif entry.name == "bert-minilm":
        config = transformers.BertConfig(
            vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
        model_class = transformers.BertForSequenceClassification
    else:
        num_classes, objective = None, "next-token"
        config, model_class = _decoder(entry.name, layers)
    if num_classes is not None:
        config.num_labels = num_classes
    config.use_cache = False
    length = options.sequence_length or 128
    max_length = longest_sequence(config)
    if max_length is not None and length > max_length:
        raise UsageError(f"{entry.name} takes sequences of at most {max_length} tokens, not {length}")
    return Blueprint(
        make=model_class,
        config=config,
        inputs=TextInput(
            vocabulary_size=config.vocab_size,
            sequence_length=length,
            num_token_types=getattr(config, "type_vocab_size", 1),
        ),
        objective=objective,
        num_classes=num_classes,
        pad_token=pad_token(config),
    )


def _decoder(name: str, layers: int | None) -> tuple[Any, Any]:
    import transformers

    if name == "llama-tiny":
        config: Any = transformers.LlamaConfig(
            vocab_size=8192,
            hidden_size=256,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            intermediate_size=688,
            max_position_embeddings=2048,
        )
        return config, transformers.LlamaForCausalLM
    if name == "gpt2":
        return transformers.GPT2Config(), transformers.GPT2LMHeadModel
    assert name == "gpt-layers", name
    assert layers is not None
    config = transformers.GPT2Config(
        vocab_size=8192, n_embd=512, n_head=8, n_layer=layers, bos_token_id=0, eos_token_id=0
    )
    return config, transformers.GPT2LMHeadModel


def longest_sequence(config: Any) -> int | None:
    """Return how many tokens the position embeddings of `config` allow; None without a limit."""
    max_length = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_length, int) or max_length < 1:
        return None
    # RoBERTa and similar models number positions from the padding id + 1.
    roberta_like = ("roberta", "camembert", "xlm-roberta", "longformer", "mpnet", "data2vec-text")
    return max_length - 2 if getattr(config, "model_type", "") in roberta_like else max_length


def pad_token(config: Any) -> int:
    """Return the padding token id, or the end-of-text id if the configuration has none."""
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value >= 0:
            return value
    return 0
