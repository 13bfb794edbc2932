"""What a plan recomputes: whole stages, units by name, or attention inside units; and what it offloads.

recompute = "always"              each stage saves its inputs; backward recomputes the stage
recompute = [true, false]         one flag for each stage
recompute = ["layers.0", …]       each named unit saves its inputs and is recomputed alone; the others save everything
recompute = ["layers.1:attention"] of this unit attention alone is recomputed
recompute = "attention"           everything is saved but what attention computes between its linear layers
offload = ["layers.1", …]         what each named unit saves goes to host memory until backward

A worker that holds the whole model and recomputes it treats each block as one stage:

one stage:             saves the model's inputs; backward recomputes all activations at once
one stage per block:   saves each block's inputs; backward recomputes one block at a time
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from stagewright.errors import UnknownName, UsageError
from stagewright.spec.plan import Plan

OFFLOADS = ("none", "always")
RECOMPUTES = ("none", "always", "except-last", "attention")


class _InBlock(Protocol):
    """A unit of a graph or a profile."""

    @property
    def name(self) -> str: ...
    @property
    def block(self) -> str | None: ...


def check_recompute(plan: Plan) -> None:
    """Raise UsageError unless a list of the plan has one flag for each stage, or names units once."""
    entries = plan.recompute
    if entries == "attention":
        _check_attention(plan)
    if isinstance(entries, str):
        return
    names = (*plan.recomputed_units, *plan.attention_units)
    if plan.attention_units:
        _check_attention(plan)
    if names and len(names) < len(entries):
        raise UsageError(
            f"recompute names the unit {names[0]!r} and has flags: give one flag for each stage, or only names of units"
        )
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"recompute names the unit {repeated!r} twice: name each unit once")
    if not names and len(entries) != plan.num_stages:
        raise UsageError(
            f"recompute has {len(entries)} flags for {plan.num_stages} stages: give one for each stage, "
            'names of units, or "none", "always", "except-last" or "attention"'
        )


def check_recompute_mode(name: str, where: str = "") -> None:
    """Raise UnknownName unless a word is a mode of recomputation; ``where``: the file and key that has it."""
    if name not in RECOMPUTES:
        file, _, key = where.rpartition(": ")
        hint = f"(or names of units: --recompute layers.0,layers.1, in a plan a list{f'; in {file}' if file else ''})"
        raise UnknownName(key or "recompute mode", name, RECOMPUTES, hint=hint)


def _check_attention(plan: Plan) -> None:
    """Raise UsageError if attention can't be recomputed inside the units of a plan."""
    if other := _without_attention(plan):
        raise UsageError(
            f'recompute = "attention" does not work with {other}: leave out one of the two, or name units in recompute'
        )


def can_recompute_attention(plan: Plan) -> bool:
    """Whether attention alone can be recomputed inside the units of a plan."""
    return not _without_attention(plan)


def _without_attention(plan: Plan) -> str | None:
    others = {
        f'compile = "{plan.compile}"': plan.compile != "none",
        f"context = {plan.mesh.context}": plan.mesh.context > 1,
        "sequence_parallel = true": plan.sequence_parallel,
    }
    return next((name for name, used in others.items() if used), None)


def no_attention(model: str) -> UsageError:
    """Return the error of a model without attention to recompute."""
    return UsageError(
        f'recompute = "attention" recomputes the attention modules inside units, and the units of {model} have none: '
        'name units in recompute, or use recompute = "always"'
    )


def check_recomputed_units(plan: Plan, known: Iterable[str]) -> None:
    """Raise UnknownName unless the model has the units that the plan recomputes or offloads."""
    known = list(known)
    offloaded = () if isinstance(plan.offload, str) else plan.offload
    if missing := next((name for name in offloaded if name not in known), None):
        raise UnknownName("offloaded unit", missing, known)
    if missing := next((name for name in (*plan.recomputed_units, *plan.attention_units) if name not in known), None):
        raise UnknownName("recomputed unit", missing, known)


def check_offload(plan: Plan) -> None:
    """Raise UsageError if the activations of a plan's units can't be offloaded."""
    if plan.offload == "none" or not plan.offload:
        return
    if isinstance(plan.offload, str):
        if plan.offload not in OFFLOADS:
            raise UnknownName("offload mode", plan.offload, OFFLOADS, hint="(or a list of units)")
    elif repeated := next((name for name in plan.offload if plan.offload.count(name) > 1), None):
        raise UsageError(f"offload names the unit {repeated!r} twice: name each unit once")
    elif both := next((name for name in plan.offload if name in (*plan.recomputed_units, *plan.attention_units)), None):
        raise UsageError(f"the unit {both!r} is named in recompute and in offload: choose one of the two for it")
    for other, (is_used, reason) in _without_offload(plan).items():
        if is_used:
            raise UsageError(f"offload does not work with {other}, because {reason}: leave out one of the two")


def can_offload(plan: Plan) -> bool:
    """Whether activations of a plan's units can be offloaded."""
    return not any(is_used for is_used, _ in _without_offload(plan).values())


def _without_offload(plan: Plan) -> dict[str, tuple[bool, str]]:
    """Return what offload does not work with, whether the plan has it, and why."""
    return {
        "training = false": (not plan.training, "inference saves no activations"),
        f"recompute = {plan.recompute!r}": (
            recomputes_stages(plan),
            "a recomputed stage saves its inputs only; name the units to recompute instead",
        ),
        f'compile = "{plan.compile}"': (plan.compile != "none", "compiled units save their tensors by themselves"),
        "cuda_graphs = true": (plan.cuda_graphs, "graphs keep their memory"),
    }


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def offloaded_units(plan: Plan, units: Iterable[_Named]) -> tuple[str, ...]:
    """Return the names among these units whose activations a plan offloads."""
    chosen = None if plan.offload == "always" else () if plan.offload == "none" else plan.offload
    names = [unit.name for unit in units]
    if chosen is None:
        return tuple(name for name in names if name not in (*plan.recomputed_units, *plan.attention_units))
    return tuple(name for name in names if name in chosen)


def offload_windows(offloaded: Sequence[int], num_units: int) -> list[tuple[int, int]]:
    """Return for each offloaded unit before which unit its copy is freed, and at whose backward it is fetched.

    ``offloaded``: positions among the units of a stage, ascending. A copy has at least the time of the next unit; with
    few offloaded units, copies are spread over the rest of the pass, so that compute does not wait for them.
    A position of ``num_units`` or more: it stays on the device until the next pass.
    """
    windows = []
    for number, position in enumerate(offloaded, 1):
        first = offloaded[0] + 1
        spread = first + -(-number * max(0, num_units - 1 - first) // len(offloaded))
        windows.append((max(position + 2, spread), min(num_units - 1, max(position + 1, spread))))
    return windows


def describe_offload(plan: Plan) -> str:
    """Return `offload` in a word for tables."""
    if isinstance(plan.offload, str):
        return plan.offload
    return f"{len(plan.offload)} unit{'s' if len(plan.offload) > 1 else ''}" if plan.offload else "none"


def recomputes_stages(plan: Plan) -> bool:
    """Whether any stage of a plan may be recomputed as a whole."""
    return plan.recompute not in ("none", "attention") and not (plan.recomputed_units or plan.attention_units)


def can_recompute_units(plan: Plan) -> bool:
    """Whether the units of a plan without recomputation can be chosen: each worker holds one stage in order, and all
    stages have one tensor degree."""
    is_in_order = plan.mesh.pipeline == 1 or plan.schedule in ("1f1b", "gpipe")
    is_one_each = plan.num_stages == plan.mesh.pipeline or plan.mesh.pipeline == 1
    keeps_all = plan.recompute == "none" and plan.offload == "none"
    return plan.training and keeps_all and is_in_order and is_one_each and not plan.mesh.tensor_degrees


def describe_recompute(plan: Plan) -> str:
    """Return `recompute` and `offload` in words for tables: a mode, flags, or numbers of units."""
    units, attention = len(plan.recomputed_units), len(plan.attention_units)
    words = [f"{units} unit{'s' if units > 1 else ''}"] if units else []
    words += [f"attention of {attention}"] if attention else []
    words = words or ([] if plan.recompute == "none" and describe_offload(plan) != "none" else [str(plan.recompute)])
    return ", ".join([*words, *([f"offload {describe_offload(plan)}"] if describe_offload(plan) != "none" else [])])


def block_ends(units: Iterable[_InBlock]) -> list[str]:
    """Return the last unit of each block."""
    return list({unit.block: unit.name for unit in units if unit.block is not None}.values())


def checkpoints_by_block(plan: Plan) -> bool:
    """Whether a plan that names no cuts is cut after each block to recompute it."""
    # Recomputation of a block stops before its last all-reduce; forecasts of tensor parallelism would count it.
    return _is_recomputed_stage(plan) and plan.mesh.tensor == 1


def _is_recomputed_stage(plan: Plan) -> bool:
    # With several stages FSDP would reduce-scatter in each micro-batch.
    is_one_stage = plan.num_stages == 1 and plan.mesh.pipeline == 1 and not plan.shard
    return plan.training and plan.recompute in ("always", "except-last") and is_one_stage


def checkpoint_by_block(plan: Plan, ends: Sequence[str]) -> Plan:
    """Cut the plan after each block except the last, if it recomputes without a pipeline."""
    if not _is_recomputed_stage(plan) or len(ends) < 2:
        return plan
    return replace(plan, cuts=tuple(ends[:-1]), schedule="interleaved")
