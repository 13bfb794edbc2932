"""Worker functions for tests of context parallelism, run by ``pool``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from expert_jobs import make_plan
from parity_jobs import checked_traffic, model_with_loss
from torch.nn import functional
from torch_transformers import MODELS, make_torch_model

from stagewright.engine.context.find import find_blocks
from stagewright.engine.context.sources import Sources
from stagewright.errors import UsageError
from stagewright.graph.capture import capture
from stagewright.zoo.model import Batch, Model

VOCABULARY, LENGTH = 40, 16


def make_model(name: str, *, batch: int, length: int = LENGTH, source_length: int = LENGTH) -> Model:
    """Build a tiny transformer with dropout that computes its loss; ``source_length``: tokens of T5's encoder."""
    if name in MODELS:
        return make_torch_model(name, batch=batch, length=length, source_length=source_length)
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    common = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name == "llama":
        config = hf.LlamaConfig(**sizes, **common, num_key_value_heads=2, use_cache=False, attention_dropout=0.2)
        module: torch.nn.Module = hf.LlamaForCausalLM(config)
    elif name == "gpt2":
        config = hf.GPT2Config(
            n_embd=16, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=32, use_cache=False, bos_token_id=1,
            eos_token_id=2, attn_pdrop=0.2, embd_pdrop=0.2, resid_pdrop=0.2,
        )  # fmt: skip
        module = hf.GPT2LMHeadModel(config)
    elif name == "t5":
        config = hf.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, use_cache=False,
            decoder_start_token_id=0, dropout_rate=0.2,
        )  # fmt: skip
        module = hf.T5ForConditionalGeneration(config)
    else:
        config = hf.BertConfig(
            **sizes, **common, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2, max_position_embeddings=32
        )
        module = hf.BertForMaskedLM(config)

    def make(count: int) -> Batch:
        ids = torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(count))
        kwargs = {"input_ids": ids, "labels": ids}
        if name == "t5":
            kwargs["input_ids"] = ids.repeat(1, 2)[:, :source_length].flip(1)
        if name != "gpt2":
            tokens = kwargs["input_ids"].shape[1]
            lengths = torch.arange(count) % 5 + tokens - 5
            kwargs["attention_mask"] = (torch.arange(tokens) <= lengths[:, None]).long()
        return Batch(args=(), kwargs=kwargs)

    return model_with_loss(name, module, batch, make)


def parity(rank: int, name: str, mesh: str, lengths: tuple[int, int] = (LENGTH, LENGTH), **more: Any) -> dict[str, Any]:
    """Check the parity of a plan, and return the bytes of the context axis; ``lengths``: tokens, and the encoder's."""
    model = make_model(name, batch=4, length=lengths[0], source_length=lengths[1])
    model.module.train(more.get("training", True))
    plan = make_plan(mesh, model, **more)
    _, report, sent = checked_traffic(rank, plan, model, mesh, lambda runner: runner.part.context_axis)
    return {"report": report, "bytes": sent}


def sources(name: str, *, batch: int) -> list[Sources]:
    """Return what the attention of each block of a model works on."""
    model = make_model(name, batch=batch)
    blocks = find_blocks(capture(model.module, model.args, model.kwargs), model.args, model.kwargs, 2)
    return list(blocks.values())


def refusal(name: str) -> str:
    """Return the sentence with which a model is refused."""
    module, args = _REFUSED[name]()
    try:
        find_blocks(capture(module, args, {}), args, {}, 2)
    except UsageError as error:
        return str(error)
    return ""


class _Attention(torch.nn.Module):
    """Attends from hidden states to some of their tokens, or in windows."""

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self._window = window

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query = hidden[:, None]
        if self._window:
            query = query.unflatten(2, (-1, self._window)).flatten(0, 2)[:, None]
            return functional.scaled_dot_product_attention(query, query, query).reshape(hidden.shape)
        key = query[:, :, 4:]
        return functional.scaled_dot_product_attention(query, key, key)[:, 0]


def _perceptron() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    layers = [torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)]
    return torch.nn.Sequential(*layers), (torch.randn(4, 4),)


def _attention(window: int) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), _Attention(window)), (torch.randn(2, LENGTH, 4),)


class _Weighted(torch.nn.Module):
    """Uses the weights that torch's own attention returns, or returns them."""

    def __init__(self, use: str = "", **options: Any) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 1, batch_first=True, **options)
        self._use = use

    def forward(self, hidden: torch.Tensor) -> Any:
        output, weights = self.attention(hidden, hidden, hidden)
        if self._use == "inside":
            return output * weights.mean()
        return (output, weights) if self._use == "outside" else output


def _weighted(use: str = "", **options: Any) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), _Weighted(use, **options)), (torch.randn(2, LENGTH, 4),)


_REFUSED: dict[str, Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor]]]] = {
    "perceptron": _perceptron,
    "some tokens": lambda: _attention(0),
    "windows": lambda: _attention(4),
    "weights used": lambda: _weighted("inside"),
    "weights returned": lambda: _weighted("outside"),
    "trained key": lambda: _weighted(add_bias_kv=True),
    "key of zeros": lambda: _weighted(add_zero_attn=True),
}
