"""Worker functions for tests of a divided vocabulary, run by ``pool``: whole plans under the parity check."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from expert_jobs import make_plan
from torch import nn

from jobs import context_of
from stagewright.engine.parallel.model import capture_for
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.zoo.loss import next_token
from stagewright.zoo.model import Batch, Model

VOCABULARY, LENGTH, BATCH = 41, 8, 4  # 41: no number of workers divides it


def make_module(name: str) -> nn.Module:
    """Build a tiny transformer with dropout; llama has a head of its own, the others are tied."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    common = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name == "llama":
        config = hf.LlamaConfig(**sizes, **common, num_key_value_heads=2, use_cache=False, attention_dropout=0.2)
        return hf.LlamaForCausalLM(config)
    if name == "gpt2":
        config = hf.GPT2Config(
            n_embd=16, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=32, use_cache=False, bos_token_id=1,
            eos_token_id=2, attn_pdrop=0.2, embd_pdrop=0.2, resid_pdrop=0.2,
        )  # fmt: skip
        return hf.GPT2LMHeadModel(config)
    if name == "t5":
        config = hf.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, use_cache=False,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, dropout_rate=0.2,
        )  # fmt: skip
        return hf.T5ForConditionalGeneration(config)
    config = hf.BertConfig(
        **sizes, **common, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2, max_position_embeddings=32
    )
    return hf.BertForMaskedLM(config)


def make_model(name: str, *, batch: int = BATCH, loss: str = "model") -> Model:
    """Give a module token sequences; ``loss``: its own, ours of its logits, or one that needs whole logits."""

    def make(count: int) -> Batch:
        ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(count))
        ids[:, -1] = 0  # the padding token
        labels = ids.masked_fill(ids == 0, -100)
        kwargs = {"input_ids": ids} | ({"labels": labels} if loss == "model" or name == "t5" else {})
        return Batch(args=(), kwargs=kwargs, target=None if loss == "model" else labels)

    def squares(output: Any, target: Any) -> torch.Tensor:
        return output["logits"].square().mean()  # type: ignore[no-any-return]

    losses = {"model": lambda output, target: output["loss"], "own": next_token, "squares": squares}
    example = make(batch)
    return Model(
        name=name,
        module=make_module(name),
        args=(),
        kwargs=example.kwargs,
        target=example.target,
        loss=losses[loss],
        batch_size=batch,
        make_example=make,
    )


def parity(rank: int, name: str, mesh: str, loss: str = "model", **more: Any) -> dict[str, Any]:
    """Check the parity of a plan; return the report, the bytes of the tensor axis, and the shapes of divided weights."""
    model = make_model(name, loss=loss)
    model.module.train(more.get("training", True))
    plan = make_plan(mesh, model, **{"vocab_parallel": True, **more})
    context = context_of(rank, mesh)
    graph = capture_for(plan, model)
    baseline = baseline_of(plan, model, graph, context) if rank == 0 else None
    runner = StepRunner(plan, model, context, graph)
    example = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    report = check_parity(runner, example, baseline)
    axis = runner.part.tensor_axis
    assert axis is not None
    axis.payload_bytes = 0
    runner.train_step(example) if plan.training else runner.infer(example)
    return {
        "report": report,
        "bytes": axis.payload_bytes,
        "rows": sorted({tuple(value.shape) for value in runner.part.module.parameters() if value.ndim == 2}),
    }
