"""A plan as torchtitan's job file (TOML, torchtitan 0.2)."""

from __future__ import annotations

import re

from stagewright.errors import UsageError
from stagewright.exporters.config import ExportedConfig, ExportInput, common_omissions
from stagewright.files.toml_table import to_toml
from stagewright.schedules.action_order import SEARCHED
from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan import Plan
from stagewright.spec.searched_order import require_order

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
    "searched": "PipelineScheduleMulti",
}
"""Our names of schedules → those of torch.distributed.pipelining."""

# Names of Hugging Face's Llama-like modules → torchtitan's.
_MODULES = (
    (re.compile(r"^(?:model\.)?embed_tokens$"), "tok_embeddings"),
    (re.compile(r"^(?:model\.)?layers\.(\d+)$"), r"layers.\1"),
    (re.compile(r"^(?:model\.)?norm$"), "norm"),
    (re.compile(r"^lm_head$"), "output"),
)
_IGNORED = re.compile(r"^(?:model\.)?rotary_emb$")


def export_torchtitan(source: ExportInput) -> ExportedConfig:
    """Return the job file, with the modules of each pipeline stage."""
    plan, mesh = source.plan, source.plan.mesh
    size = source.microbatch_size
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": mesh.data // plan.num_shards if plan.shard else mesh.data,
        "data_parallel_shard_degree": plan.num_shards if plan.shard else 1,
        "tensor_parallel_degree": mesh.tensor,
        "pipeline_parallel_degree": mesh.pipeline,
        **({"expert_parallel_degree": mesh.expert} if mesh.expert > 1 else {}),
        **({"context_parallel_degree": mesh.context} if mesh.context > 1 else {}),
    }
    omitted, files = common_omissions(plan), dict[str, str]()
    if mesh.context > 1 and plan.context_attention != "ring":
        omitted.append("Context parallelism is a ring: torchtitan has no all-to-alls of heads.")
    if plan.shard and mesh.pipeline > 1:
        parallelism["fsdp_reshard_after_forward"] = "never" if plan.gathers_once else "always"
    if mesh.pipeline > 1:
        if plan.schedule == SEARCHED:
            files["schedule.csv"] = _schedule_file(plan)
            parallelism["pipeline_parallel_schedule_csv"] = "schedule.csv"
        parallelism |= {
            "pipeline_parallel_schedule": _SCHEDULES[plan.schedule],
            "pipeline_parallel_microbatch_size": size,
            "module_fqns_per_model_part": [list(names) for names in _module_names(source)],
        }
        omitted.append("torchtitan orders ranks with pipeline stages outermost; this plan has them innermost.")
        if plan.schedule == "dualpipev" and plan.recompute != "none":
            omitted.append("torchtitan's DualPipeV does not support activation checkpointing.")
    elif plan.microbatches > 1:
        omitted.append(
            "Without a pipeline, micro-batches become gradient accumulation: local_batch_size is one of them."
        )
    training: dict[str, object] = {
        "local_batch_size": size * plan.microbatches if mesh.pipeline > 1 else size,
        "global_batch_size": plan.batch,
        "steps": plan.steps,
        "dtype": plan.dtype,
    }
    if plan.model.sequence_length is not None:
        training["seq_len"] = plan.model.sequence_length
    if plan.clip is not None:
        training["max_norm"] = plan.clip
    training["mixed_precision_param"] = "float32" if plan.precision == "float32" else "bfloat16"
    if plan.precision == "fp16-mixed":
        omitted.append("Mixed precision is bfloat16: torchtitan has no float16.")
    if plan.compile != "none":
        omitted.append("Set [compile] enable = true: torchtitan compiles each transformer block.")
    modes = {"none": "none", "attention": "selective"}
    if plan.recompute == "attention":
        omitted.append("Recomputation is selective by operator: torchtitan does not recompute attention alone.")
    if isinstance(plan.recompute, tuple) or plan.recompute == "except-last":
        omitted.append("Activation checkpointing is on for all blocks: torchtitan has no setting for each stage.")
    optimizer: dict[str, object] = {"lr": plan.optimizer.learning_rate, "weight_decay": plan.optimizer.weight_decay}
    optimizer_name = OPTIMIZERS[plan.optimizer.name].torch_name
    if optimizer_name in ("Adam", "AdamW"):
        optimizer = {"name": optimizer_name, **optimizer}
    else:
        omitted.append(f"The optimizer is AdamW: torchtitan has no {optimizer_name}.")
    table = {
        "job": {"description": f"{plan.model.name}, {mesh}"},
        "training": training,
        "optimizer": optimizer,
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": modes.get(str(plan.recompute), "full")},
    }
    omitted.append("Set [model] and the tokenizer yourself: torchtitan has model definitions of its own.")
    return ExportedConfig(
        tool="torchtitan 0.2",
        files={"torchtitan.toml": to_toml(table), **files},
        command=f"torchrun --nproc-per-node {mesh.num_workers} -m torchtitan.train --job.config_file torchtitan.toml",
        omitted=tuple(omitted),
    )


def _schedule_file(plan: Plan) -> str:
    """Return the order of a searched schedule in the format of torch: a row of actions for each rank."""
    if plan.resolved_placement == "v":
        raise UsageError(
            f"the plan places its {plan.num_stages} stages as a V, which torchtitan's schedule files can't express: "
            'search the order with placement = "in-order", or use schedule = "zbv"'
        )
    require_order(plan)
    return "".join(",".join(line.split()) + "\n" for line in plan.actions)


def _module_names(source: ExportInput) -> list[list[str]]:
    """Translate the names of Llama-like models; others keep theirs."""
    return [[_translate(name) for name in names if not _IGNORED.match(name)] for names in source.stages]


def _translate(name: str) -> str:
    return next((pattern.sub(target, name) for pattern, target in _MODULES if pattern.match(name)), name)
