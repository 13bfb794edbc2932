"""Worker functions for tests of the tensor axis, run by ``pool``; each compares with the baseline itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from full_model import full_gradients, full_state_dict, load_full_state_dict
from torch import nn

from stagewright.engine.tensor.apply import (
    TensorPlan,
    apply_tensor_parallel,
    plan_tensor_parallel,
    require_whole_regions,
)
from stagewright.engine.tensor.regions.region_plan import layer_sizes

BATCH, LENGTH = 4, 6


def build(name: str, *, dropout: float = 0.0, heads: int = 4) -> tuple[nn.Module, dict[str, Any]]:
    """Build a tiny model in train mode and a batch."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": heads}
    text = {**sizes, "vocab_size": 50, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    ids = {"input_ids": torch.randint(5, 50, (BATCH, LENGTH))}
    if name in ("deit", "vit"):
        kind = {"deit": "DeiT", "vit": "ViT"}[name]
        config = getattr(hf, f"{kind}Config")(**sizes, **drop, image_size=16, patch_size=8, num_labels=3)
        model = getattr(hf, f"{kind}ForImageClassification")(config)
        return model.train(), {"pixel_values": torch.randn(BATCH, 3, 16, 16)}
    if name in ("bert", "roberta"):
        kind = {"bert": "Bert", "roberta": "Roberta"}[name]
        config = getattr(hf, f"{kind}Config")(**text, **drop, num_labels=3)
        mask = (torch.arange(LENGTH) < torch.tensor([3, 6, 4, 5])[:, None]).long()
        return getattr(hf, f"{kind}ForSequenceClassification")(config).train(), {**ids, "attention_mask": mask}
    if name == "gpt2":
        rates = {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout}
        config = hf.GPT2Config(
            n_embd=32, n_layer=2, n_head=heads, vocab_size=50, n_positions=8, use_cache=False, bos_token_id=1,
            eos_token_id=2, **rates,
        )  # fmt: skip
        return hf.GPT2LMHeadModel(config).train(), ids
    if name == "distilbert":
        config = hf.DistilBertConfig(dim=32, hidden_dim=64, n_layers=2, n_heads=heads, vocab_size=50, dropout=0.0)
        config.attention_dropout = config.seq_classif_dropout = 0.0
        return hf.DistilBertForSequenceClassification(config).train(), ids
    if name == "modernbert":
        config = hf.ModernBertConfig(**text, cls_token_id=1, sep_token_id=2, num_labels=3, reference_compile=False)
        return hf.ModernBertForSequenceClassification(config).train(), ids
    if name == "pegasus-x":
        config = hf.PegasusXConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=heads,
            decoder_attention_heads=heads, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=50, dropout=0.0,
            attention_dropout=0.0, use_cache=False, block_size=2, num_global_tokens=2, max_position_embeddings=16,
        )  # fmt: skip
        return hf.PegasusXForConditionalGeneration(config).train(), {**ids, "decoder_input_ids": ids["input_ids"]}
    if name == "opt":
        text |= {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}
    if name.startswith("falcon"):  # falcon-7b: one key/value head; falcon-40b: groups; falcon-heads: one for each head
        grouped = {"new_decoder_architecture": name == "falcon-40b", "multi_query": name != "falcon-heads"}
        layout = {**grouped, "num_kv_heads": 2} if name == "falcon-40b" else grouped
        falcon = {key: value for key, value in text.items() if key != "intermediate_size"}
        return hf.FalconForCausalLM(hf.FalconConfig(**falcon, **layout)).train(), ids
    kind = {
        "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "opt": "OPT", "phi": "Phi",
        "gpt-neox": "GPTNeoX", "bloom": "Bloom", "phi3": "Phi3", "olmo2": "Olmo2",
    }[name]  # fmt: skip
    if name in ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2"):
        text |= {"num_key_value_heads": 2 if heads == 4 else heads}
    if name == "qwen3":
        text |= {"head_dim": 8}
    return getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**text)).train(), ids


def loss_of(output: Any) -> torch.Tensor:
    """Return a loss that weights every logit differently."""
    logits = output.logits
    weights = torch.linspace(0.5, 1.5, logits[0].numel()).view_as(logits[0])
    return (logits.square() * weights).mean()


def max_relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute error over the largest expected value."""
    return float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def worst(values: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest relative error of any tensor; names and missing tensors must agree.

    A gradient that is zero up to rounding (a key's bias shifts all scores equally) must be so on both sides.
    """
    assert list(values) == list(expected)
    assert [tensor is None for tensor in values.values()] == [tensor is None for tensor in expected.values()]
    pairs = [(values[name], tensor) for name, tensor in expected.items() if tensor is not None]
    threshold = 1e-6 * max(float(tensor.abs().max()) for _, tensor in pairs)
    is_zero = [float(tensor.abs().max()) <= threshold for _, tensor in pairs]
    assert is_zero == [float(tensor.abs().max()) <= threshold for tensor, _ in pairs]
    return max(max_relative_error(*pair) for pair, skip in zip(pairs, is_zero, strict=True) if not skip)


def perturb(model: nn.Module) -> None:
    """Perturb all parameters: initial biases of 0 and norms of 1 could hide a mistake."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def step(rank: int, name: str) -> dict[str, Any]:
    """Run one step with and without tensor parallelism; return the relative errors."""
    serial, batch = build(name)
    perturb(serial)
    split = copy.deepcopy(serial)
    state = {key: value.clone() for key, value in serial.state_dict().items()}
    axis = apply_tensor_parallel(split, dist.group.WORLD)
    plan = plan_tensor_parallel(serial, dist.get_world_size())
    held = sum(parameter.numel() for parameter in split.parameters())
    outputs, expected = split(**batch), serial(**batch)
    loss, expected_loss = loss_of(outputs), loss_of(expected)
    loss.backward()
    expected_loss.backward()
    training_bytes = axis.payload_bytes
    gradients = full_gradients(split)
    with torch.no_grad():
        split.eval(), serial.eval()
        axis.payload_bytes = 0
        evaluated = max_relative_error(split(**batch).logits, serial(**batch).logits)
    loaded = full_state_dict(split)
    same = list(loaded) == list(state) and all(torch.equal(loaded[key], state[key]) for key in state)
    load_full_state_dict(split, {key: value + 1 for key, value in state.items()})
    loads = all(torch.equal(value, state[key] + 1) for key, value in full_state_dict(split).items())
    return {
        "loss": max_relative_error(loss.detach(), expected_loss.detach()),
        "outputs": max_relative_error(outputs.logits.detach(), expected.logits.detach()),
        "gradients": worst(gradients, full_gradients(serial)),
        "evaluated": evaluated,
        "same_state": same,
        "loads": loads,
        "training_bytes": training_bytes,
        "evaluation_bytes": axis.payload_bytes,
        "regions": len(plan.regions),
        "parameters": (held, parameters_per_worker(serial, plan)),
        "planned_bytes": planned_bytes(serial, plan, tokens(batch, serial)),
    }


def parameters_per_worker(model: nn.Module, plan: TensorPlan) -> int:
    """Return the parameters of one worker: its share of the split ones, and all others."""
    columns = [model.get_submodule(name) for region in plan.regions for name in region.column_layers]
    split = sum(parameter.numel() for layer in columns for parameter in layer.parameters())
    split += sum(model.get_submodule(region.row_layer).get_parameter("weight").numel() for region in plan.regions)
    return sum(parameter.numel() for parameter in model.parameters()) - split + split // plan.num_workers


def planned_bytes(model: nn.Module, plan: TensorPlan, num_tokens: int) -> int:
    """Return the bytes of a training step's all-reduces: each region's output in forward, its input in backward."""
    outputs = [layer_sizes(model.get_submodule(region.row_layer))[1] for region in plan.regions]
    inputs = [layer_sizes(model.get_submodule(region.column_layers[0]))[0] for region in plan.regions]
    return num_tokens * 4 * (sum(outputs) + sum(inputs))


def tokens(batch: dict[str, Any], model: nn.Module) -> int:
    """Return batch × sequence inside the blocks: for an image 4 patches and the class (and distillation) token."""
    if "input_ids" in batch:
        return BATCH * LENGTH
    return BATCH * (4 + (2 if "DeiT" in type(model).__name__ else 1))


def trained(rank: int, name: str, steps: int) -> float:
    """Run several optimizer steps with and without tensor parallelism; return the error of the weights."""
    serial, batch = build(name)
    split = copy.deepcopy(serial)
    apply_tensor_parallel(split, dist.group.WORLD)
    for model in (serial, split):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model(**batch)).backward()
            nn.utils.clip_grad_norm_([model.get_input_embeddings().weight], 1.0)
            optimizer.step()
    return worst(full_state_dict(split), dict(serial.state_dict()))


def dropout(rank: int, name: str, attention: str, passes: int = 2) -> dict[str, float]:
    """Compare gradients under dropout from the same seed, and the next random number of both runs."""
    serial, batch = build(name, dropout=0.3)
    serial.set_attn_implementation(attention)  # type: ignore[operator]
    split = copy.deepcopy(serial)
    apply_tensor_parallel(split, dist.group.WORLD)
    drawn = []
    for model in (serial, split):
        model.train()
        torch.manual_seed(5)
        for _ in range(passes):
            loss_of(model(**batch)).backward()
        drawn.append(float(torch.rand(())))
    gradients = {key: value.grad for key, value in serial.named_parameters(remove_duplicate=False)}
    split.eval()
    serial.eval()
    evaluated = abs(float(loss_of(split(**batch)).detach()) - float(loss_of(serial(**batch)).detach()))
    return {
        "gradients": worst(full_gradients(split), gradients),
        "drawn": abs(drawn[0] - drawn[1]),
        "evaluated": evaluated,
    }


def recomputed(rank: int, name: str) -> float:
    """Compare gradients with and without activation checkpointing of every block, under dropout."""
    from torch.utils.checkpoint import checkpoint

    gradients = []
    for recompute in (False, True):
        model, batch = build(name, dropout=0.2)
        apply_tensor_parallel(model, dist.group.WORLD)
        if recompute:
            for module in model.modules():
                if type(module).__name__.endswith(("Layer", "Block")):
                    module.forward = _checkpointed(module.forward, checkpoint)  # type: ignore[method-assign]
        torch.manual_seed(3)
        loss_of(model(**batch)).backward()
        gradients.append(full_gradients(model))
    return worst(gradients[1], gradients[0])


def _checkpointed(forward: Any, checkpoint: Any) -> Any:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def half(rank: int, name: str) -> float:
    """Compare bfloat16 gradients under tensor parallelism with float32 gradients of the baseline."""
    serial, batch = build(name)
    split = copy.deepcopy(serial).bfloat16()
    apply_tensor_parallel(split, dist.group.WORLD)
    loss_of(split(**batch)).backward()
    loss_of(serial(**batch)).backward()
    gradients = {key: None if value is None else value.float() for key, value in full_gradients(split).items()}
    return worst(gradients, full_gradients(serial))


def stage(rank: int, name: str, shard: bool) -> dict[str, float]:
    """Compare a captured stage under tensor parallelism or FSDP with the baseline."""
    from stagewright.engine.data.wrap import wrap_data_parallel
    from stagewright.graph import capture

    serial, batch = build(name)
    model = copy.deepcopy(serial)
    graph = capture(model, (), batch)
    plan = plan_tensor_parallel(model, 2)
    require_whole_regions(plan, [call.target for call in graph.calls])
    stage = graph.stage(0, len(graph.calls) - 1)
    group = dist.group.WORLD
    if shard:  # both replicas run the same batch, each with half the weight
        replica = wrap_data_parallel(stage, group, shard=True, units=[graph.module(call) for call in graph.calls])
        output = graph.unflatten(replica(*graph.flatten((), batch)))
        (loss_of(output) / 2).backward()
        replica.synchronize(0.5)
    else:
        apply_tensor_parallel(model, group, plan=plan)
        output = graph.unflatten(stage(*graph.flatten((), batch)))
        loss_of(output).backward()
    expected = serial(**batch)
    loss_of(expected).backward()
    expected_gradients, gradients = full_gradients(serial), full_gradients(stage)
    return {
        "outputs": max_relative_error(output.logits.detach(), expected.logits.detach()),
        "gradients": worst({key: gradients.get(key) for key in expected_gradients}, expected_gradients),
    }
