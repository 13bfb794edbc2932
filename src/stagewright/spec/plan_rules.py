"""The rules every plan must satisfy. Each violation raises UsageError with one sentence and a fix.

The engine checks rules that need the model (enough units, divisible attention heads). Nothing here imports torch or
user code: a plan is checked before its worker is pinned, and reading a stranger's plan must not run anything.
`local_check.py` imports what a plan names before it runs.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable

from stagewright.codecs.registry import check_codec_name
from stagewright.errors import UnknownName, UsageError
from stagewright.plugins import plugins
from stagewright.schedules.rules import PLACEMENTS, SCHEDULES
from stagewright.spec.activation_checkpointing import check_offload, check_recompute, check_recompute_mode
from stagewright.spec.cuda_graphs import check_cuda_graphs
from stagewright.spec.host_memory_check import check_baseline
from stagewright.spec.optimizer_in_backward import check_optimizer_in_backward
from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan import OptimizerSpec, Plan
from stagewright.spec.searched_order import check_order
from stagewright.spec.unequal_devices import given_speeds, replica_sizes
from stagewright.spec.zero import check_fsdp, check_zero
from stagewright.user_code import is_user_defined, split_name

POLICIES = ("parameters", "macs", "blocks", "time", "optimal", "client-server")
PRECISIONS = ("float32", "bf16", "bf16-mixed", "fp16-mixed")
CONTEXT_ATTENTIONS = ("ring", "all-to-all")
FSDP_GATHERS = ("auto", "step", "microbatch")
COMPILES = ("none", "stages", "units")
BATCH_NORMS = ("plain", "deferred")
BASELINES = ("auto", "whole", "streamed")
LR_SCHEDULES = ("constant", "linear", "cosine")
MAX_WORKERS = 131_072
MAX_STAGES = 16_384
MAX_MICROBATCHES = 2**20
_DEVICE = re.compile(r"cpu(:\d+(-\d+)?(,\d+(-\d+)?)*)?|cuda(:\d+(/\d+)?)?")


def check_plan(plan: Plan) -> None:
    """Raise UsageError if the plan can't run."""
    check_choices(plan)
    check_combination(plan)


def check_choices(plan: Plan) -> None:
    """Raise UsageError for an unknown name or an impossible optimizer: what a search does not combine."""
    _check_names(plan)
    _check_optimizer(plan.optimizer)


def check_combination(plan: Plan) -> None:
    """Raise UsageError for values that can't be combined."""
    _check_numbers(plan)
    _check_batch(plan)
    _check_devices(plan)
    _check_stages(plan)
    _check_schedule(plan)
    check_order(plan)
    _check_features(plan)
    _check_tensor_degrees(plan)
    _check_codecs(plan)
    check_cuda_graphs(plan)
    check_optimizer_in_backward(plan)
    check_baseline(plan)


def _check_names(plan: Plan) -> None:
    check_choice("schedule", plan.schedule, SCHEDULES)
    if not plan.cuts:
        _check_policy(plan.split)
    check_choice("placement", plan.placement, ("auto", *PLACEMENTS))
    check_choice("precision", plan.precision, PRECISIONS)
    check_choice("compile mode", plan.compile, COMPILES)
    check_choice("attention of context parallelism", plan.context_attention, CONTEXT_ATTENTIONS)
    check_choice("batch norm mode", plan.batch_norm, BATCH_NORMS)
    check_choice("baseline", plan.baseline, BASELINES)
    if isinstance(plan.recompute, str):
        check_recompute_mode(plan.recompute)
    if not plan.model.name:
        raise UsageError("the model has no name; write one that `stagewright models` lists")


def check_choice(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise UnknownName unless the name is a known one."""
    known = list(known)
    if name not in known:
        raise UnknownName(kind, name, known)


def _check_policy(name: str) -> None:
    """Check a policy name; a user-defined policy, `package.module:function`, by its form only."""
    if is_user_defined(name):
        split_name(name, "policy")
    else:
        check_choice("policy", name, _policies())


def _policies() -> list[str]:
    """List the built-in policies, plug-ins and, if the registry is loaded, those a user registered."""
    registry = sys.modules.get("stagewright.partition.registry")
    return list(dict.fromkeys((*POLICIES, *(registry.policy_names() if registry else ()), *plugins("policies"))))


def _check_numbers(plan: Plan) -> None:
    at_least_one = {
        "batch": plan.batch,
        "microbatches": plan.microbatches,
        "steps": plan.steps,
        "stages": plan.stages,
        "epochs": plan.epochs,
        "checkpoint_every": plan.checkpoint_every,
        "memory": plan.memory_bytes,
        "image_size": plan.model.image_size,
        "sequence_length": plan.model.sequence_length,
        "num_classes": plan.model.num_classes,
    }
    for name, number in at_least_one.items():
        if number is not None and number < 1:
            raise UsageError(f"{name} = {number}, but must be at least 1")
    if plan.microbatches > MAX_MICROBATCHES:
        raise UsageError(f"microbatches = {plan.microbatches}, but must be at most {MAX_MICROBATCHES}")
    if plan.warmup < 0:
        raise UsageError(f"warmup = {plan.warmup}, but must be at least 0")
    if plan.clip is not None and not (math.isfinite(plan.clip) and plan.clip > 0):
        raise UsageError(
            f"clip = {plan.clip}, but the maximum gradient norm must be above 0: use clip = 1.0, or leave it out"
        )
    for name, seed in (("seed", plan.seed), ("the model's seed", plan.model.seed)):
        if not 0 <= seed < 2**32:
            raise UsageError(f"{name} = {seed}, but must be from 0 to {2**32 - 1}")


def _check_optimizer(optimizer: OptimizerSpec) -> None:
    check_choice("optimizer", optimizer.name, OPTIMIZERS)
    if not (math.isfinite(optimizer.learning_rate) and optimizer.learning_rate > 0):
        raise UsageError(f"learning_rate = {optimizer.learning_rate}, but must be above 0, like 0.001")
    if not 0 <= optimizer.momentum < 1:
        raise UsageError(f"momentum = {optimizer.momentum}, but must be at least 0 and below 1")
    if optimizer.momentum and not OPTIMIZERS[optimizer.name].has_momentum:
        others = " and ".join(name for name, rule in OPTIMIZERS.items() if rule.has_momentum)
        raise UsageError(f"momentum = {optimizer.momentum} is for {others}; {optimizer.name} has none: leave it out")
    check_choice("learning-rate schedule", optimizer.lr_schedule, LR_SCHEDULES)
    if optimizer.lr_warmup_steps < 0:
        raise UsageError(f"lr_warmup_steps = {optimizer.lr_warmup_steps}, but must be at least 0")
    if not (math.isfinite(optimizer.weight_decay) and optimizer.weight_decay >= 0):
        raise UsageError(f"weight_decay = {optimizer.weight_decay}, but must be at least 0")


def _check_batch(plan: Plan) -> None:
    least = plan.microbatches * plan.mesh.data
    if plan.batch < least:
        if plan.microbatches == 1:
            raise UsageError(
                f"a batch of {plan.batch} can't be split over {plan.mesh.data} replicas: use batch = {least} or more, "
                "or fewer replicas"
            )
        replicas = f" on each of {plan.mesh.data} replicas" if plan.mesh.data > 1 else ""
        raise UsageError(
            f"a batch of {plan.batch} can't be split into {plan.microbatches} micro-batches{replicas}: "
            f"use batch = {least} or more, or fewer micro-batches"
        )


def _check_devices(plan: Plan) -> None:
    num_workers = plan.mesh.num_workers
    if num_workers > MAX_WORKERS:
        raise UsageError(f"{plan.mesh} has {num_workers} workers, but a plan has at most {MAX_WORKERS}")
    if plan.devices and len(plan.devices) != num_workers:
        raise UsageError(
            f"{len(plan.devices)} device{'s' if len(plan.devices) != 1 else ''} for the {num_workers} workers of "
            f"{plan.mesh}: give {num_workers} devices, one for each worker in the order of their ranks"
        )
    _check_speeds(plan)
    for device in plan.devices:
        if not _DEVICE.fullmatch(device):
            raise UsageError(f"{device!r} is not a device; write cpu:0, cpu:0-1, cpu:0,2, cuda:0 or cuda:0/8")
    kinds = sorted({device.partition(":")[0] for device in plan.devices})
    if len(kinds) > 1:
        raise UsageError(f"devices of {' and '.join(kinds)} in one plan can't communicate: use one kind")


def _check_speeds(plan: Plan) -> None:
    speeds, num_workers = given_speeds(plan), plan.mesh.num_workers
    if speeds and len(speeds) != num_workers:
        raise UsageError(
            f"speeds has {len(speeds)} for the {num_workers} workers of {plan.mesh}: give {num_workers}, one for each "
            'worker in the order of their ranks, or speeds = "measured"'
        )
    if wrong := [speed for speed in speeds if not (math.isfinite(speed) and speed > 0)]:
        raise UsageError(f"a speed of {wrong[0]:g} is not possible: give positive numbers, like 1 and 0.5")
    least = min(replica_sizes(plan, plan.batch)) if speeds else plan.batch
    if speeds and least < plan.microbatches and plan.batch >= plan.microbatches * plan.mesh.data:
        raise UsageError(
            f"the slowest replica gets {least} of {plan.batch} samples, too few for {plan.microbatches} micro-batches: "
            "use a larger batch, or fewer micro-batches"
        )


def _check_stages(plan: Plan) -> None:
    num_stages, num_workers = plan.num_stages, plan.mesh.pipeline
    if num_stages > MAX_STAGES:
        raise UsageError(f"{num_stages} stages, but a plan has at most {MAX_STAGES}")
    repeated = [name for name, count in Counter(plan.cuts).items() if count > 1]
    if repeated:
        raise UsageError(f"the cut after {repeated[0]!r} is given twice: name each cut once")
    if plan.cuts and len(plan.cuts) + 1 != num_stages:
        raise UsageError(
            f"{len(plan.cuts)} cuts make {len(plan.cuts) + 1} stages, not {num_stages}: "
            f"give {num_stages - 1} cuts or leave out stages"
        )
    if num_stages < num_workers:
        raise UsageError(
            f"{num_stages} stages can't keep {num_workers} workers busy: use at least {num_workers} stages, "
            f"or pipeline = {num_stages}"
        )
    check_recompute(plan)
    check_offload(plan)


def _check_schedule(plan: Plan) -> None:
    rule, placement = SCHEDULES[plan.schedule], plan.resolved_placement
    num_stages, num_workers = plan.num_stages, plan.mesh.pipeline
    if placement == "client-server":
        _check_client_server(plan)
    elif placement != rule.placement and not rule.any_placement:
        raise UsageError(
            f"schedule {plan.schedule!r} places its stages {rule.placement}, not {placement}: "
            f'use placement = "{rule.placement}" or leave it out'
        )
    elif rule.any_number_of_stages:
        if num_stages % num_workers:
            raise UsageError(
                f"{num_stages} stages can't be split evenly over {num_workers} workers: use a multiple of {num_workers}"
            )
    elif num_stages != rule.stages_per_worker * num_workers:
        each = f"{rule.stages_per_worker} stage{'s' if rule.stages_per_worker > 1 else ''}"
        fix = "" if rule.placement == "v" else ', or schedule = "interleaved" for more'
        raise UsageError(
            f"schedule {plan.schedule!r} places exactly {each} on each worker, so {num_workers} workers hold "
            f"{rule.stages_per_worker * num_workers} stages, not {num_stages}: leave out stages{fix}"
        )
    if plan.training:
        _check_microbatches(plan)


def _check_client_server(plan: Plan) -> None:
    num_stages, num_workers = plan.num_stages, plan.mesh.pipeline
    if num_workers < 2:
        raise UsageError("placement client-server needs a client and a server: use a mesh with pipeline=2 or more")
    if plan.schedule not in ("gpipe", "1f1b"):
        raise UsageError(f'placement client-server runs with schedule "gpipe" or "1f1b", not {plan.schedule!r}')
    if num_stages != num_workers + 1:
        raise UsageError(
            f"placement client-server puts the first and the last stage on the client and one on each server: "
            f"{num_workers} workers hold {num_workers + 1} stages, not {num_stages}"
        )
    if plan.split == "client-server" and not plan.cuts and num_workers != 2:
        raise UsageError(
            f"policy client-server supports one client and one server, not {num_workers} workers: "
            "use pipeline = 2, or name the cuts"
        )


def _check_microbatches(plan: Plan) -> None:
    rule, num_workers, microbatches = SCHEDULES[plan.schedule], plan.mesh.pipeline, plan.microbatches
    least = rule.min_microbatches(plan.num_stages, num_workers)
    if microbatches < least:
        raise UsageError(
            f"schedule {plan.schedule!r} with {plan.num_stages} stages on {num_workers} workers needs at least {least} "
            f'micro-batches, not {microbatches}: use microbatches = {least}, or schedule = "gpipe"'
        )
    if rule.rounds and microbatches % num_workers:
        above = -(-microbatches // num_workers) * num_workers
        raise UsageError(
            f"schedule {plan.schedule!r} runs micro-batches in rounds of {num_workers}, one per worker, and "
            f"{microbatches} is not a multiple of {num_workers}: use microbatches = {above}"
        )


def _check_features(plan: Plan) -> None:
    if plan.shard and plan.mesh.data == 1:
        raise UsageError(
            "shard (FSDP) shards parameters over replicas, and there is only one: use a mesh with data=2 or more"
        )
    check_choice("fsdp_gather", plan.fsdp_gather, FSDP_GATHERS)
    check_fsdp(plan)
    if plan.shard and plan.mesh.expert > 1:
        raise UsageError(
            f"shard (FSDP) shards what replicas hold in common, and expert = {plan.mesh.expert} divides experts over "
            "them: leave out one of the two"
        )
    check_zero(plan)
    if plan.vocab_parallel and plan.mesh.tensor == 1:
        raise UsageError(
            f"vocab_parallel = true divides the vocabulary over tensor parallel workers, and {plan.mesh} has none: "
            "leave it out, or use a mesh with tensor=2 or more"
        )
    if plan.sequence_parallel and plan.mesh.tensor == 1:
        raise UsageError(
            f"sequence_parallel = true divides sequences over tensor parallel workers, and {plan.mesh} has none: "
            "leave it out, or use a mesh with tensor=2 or more"
        )
    inside = next((axis for axis in ("expert", "context") if getattr(plan.mesh, axis) > 1), None)
    if inside is not None and plan.training and SCHEDULES[plan.schedule].splits_backward:
        raise UsageError(
            f"schedule {plan.schedule!r} splits the backward, in which {inside} = {getattr(plan.mesh, inside)} "
            'communicates: use schedule = "1f1b", "gpipe" or "interleaved"'
        )
    if plan.mesh.context > 1:
        with_context = {
            f"tensor = {plan.mesh.tensor}": plan.mesh.tensor > 1,
            f"expert = {plan.mesh.expert}": plan.mesh.expert > 1,
            "shard (FSDP)": plan.shard,
            f"zero = {plan.zero}": plan.zero > 0,
            f'compile = "{plan.compile}"': plan.compile != "none",
        }
        if other := next((name for name, used in with_context.items() if used), None):
            raise UsageError(
                f"context = {plan.mesh.context} works with data and pipeline parallelism, not with {other}: "
                "leave out one of the two"
            )
    if plan.task is None and plan.epochs is not None:
        raise UsageError(f"epochs = {plan.epochs} are passes over a task's samples: name a task, or use steps")
    if not plan.training and plan.checkpoint_every is not None:
        raise UsageError("checkpoint_every is for training: leave it out, or use training = true")
    if not plan.training and plan.clip is not None:
        raise UsageError(f"clip = {plan.clip} is for training: leave it out, or use training = true")


def _check_tensor_degrees(plan: Plan) -> None:
    if not plan.mesh.tensor_degrees:
        return
    together = {
        "shard (FSDP)": plan.shard,
        f"zero = {plan.zero}": plan.zero > 0,
        f"expert = {plan.mesh.expert}": plan.mesh.expert > 1,
        "vocab_parallel": plan.vocab_parallel,
        "sequence_parallel": plan.sequence_parallel,
    }
    if other := next((name for name, used in together.items() if used), None):
        raise UsageError(
            f"{plan.mesh} has a tensor degree for each stage, which does not work with {other}: leave it out, or use "
            f"one degree, like tensor = {plan.mesh.tensor}"
        )


def _check_codecs(plan: Plan) -> None:
    num_cuts = plan.num_stages - 1
    for key, codec in (("codec", plan.codec), ("codec_backward", plan.codec_backward)):
        names = [codec] if isinstance(codec, str) else codec or []
        for name in names:
            check_codec_name(name)
        if isinstance(codec, tuple) and len(codec) != num_cuts:
            raise UsageError(
                f"{key} has {len(codec)} codecs for {num_cuts} cuts: give one for each cut, or one for all"
            )
        if plan.mesh.pipeline == 1 and any(name != "none" for name in names):
            raise UsageError(
                f"{key} = {names[0]!r} compresses the links of a pipeline, and {plan.mesh} has none: leave it out, "
                "or use a mesh with pipeline=2 or more"
            )
