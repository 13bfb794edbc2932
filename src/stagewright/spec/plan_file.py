"""The plan file format: TOML, lossless in both directions.

    batch = 32                       [model]                     [mesh]
    microbatches = 4                 name = "deit-small"         pipeline = 2
    schedule = "1f1b"                                            [optimizer]
    memory = "2GiB"                                              name = "adamw"

Only `batch` and the model's name are required. `write_plan` writes every key, so the plan still runs the same way after
a default changes. The mesh also accepts `dp`, `tp`, `pp`, `ep` and `cp`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.files.atomic import save_text
from stagewright.files.toml_table import (
    Reader,
    choice,
    either,
    flag,
    integer,
    list_of,
    load_toml,
    number,
    read_table,
    size,
    text,
    to_toml,
    write_size,
)
from stagewright.schedules.rules import PLACEMENTS, SCHEDULES
from stagewright.spec.activation_checkpointing import OFFLOADS, check_recompute_mode
from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan import AXIS_ALIASES, Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.spec.plan_rules import (
    BASELINES,
    BATCH_NORMS,
    COMPILES,
    CONTEXT_ATTENTIONS,
    FSDP_GATHERS,
    LR_SCHEDULES,
    PRECISIONS,
    check_plan,
)


def _recompute_mode(value: object, where: str) -> str:
    check_recompute_mode(text(value, where), where)
    return str(value)


_MODEL: dict[str, Reader] = {
    "name": text,
    "weights": text,
    "image_size": integer,
    "sequence_length": integer,
    "num_classes": integer,
    "padded": flag,
    "seed": integer,
}
_MESH: dict[str, Reader] = {
    "data": integer,
    "tensor": lambda value, where: (list_of(integer) if isinstance(value, list | tuple) else integer)(value, where),
    "pipeline": integer,
    "expert": integer,
    "context": integer,
}
_OPTIMIZER: dict[str, Reader] = {
    "name": choice(*OPTIMIZERS),
    "learning_rate": number,
    "momentum": number,
    "weight_decay": number,
    "lr_schedule": choice(*LR_SCHEDULES),
    "lr_warmup_steps": integer,
}
_PLAN: dict[str, Reader] = {
    "batch": integer,
    "microbatches": integer,
    "schedule": choice(*SCHEDULES),
    "actions": list_of(text),
    "split": text,
    "cuts": list_of(text),
    "units": text,
    "placement": choice("auto", *PLACEMENTS),
    "stages": integer,
    "recompute": either(_recompute_mode, list_of(either(text, flag))),
    "offload": either(choice(*OFFLOADS), list_of(text)),
    "shard": flag,
    "fsdp_shards": integer,
    "fsdp_gather": choice(*FSDP_GATHERS),
    "zero": integer,
    "vocab_parallel": flag,
    "sequence_parallel": flag,
    "context_attention": choice(*CONTEXT_ATTENTIONS),
    "codec": either(text, list_of(text)),
    "codec_backward": either(text, list_of(text)),
    "precision": choice(*PRECISIONS),
    "compile": choice(*COMPILES),
    "optimizer_in_backward": flag,
    "cuda_graphs": flag,
    "batch_norm": choice(*BATCH_NORMS),
    "training": flag,
    "devices": list_of(text),
    "speeds": either(choice("measured"), list_of(number)),
    "memory": size,
    "seed": integer,
    "steps": integer,
    "warmup": integer,
    "baseline": choice(*BASELINES),
    "task": text,
    "epochs": integer,
    "clip": number,
    "checkpoint_every": integer,
    "model": lambda value, where: ModelSpec(**read_table(value, _MODEL, where, required=['name = "digits-vit"'])),
    "mesh": lambda value, where: _read_mesh(value, where),
    "optimizer": lambda value, where: OptimizerSpec(**read_table(value, _OPTIMIZER, where)),
}


def read_plan(path: str | Path) -> Plan:
    """Read and check a plan file."""
    if not Path(path).exists():
        if Path(path).suffix == ".toml":
            raise UsageError(f"no plan {path}; create it with `stagewright plan MODEL -o {shlex.quote(str(path))}`")
        model = shlex.quote(str(path))
        raise UsageError(f"no plan file {path}; for a model, write one first: `stagewright plan {model} -o plan.toml`")
    return plan_from_table(load_toml(path), str(path))


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan with every key, atomically."""
    save_text(plan_to_toml(plan), path)


def plan_to_toml(plan: Plan) -> str:
    """Format the plan as TOML text."""
    return to_toml(plan_to_table(plan))


def plan_from_table(table: Mapping[str, Any], where: str = "the plan") -> Plan:
    """Build and check a plan from a TOML or JSON table; error messages start with `where`."""
    values = read_table(_without_dtype(table), _PLAN, where, required=["batch = 32", "[model]"])
    if "memory" in values:
        values["memory_bytes"] = values.pop("memory")
    plan = Plan(**values)
    try:
        check_plan(plan)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return plan


def _without_dtype(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read `dtype`, which plans had before `precision`."""
    known = {"float32": "float32", "bfloat16": "bf16"}
    if "precision" in table or table.get("dtype") not in known:
        return table
    return {"precision": known[table["dtype"]], **{key: value for key, value in table.items() if key != "dtype"}}


def plan_to_table(plan: Plan) -> dict[str, Any]:
    """Convert the plan to a table, without keys that are None."""
    table: dict[str, Any] = {}
    for key in _PLAN:
        value: Any
        if key == "memory":
            value = None if plan.memory_bytes is None else write_size(plan.memory_bytes)
        elif key in ("model", "mesh", "optimizer"):
            value = {name: entry for name, entry in asdict(getattr(plan, key)).items() if entry is not None}
            if degrees := value.pop("tensor_degrees", ()):
                value["tensor"] = list(degrees)
        else:
            value = getattr(plan, key)
        if value is not None:
            table[key] = list(value) if isinstance(value, tuple) else value
    return table


def _read_mesh(value: object, where: str) -> Mesh:
    if isinstance(value, Mapping):
        names = [AXIS_ALIASES.get(key, key) for key in value]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"{where}: {repeated} is given twice")
        value = dict(zip(names, value.values(), strict=True))
    sizes = read_table(value, _MESH, where)
    degrees = sizes.get("tensor")
    if isinstance(degrees, tuple):
        sizes |= {"tensor": max(degrees, default=1), "tensor_degrees": degrees}
        sizes.setdefault("pipeline", len(degrees))
    try:
        return Mesh(**sizes)
    except UsageError as error:
        raise UsageError(f"{where.rpartition(': ')[0]}: {error}") from None
