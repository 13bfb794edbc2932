"""The command that reproduces a run, from its resolved plan alone.

Options of `compare` express most plans; others (codecs, another learning rate, custom placement) run from their file.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from stagewright.files.json_values import read_object_or_empty
from stagewright.quantity import format_bytes, parse_bytes
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.optimizers import DEFAULT_OPTIMIZER
from stagewright.spec.plan import Offload, OptimizerSpec, Plan, Recompute
from stagewright.spec.unequal_devices import given_speeds
from stagewright.trace.attached import is_attached, read_marker


def reproduce_command(folder: RunFolder, plan: Plan) -> str:
    """Return the command; the run folder's path in it is as given."""
    file = folder.path / "plan.toml"
    if is_attached(folder):
        return _join(["stagewright", "attach", "--", *read_marker(folder).get("command", ["python"])])
    if plan.task is not None:
        return _join(["stagewright", "train", plan.model.name, plan.task, "--plan", file, *_training_options(folder)])
    words = _compare_words(plan)
    if words is not None:
        return _join(words)
    return _join(["stagewright", "run", file])


def _training_options(folder: RunFolder) -> list[object]:
    """Return options of a training run that are not part of its plan."""
    options = read_object_or_empty(folder.path / "training.json")
    names = {"--data-dir": "data_dir", "--tokenizer": "tokenizer", "--from": "checkpoint"}
    return [word for name, key in names.items() if options.get(key) for word in (name, options[key])]


def _compare_words(plan: Plan) -> list[object] | None:
    """Return `compare` with the options that are not defaults; None where no options express the plan."""
    pipelined = plan.mesh.pipeline > 1
    default = replace(plan, placement="auto", stages=None)
    is_expressible = (
        plan.optimizer == OptimizerSpec(name=plan.optimizer.name)
        and plan.clip is None
        and plan.model.padded is None
        and not plan.has_codecs
        and (isinstance(plan.recompute, str) or any(isinstance(entry, str) for entry in plan.recompute))
        and plan.resolved_placement == default.resolved_placement
        and plan.num_stages == default.num_stages
        and plan.model.seed == plan.seed
        and (pipelined or (plan.microbatches == 1 and not plan.cuts))
        and (plan.memory_bytes is None or parse_bytes(_format_size(plan.memory_bytes)) == plan.memory_bytes)
    )
    if not is_expressible:
        return None
    words: list[object] = ["stagewright", "compare", plan.model.name, "--strategy", str(plan.mesh)]
    words += ["--devices", ",".join(plan.devices) if plan.devices else plan.mesh.num_workers]
    words += ["--batch", plan.batch, "--steps", plan.steps, "--warmup", plan.warmup]
    if pipelined:
        words += ["--microbatches", plan.microbatches, "--schedule", plan.schedule]
    for cut in plan.cuts:
        words += ["--cut", cut]
    given: dict[str, tuple[object, object]] = {
        "--policy": (plan.split, "optimal"),
        "--optimizer": (plan.optimizer.name, DEFAULT_OPTIMIZER),
        "--recompute": (_names(plan.recompute), "none"),
        "--offload": (_names(plan.offload), "none"),
        "--fsdp-shards": (plan.fsdp_shards, None),
        "--fsdp-gather": (plan.fsdp_gather, "auto"),
        "--context-attention": (plan.context_attention, "ring"),
        "--precision": (plan.precision, "float32"),
        "--compile": (plan.compile, "none"),
        "--batch-norm": (plan.batch_norm, "plain"),
        "--units": (plan.units, "auto"),
        "--parity-baseline": (plan.baseline, "auto"),
        "--seed": (plan.seed, 0),
        "--weights": (plan.model.weights, None),
        "--image-size": (plan.model.image_size, None),
        "--sequence-length": (plan.model.sequence_length, None),
        "--num-classes": (plan.model.num_classes, None),
        "--memory": (None if plan.memory_bytes is None else _format_size(plan.memory_bytes), None),
    }
    for name, (value, usual) in given.items():
        if value != usual:
            words += [name, value]
    words += ["--shard"] if plan.shard else []
    words += ["--zero", str(plan.zero)] if plan.zero else []
    words += ["--vocab-parallel"] if plan.vocab_parallel else []
    words += ["--sequence-parallel"] if plan.sequence_parallel else []
    words += ["--optimizer-in-backward"] if plan.optimizer_in_backward else []
    words += ["--cuda-graphs"] if plan.cuda_graphs else []
    words += ["--speeds", ",".join(f"{speed:g}" for speed in given_speeds(plan))] if given_speeds(plan) else []
    words += [] if plan.training else ["--inference"]
    return words


def _names(value: Recompute | Offload) -> str:
    """Format a mode, or names of units; a comma at the end distinguishes a single name from a mode."""
    return value if isinstance(value, str) else ",".join((*map(str, value), ""))


def _format_size(count: int) -> str:
    """Format a size for `--memory`."""
    text = format_bytes(count).replace(" ", "")
    return text if parse_bytes(text) == count else str(count)


def _join(words: list[object]) -> str:
    return shlex.join(word.as_posix() if isinstance(word, Path) else str(word) for word in words)
