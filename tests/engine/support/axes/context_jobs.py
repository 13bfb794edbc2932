"""Worker functions for tests of context parallelism, run by ``pool``."""

from __future__ import annotations

from typing import Any

import torch
from expert_jobs import make_plan
from parity_jobs import checked_traffic, model_with_loss

from stagewright.engine.context.find import find_blocks
from stagewright.errors import UsageError
from stagewright.graph.capture import capture
from stagewright.zoo.model import Batch, Model

VOCABULARY, LENGTH = 40, 16


def make_model(name: str, *, batch: int, length: int = LENGTH) -> Model:
    """Build a tiny transformer with dropout that computes its loss."""
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
    else:
        config = hf.BertConfig(
            **sizes, **common, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2, max_position_embeddings=32
        )
        module = hf.BertForMaskedLM(config)

    def make(count: int) -> Batch:
        ids = torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(count))
        kwargs = {"input_ids": ids, "labels": ids}
        if name != "gpt2":
            lengths = torch.arange(count) % 5 + length - 5
            kwargs["attention_mask"] = (torch.arange(length) <= lengths[:, None]).long()
        return Batch(args=(), kwargs=kwargs)

    return model_with_loss(name, module, batch, make)


def parity(rank: int, name: str, mesh: str, batch: int = 4, length: int = LENGTH, **more: Any) -> dict[str, Any]:
    """Check the parity of a plan, and return the bytes of the context axis."""
    model = make_model(name, batch=batch, length=length)
    model.module.train(more.get("training", True))
    plan = make_plan(mesh, model, **more)
    _, report, sent = checked_traffic(rank, plan, model, mesh, lambda runner: runner.part.context_axis)
    return {"report": report, "bytes": sent}


def refusal(name: str) -> str:
    """Return the sentence with which a model is refused."""
    module, args, kwargs = _refused(name)
    try:
        find_blocks(capture(module, args, kwargs), args, kwargs, 2)
    except UsageError as error:
        return str(error)
    return ""


def _refused(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    import transformers as hf

    if name == "mlp":
        layers = [torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)]
        return torch.nn.Sequential(*layers), (torch.randn(4, 4),), {}
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    return hf.T5ForConditionalGeneration(config), (), {"input_ids": ids, "decoder_input_ids": ids}
