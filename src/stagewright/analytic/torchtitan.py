"""A torchtitan job file as a layout, and layouts of the same devices and batch that would be faster.

Read are [model], [training], [parallelism] and [activation_checkpoint] of torchtitan 0.2, with its defaults; the rest
of the file does not change what formulas see.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from stagewright.analytic.forecast import AnalyticForecast, forecast_layout
from stagewright.analytic.layout import Layout, RecomputeMode
from stagewright.analytic.models import known_models
from stagewright.analytic.shape import TransformerShape
from stagewright.cluster.cluster import Cluster
from stagewright.errors import UsageError
from stagewright.files.toml_table import load_toml

_RECOMPUTE: dict[str, RecomputeMode] = {"none": "none", "selective": "selective", "full": "full"}
_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchtitanJob:
    """What a job file says about a step."""

    layout: Layout
    model: str | None
    """Name of a known model; None if the file's is unknown."""
    sequence_length: int


def read_torchtitan(path: Path, num_devices: int) -> TorchtitanJob:
    """Read a job file for a number of devices; a shard degree of -1 takes the rest of them."""
    table = load_toml(path)
    model, training, axes, saving = (
        _section(table, name, path) for name in ("model", "training", "parallelism", "activation_checkpoint")
    )
    tensor = _count(axes, "tensor_parallel_degree", 1, path)
    pipeline = _count(axes, "pipeline_parallel_degree", 1, path)
    context = _count(axes, "context_parallel_degree", 1, path)
    replicas = _count(axes, "data_parallel_replicate_degree", 1, path)
    shards = _count(axes, "data_parallel_shard_degree", -1, path)
    if shards == -1:
        shards, rest = divmod(num_devices, tensor * pipeline * context * replicas)
        if rest or not shards:
            raise UsageError(
                f"{path}: {tensor} × {pipeline} × {context} × {replicas} ranks (tensor, pipeline, context, replicate) "
                f"do not divide {num_devices} devices; give the cluster that the job runs on"
            )
    data = replicas * shards
    local = _count(training, "local_batch_size", 8, path)
    total = _count(training, "global_batch_size", -1, path)
    total = local * data if total == -1 else total
    if total % (local * data):
        raise UsageError(
            f"{path}: global_batch_size = {total} is not a multiple of local_batch_size × data parallel ranks = "
            f"{local} × {data}"
        )
    size = _count(axes, "pipeline_parallel_microbatch_size", 1, path) if pipeline > 1 else local
    mode = str(saving.get("mode", "selective"))
    if mode not in _RECOMPUTE:
        mode = "selective"
    precision = str(training.get("mixed_precision_param", "bfloat16"))
    layout = Layout(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        context_attention="ring",  # torchtitan has no other
        expert=_count(axes, "expert_parallel_degree", 1, path),
        microbatch=size,
        microbatches=total // (data * size),
        zero=3 if shards > 1 else 0,
        sequence_parallel=tensor > 1,
        recompute=_RECOMPUTE[mode],
        precision="float32" if precision == "float32" else "bfloat16",
        schedule="gpipe" if axes.get("pipeline_parallel_schedule") == "GPipe" else "1f1b",
    )
    return TorchtitanJob(
        layout=layout,
        model=_known_model(f"{model.get('name', '')}{model.get('flavor', '')}"),
        sequence_length=_count(training, "seq_len", 2048, path),
    )


def better_layouts(shape: TransformerShape, layout: Layout, cluster: Cluster) -> list[tuple[Layout, AnalyticForecast]]:
    """Return layouts of the same devices and global batch that fit and are forecast to be faster, fastest first."""
    current = forecast_layout(shape, layout, cluster)
    limit_s = current.step_s if current.fits else float("inf")
    found: list[tuple[Layout, AnalyticForecast]] = []
    per_host = cluster.devices[0].count
    for tensor, pipeline, size, recompute in product(_SIZES, _SIZES, _SIZES, _RECOMPUTE.values()):
        ranks = tensor * pipeline * layout.context
        if tensor > per_host or layout.num_devices % ranks or shape.num_heads % tensor:
            continue
        data = layout.num_devices // ranks
        if layout.batch % (data * size) or (pipeline > 1 and layout.batch // (data * size) < pipeline):
            continue
        changed = replace(
            layout,
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            microbatch=size,
            microbatches=layout.batch // (data * size),
            recompute=recompute,
            sequence_parallel=tensor > 1,
            layers=(),
        )
        try:
            forecast = forecast_layout(shape, changed, cluster)
        except UsageError:
            continue  # this model or cluster can't be divided so
        if forecast.fits and forecast.step_s < limit_s and changed != layout:
            found.append((changed, forecast))
    return sorted(found, key=lambda item: item[1].step_s)


def torchtitan_changes(before: Layout, after: Layout) -> str:
    """Return the keys of the job file that lead from one layout to another."""
    local = after.microbatch if after.pipeline == 1 else after.microbatch * after.microbatches
    wanted = {
        "tensor_parallel_degree": (before.tensor, after.tensor),
        "pipeline_parallel_degree": (before.pipeline, after.pipeline),
        "pipeline_parallel_microbatch_size": (
            before.microbatch if before.pipeline > 1 else None,
            after.microbatch if after.pipeline > 1 else None,
        ),
        "data_parallel_shard_degree": (before.data, after.data),
        "local_batch_size": (
            before.microbatch if before.pipeline == 1 else before.microbatch * before.microbatches,
            local,
        ),
        "activation_checkpoint.mode": (before.recompute, after.recompute),
    }
    return ", ".join(f"{key} = {new}" for key, (old, new) in wanted.items() if new is not None and old != new)


def _section(table: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    section = table.get(name, {})
    if not isinstance(section, dict):
        raise UsageError(f"{path}: {name} must be a table, [{name}]")
    return section


def _count(section: dict[str, Any], name: str, default: int, path: Path) -> int:
    value = section.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and not (value == -1 and default == -1)):
        raise UsageError(f"{path}: {name} = {value!r}, but must be a whole number of at least 1")
    return value


def _known_model(name: str) -> str | None:
    """Return the known model whose name has the same letters and digits: llama3 with flavor 8B is llama-3-8b."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((known for known in known_models() if re.sub(r"[^a-z0-9]", "", known) == letters), None)
