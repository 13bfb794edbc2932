"""Tiny transformers with dropout and attention that saves its scores: `tests.engine.support.attention_models:NAME`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LENGTH = 48


def _with_tokens(module: nn.Module) -> tuple[nn.Module, tuple[Any, ...]]:
    return module, (torch.randint(0, 64, (8, LENGTH), generator=torch.Generator().manual_seed(0)),)


def llama() -> tuple[nn.Module, tuple[Any, ...]]:
    """Rotary embeddings and grouped key heads; dropout in attention only."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, use_cache=False, attention_dropout=0.2, attn_implementation="eager",
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _with_tokens(hf.LlamaModel(config))


def bert() -> tuple[nn.Module, tuple[Any, ...]]:
    """An attention without its output layer, and dropout before and after it."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
        hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2, attn_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    return _with_tokens(hf.BertModel(config))


def gpt2() -> tuple[nn.Module, tuple[Any, ...]]:
    """Packed queries, keys and values, and dropout after the output layer."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=LENGTH, use_cache=False, attn_pdrop=0.2,
        resid_pdrop=0.2, embd_pdrop=0.2, attn_implementation="eager", bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _with_tokens(hf.GPT2Model(config))
