"""A plan as command-line arguments of Megatron-LM, with its pipeline layout.

stages of 3 layers on 2 workers      --pipeline-model-parallel-layout E,t*2|t,L
E embedding   t transformer layer   L loss; two stages on each of 2 workers give four parts
"""

from __future__ import annotations

from stagewright.errors import UsageError
from stagewright.exporters.config import ExportedConfig, ExportInput, common_omissions
from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan import Plan


def export_megatron(source: ExportInput) -> ExportedConfig:
    """Return Megatron-LM's arguments."""
    plan, mesh = source.plan, source.plan.mesh
    size = source.microbatch_size
    arguments = {
        "tensor-model-parallel-size": mesh.tensor,
        "pipeline-model-parallel-size": mesh.pipeline,
        **({"expert-model-parallel-size": mesh.expert} if mesh.expert > 1 else {}),
        **_context_arguments(plan),
        "micro-batch-size": size,
        "global-batch-size": plan.batch,
        "train-iters": plan.steps,
        "lr": plan.optimizer.learning_rate,
        "weight-decay": plan.optimizer.weight_decay,
        "optimizer": "sgd" if plan.optimizer.name == "sgd" else "adam",
        "clip-grad": plan.clip if plan.clip is not None else 0.0,
        "seed": plan.seed or 1,
    }
    flags = {"float32": [], "fp16-mixed": ["fp16"]}.get(plan.precision, ["bf16"])
    flags += ["sequence-parallel"] if plan.sequence_parallel else []
    omitted = common_omissions(plan)
    optimizer_name = OPTIMIZERS[plan.optimizer.name].torch_name
    if optimizer_name not in ("SGD", "Adam", "AdamW"):
        omitted.append(f"The optimizer is Adam: Megatron-LM has no {optimizer_name}.")
    layers = source.layers
    arguments["num-layers"] = sum(map(len, layers))
    if mesh.pipeline > 1:
        if plan.schedule not in ("1f1b", "interleaved"):
            omitted.append(f"The schedule is 1F1B, or interleaved 1F1B: Megatron-LM has no {plan.schedule}.")
        if plan.resolved_placement == "v":
            raise UsageError(
                f"the schedule {plan.schedule!r} places stages as a V, which Megatron-LM's layout can't express; "
                "use --schedules 1f1b,interleaved"
            )
        arguments["pipeline-model-parallel-layout"] = layout(layers)
    if plan.model.sequence_length is not None:
        arguments["seq-length"] = plan.model.sequence_length
        arguments["max-position-embeddings"] = plan.model.sequence_length
    if plan.recompute == "attention":
        arguments |= {"recompute-granularity": "selective"}  # attention between its linear layers
    elif plan.recompute != "none":
        arguments |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
        if plan.recompute != "always":
            omitted.append("Activation checkpointing is on for all blocks: Megatron-LM has no setting for each stage.")
    if plan.shard:
        if mesh.pipeline > 1 or mesh.tensor > 1:
            arguments["data-parallel-sharding-strategy"] = "optim_grads_params"
            flags += ["use-megatron-fsdp", "use-distributed-optimizer"]
        else:
            flags += ["use-torch-fsdp2", "no-gradient-accumulation-fusion", "untie-embeddings-and-output-weights"]
    elif mesh.data > 1:
        flags += ["overlap-grad-reduce", *(["use-distributed-optimizer"] if plan.zero else [])]
        if plan.zero == 2:
            omitted.append("Megatron-LM's distributed optimizer is ZeRO-1: gradients are not sharded.")
    if mesh.data * mesh.pipeline * mesh.tensor > 1:
        omitted.append("Megatron-LM orders ranks tensor, data, pipeline; this plan has pipeline stages innermost.")
    omitted.append("Set the model's width, heads, vocabulary and data yourself.")
    lines = [f"--{name} {value}" for name, value in arguments.items()] + [f"--{name}" for name in flags]
    return ExportedConfig(
        tool="Megatron-LM core 0.20",
        files={"megatron_args.txt": "\n".join(lines) + "\n"},
        command=f"torchrun --nproc-per-node {mesh.num_workers} pretrain_gpt.py $(cat megatron_args.txt)",
        omitted=tuple(omitted),
    )


def _context_arguments(plan: Plan) -> dict[str, object]:
    if plan.mesh.context == 1:
        return {}
    exchange = "p2p" if plan.context_attention == "ring" else "a2a"
    return {"context-parallel-size": plan.mesh.context, "cp-comm-type": exchange}


def layout(layers: tuple[tuple[int, ...], ...]) -> str:
    """Return Megatron's layout of stages: ``E,t*2|t,L``."""
    parts = [f"t*{len(stage)}" if len(stage) > 1 else "t" * len(stage) for stage in layers]
    parts[0] = f"E,{parts[0]}" if parts[0] else "E"
    parts[-1] = f"{parts[-1]},L" if parts[-1] else "L"
    return "|".join(parts)
