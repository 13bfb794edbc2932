"""A plan as a configuration of Accelerate or of DeepSpeed, which have data and tensor parallelism."""

from __future__ import annotations

import json

from stagewright.errors import UsageError
from stagewright.exporters.config import ExportedConfig, ExportInput, common_omissions
from stagewright.spec.optimizers import OPTIMIZERS

_WHOLE_SEQUENCE = "Sequences are not divided: sequence_parallel = true has no counterpart."


def export_accelerate(source: ExportInput) -> ExportedConfig:
    """Return the file for ``accelerate launch``: a ParallelismConfig, and the FSDP plug-in with FSDP2."""
    plan, mesh = source.plan, source.plan.mesh
    _refuse_pipeline(source, "Accelerate")
    size = source.microbatch_size
    uses_fsdp = plan.shard or mesh.tensor > 1
    values: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if uses_fsdp else "MULTI_GPU" if mesh.data > 1 else "NO",
        "mixed_precision": {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}.get(plan.precision, "no"),
        "num_machines": 1,
        "num_processes": mesh.num_workers,
    }
    lines = [f"{key}: {_yaml(value)}" for key, value in values.items()]
    omitted = common_omissions(plan)
    if plan.sequence_parallel:
        omitted.append(_WHOLE_SEQUENCE)
    if uses_fsdp:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            "  fsdp_reshard_after_forward: true",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
            f"  fsdp_activation_checkpointing: {_yaml(plan.recompute != 'none')}",
            "parallelism_config:",
            f"  parallelism_config_dp_replicate_size: {mesh.data // plan.num_shards if plan.shard else mesh.data}",
            f"  parallelism_config_dp_shard_size: {plan.num_shards if plan.shard else 1}",
            f"  parallelism_config_tp_size: {mesh.tensor}",
            "  parallelism_config_cp_size: 1",
        ]
    elif plan.recompute != "none":
        omitted.append("Enable activation checkpointing in the script: model.gradient_checkpointing_enable().")
    omitted.append(
        f"In the script: Accelerator(gradient_accumulation_steps={plan.microbatches}), DataLoader(batch_size={size})"
        + (f", accelerator.clip_grad_norm_(parameters, {plan.clip})" if plan.clip is not None else "")
        + "."
    )
    if plan.dtype == "bfloat16":
        omitted.append("Load the model in bfloat16; mixed_precision: bf16 would keep float32 parameters.")
    return ExportedConfig(
        tool="Accelerate 1.15",
        files={"accelerate.yaml": "\n".join(lines) + "\n"},
        command="accelerate launch --config_file accelerate.yaml train.py",
        omitted=tuple(omitted),
    )


def export_deepspeed(source: ExportInput) -> ExportedConfig:
    """Return DeepSpeed's JSON: the ZeRO stage (3 for FSDP), gradient accumulation for micro-batches."""
    plan, mesh = source.plan, source.plan.mesh
    _refuse_pipeline(source, "DeepSpeed's JSON")
    optimizer = plan.optimizer
    parameters: dict[str, object] = {"lr": optimizer.learning_rate, "weight_decay": optimizer.weight_decay}
    rule = OPTIMIZERS[optimizer.name]
    if rule.has_momentum:
        parameters["momentum"] = optimizer.momentum
    config: dict[str, object] = {
        "train_batch_size": plan.batch,
        "train_micro_batch_size_per_gpu": source.microbatch_size,
        "gradient_accumulation_steps": plan.microbatches,
        "optimizer": {"type": rule.torch_name, "params": parameters},
        "zero_optimization": {"stage": 3 if plan.shard else plan.zero},
        "bf16": {"enabled": plan.precision in ("bf16", "bf16-mixed")},
        "fp16": {"enabled": plan.precision == "fp16-mixed"},
    }
    if plan.clip is not None:
        config["gradient_clipping"] = plan.clip
    if mesh.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": mesh.tensor}
    omitted = common_omissions(plan)
    if plan.sequence_parallel:
        omitted.append(_WHOLE_SEQUENCE)
    if plan.recompute != "none":
        omitted.append("Enable activation checkpointing in the script: model.gradient_checkpointing_enable().")
    if plan.dtype == "bfloat16":
        omitted.append("DeepSpeed's bf16 keeps float32 master weights; this plan's parameters are bfloat16 alone.")
    return ExportedConfig(
        tool="DeepSpeed 0.19",
        files={"deepspeed.json": json.dumps(config, indent=2) + "\n"},
        command=f"deepspeed --num_gpus {mesh.num_workers} train.py --deepspeed --deepspeed_config deepspeed.json",
        omitted=tuple(omitted),
    )


def _refuse_pipeline(source: ExportInput, tool: str) -> None:
    for axis, size in (("expert", source.plan.mesh.expert), ("context", source.plan.mesh.context)):
        if size > 1:
            raise UsageError(
                f"the plan has {axis} = {size}, which is not exported to {tool}; export it to torchtitan or megatron"
            )
    if source.plan.mesh.pipeline > 1:
        raise UsageError(
            f"the plan has {source.plan.mesh.pipeline} pipeline stages, which {tool} can't express; export it to "
            "torchtitan, megatron or torchrun, or search for a plan without a pipeline"
        )


def _yaml(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)
