"""The command that makes a run again, from its resolved plan alone.

`compare` can be told nearly everything that a plan says; what it can't (a codec, an optimiser, stages on workers of
one's own choice) is run from the plan's file.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

from stagewright.quantity import format_bytes, parse_bytes
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import OptimizerSpec, Plan

__all__ = ["again"]


def again(folder: RunFolder, plan: Plan) -> str:
    """What to type, in the folder where the run's own path is right."""
    file = folder.path / "plan.toml"
    if plan.task is not None:
        return _join(["stagewright", "train", plan.model.name, plan.task, "--plan", file, *_training(folder)])
    words = _compare(plan)
    if words is not None:
        return _join(words)
    return _join(["torchrun", "--nproc-per-node", plan.mesh.num_workers, "-m", "stagewright", "worker", file])


def _training(folder: RunFolder) -> list[object]:
    """Options of a training run that its plan does not have."""
    try:
        options = json.loads((folder.path / "training.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    given = {
        "--data-dir": options.get("data_dir"),
        "--tokenizer": options.get("tokenizer"),
        "--from": options.get("checkpoint"),
    }
    return [word for name, value in given.items() if value for word in (name, value)]


def _compare(plan: Plan) -> list[object] | None:
    """The options of `compare`, those that are as usual left out; None where it can't be told."""
    pipelined = plan.mesh.pipeline > 1
    usual = replace(plan, placement="auto", stages=None)
    told = (
        plan.optimizer == OptimizerSpec()
        and plan.clip is None
        and plan.model.padded is None
        and not plan.has_codecs
        and isinstance(plan.recompute, str)
        and plan.resolved_placement == usual.resolved_placement
        and plan.num_stages == usual.num_stages
        and plan.model.seed == plan.seed
        and (pipelined or (plan.microbatches == 1 and not plan.cuts))
        and (plan.memory_bytes is None or parse_bytes(_size(plan.memory_bytes)) == plan.memory_bytes)
    )
    if not told:
        return None
    words: list[object] = ["stagewright", "compare", plan.model.name, "--strategies", str(plan.mesh)]
    words += ["--devices", ",".join(plan.devices) if plan.devices else plan.mesh.num_workers]
    words += ["--batch", plan.batch, "--steps", plan.steps, "--warmup", plan.warmup]
    if pipelined:
        words += ["--microbatches", plan.microbatches, "--schedule", plan.schedule]
    for cut in plan.cuts:
        words += ["--cut", cut]
    given: dict[str, tuple[object, object]] = {
        "--policy": (plan.split, "optimal"),
        "--recompute": (plan.recompute, "none"),
        "--dtype": (plan.dtype, "float32"),
        "--batch-norm": (plan.batch_norm, "plain"),
        "--units": (plan.units, "auto"),
        "--seed": (plan.seed, 0),
        "--weights": (plan.model.weights, None),
        "--image-size": (plan.model.image_size, None),
        "--sequence-length": (plan.model.sequence_length, None),
        "--num-classes": (plan.model.num_classes, None),
        "--memory": (None if plan.memory_bytes is None else _size(plan.memory_bytes), None),
    }
    for name, (value, default) in given.items():
        if value != default:
            words += [name, value]
    words += ["--shard"] if plan.shard else []
    words += [] if plan.training else ["--inference"]
    return words


def _size(count: int) -> str:
    """As `--memory` reads it."""
    text = format_bytes(count).replace(" ", "")
    return text if parse_bytes(text) == count else str(count)


def _join(words: list[object]) -> str:
    return shlex.join(str(one) if not isinstance(one, Path) else one.as_posix() for one in words)
