"""Worker functions for tests of a divided vocabulary, run by ``pool``: whole plans under the parity check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from expert_jobs import make_plan
from parity_jobs import checked_traffic, compare_resumed
from torch import nn
from torch.nn import functional

from jobs import context_of
from stagewright.engine.parallel.trainer import Trainer
from stagewright.engine.state.checkpoint import Checkpoint
from stagewright.engine.tensor.apply import apply_tensor_parallel, plan_tensor_parallel
from stagewright.engine.tensor.axis import TensorAxis
from stagewright.engine.tensor.divided_logits import DividedLogits, gather_logits
from stagewright.engine.tensor.vocabulary import VocabularyPlan, shard_vocabulary
from stagewright.errors import UsageError
from stagewright.spec.plan import OptimizerSpec
from stagewright.zoo.loss import next_token
from stagewright.zoo.model import Batch, Model

VOCABULARY, LENGTH, BATCH = 41, 8, 4  # a prime: shards differ in size


def make_module(name: str) -> nn.Module:
    """Build a tiny transformer with dropout; llama has a head of its own, the others are tied."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    common = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name in ("llama", "llama-mha"):  # grouped key heads, or as many as queries
        heads = 2 if name == "llama" else 4
        config = hf.LlamaConfig(**sizes, **common, num_key_value_heads=heads, use_cache=False, attention_dropout=0.2)
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
    """Check the parity of a plan; return the report, the bytes of the tensor axis, and the shapes of weights."""
    model = make_model(name, loss=loss)
    model.module.train(more.get("training", True))
    plan = make_plan(mesh, model, **{"vocab_parallel": True, **more})
    runner, report, sent = checked_traffic(rank, plan, model, mesh, lambda runner: runner.part.tensor_axis)
    return {
        "report": report,
        "bytes": sent,
        "rows": sorted({tuple(value.shape) for value in runner.part.module.parameters() if value.ndim == 2}),
    }


def _head() -> tuple[TensorAxis, nn.Linear, nn.Linear, torch.Tensor]:
    """Return the axis, a head, the same divided, and its input."""
    torch.manual_seed(0)
    whole = nn.Linear(6, VOCABULARY)
    axis = TensorAxis(dist.group.WORLD)
    divided = nn.Linear(6, VOCABULARY)
    divided.load_state_dict(whole.state_dict())
    holder = nn.ModuleDict({"head": divided})
    shard_vocabulary(holder, VocabularyPlan(size=VOCABULARY, embeddings=(), heads=("head",)), axis)
    return axis, whole, divided, torch.randn(4, 5, 6)


def losses(rank: int, **options: Any) -> dict[str, Any]:
    """Compare cross-entropy of divided logits with that of whole ones."""
    axis, whole, divided, x = _head()
    targets = torch.randint(0, VOCABULARY, (4, 5))
    targets[0, :2] = -100
    transposed, probabilities = options.pop("transposed", False), options.pop("probabilities", False)
    if options.pop("weight", False):
        options["weight"] = torch.linspace(0.5, 1.5, VOCABULARY)
    if options.get("ignore_index") == 5:
        targets = targets.masked_fill(targets == -100, 5)
    if probabilities:
        targets = torch.randn(4, 5, VOCABULARY).softmax(-1)
    values, gradients, gathered = [], [], False
    for head in (whole, divided):
        source = x.clone().requires_grad_()
        axis.payload_bytes = 0
        logits = head(source)
        pair = (logits.transpose(1, 2), targets) if transposed else (logits.flatten(0, 1), targets.flatten(0, 1))
        loss = functional.cross_entropy(*pair, **options)
        gathered = axis.payload_bytes > 3 * 4 * targets.shape[0] * targets.shape[1]
        loss.sum().backward()
        values.append(loss.detach())
        gradients.append(source.grad)
    return {
        "loss": float((values[0] - values[1]).abs().max()),
        "gradient": float((gradients[0] - gradients[1]).abs().max()),
        "gathers": gathered,
    }


def operations(rank: int) -> dict[str, Any]:
    """Apply operations to divided and whole logits; return which results are divided, and the worst error."""
    _, whole, divided, x = _head()
    bias = torch.linspace(-1, 1, VOCABULARY)
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "shift": lambda logits: logits[:, :-1],
        "cast": lambda logits: logits.double(),
        "scale": lambda logits: logits * 0.5,
        "cap": lambda logits: torch.tanh(logits / 3) * 3,
        "bias": lambda logits: logits + bias,
        "select": lambda logits: logits[:, -1],
        "transpose": lambda logits: logits.transpose(1, 2).contiguous(),
        "reshape": lambda logits: logits.reshape(-1, VOCABULARY).unsqueeze(0),
        "columns": lambda logits: logits[..., :7],
        "softmax": lambda logits: logits.softmax(-1),
        "flat": lambda logits: logits.reshape(-1),
        "mask": lambda logits: logits[torch.arange(4) % 2 == 0],
        "gather": lambda logits: logits.gather(-1, torch.arange(20).view(4, 5, 1)),
        "maximum": lambda logits: logits.max(-1).values,
    }
    found: dict[str, Any] = {"errors": 0.0}
    for name, call in calls.items():
        gradients = []
        for head in (whole, divided):
            source = x.clone().requires_grad_()
            result = call(head(source))
            found[name] = isinstance(result, DividedLogits)
            result = gather_logits(result)
            (result * torch.linspace(0, 1, result.numel()).view(result.shape)).sum().backward()
            gradients.append((source.grad, result.detach()))
        for first, second in zip(*gradients, strict=True):
            found["errors"] = max(found["errors"], float((first - second).abs().max()))
    return found


def errors(rank: int) -> tuple[str, ...]:
    """Return the messages of a token and a target that are outside of the vocabulary, and of an in-place change."""
    module = make_module("llama")
    apply_tensor_parallel(
        module, dist.group.WORLD, plan=plan_tensor_parallel(module, dist.get_world_size(), vocab_parallel=True)
    )
    ids = torch.full((1, 4), VOCABULARY - 1)
    messages = []
    for kwargs in ({"input_ids": ids + 1}, {"input_ids": ids, "labels": ids + 1}):
        try:
            module(**kwargs)
        except IndexError as error:
            messages.append(str(error))
    try:
        module(input_ids=ids).logits.mul_(2)
    except UsageError as error:
        messages.append(str(error))
    return tuple(messages)


def resumed(rank: int, folder: str, before: bool, after: bool) -> dict[str, Any]:
    """Train two steps, save, and train two more with and without a divided vocabulary; compare with training on."""
    path = Path(folder) / "checkpoint"

    def trainer(divided: bool) -> Trainer:
        model = make_model("gpt2")
        optimizer = OptimizerSpec(name="adamw", learning_rate=0.01)
        plan = make_plan("tensor=2", model, vocab_parallel=divided, optimizer=optimizer)
        return Trainer(plan, model, context_of(rank, "tensor=2"))

    batch = make_model("gpt2").example(BATCH)
    error = compare_resumed(trainer, batch, path, before, after)
    rows = Checkpoint.open(path).model_tensor("transformer.wte.weight").shape[0]
    return {"error": error, "rows": rows}
