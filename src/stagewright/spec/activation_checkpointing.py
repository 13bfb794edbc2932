"""What a plan recomputes: whole stages, units by name, or attention inside units.

recompute = "always"              each stage saves its inputs; backward recomputes the stage
recompute = [true, false]         one flag for each stage
recompute = ["layers.0", …]       each named unit saves its inputs and is recomputed alone; the others save everything
recompute = "attention"           everything is saved but what attention computes between its linear layers

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
    names = plan.recomputed_units
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
    others = {
        f'compile = "{plan.compile}"': plan.compile != "none",
        f"context = {plan.mesh.context}": plan.mesh.context > 1,
        "sequence_parallel = true": plan.sequence_parallel,
    }
    if other := next((name for name, used in others.items() if used), None):
        raise UsageError(
            f'recompute = "attention" does not work with {other}: leave out one of the two, or name units in recompute'
        )


def no_attention(model: str) -> UsageError:
    """Return the error of a model without attention to recompute."""
    return UsageError(
        f'recompute = "attention" recomputes the attention modules inside units, and the units of {model} have none: '
        'name units in recompute, or use recompute = "always"'
    )


def check_recomputed_units(plan: Plan, known: Iterable[str]) -> None:
    """Raise UnknownName unless the model has the units that the plan recomputes."""
    known = list(known)
    if missing := next((name for name in plan.recomputed_units if name not in known), None):
        raise UnknownName("recomputed unit", missing, known)


def recomputes_stages(plan: Plan) -> bool:
    """Whether any stage of a plan may be recomputed as a whole."""
    return plan.recompute not in ("none", "attention") and not plan.recomputed_units


def can_recompute_units(plan: Plan) -> bool:
    """Whether the units of a plan without recomputation can be chosen: each worker holds one stage in order."""
    is_in_order = plan.mesh.pipeline == 1 or plan.schedule in ("1f1b", "gpipe")
    is_one_each = plan.num_stages == plan.mesh.pipeline or plan.mesh.pipeline == 1
    return plan.training and plan.recompute == "none" and is_in_order and is_one_each


def describe_recompute(plan: Plan) -> str:
    """Return `recompute` in a word for tables: a mode, flags, or the number of units."""
    if names := plan.recomputed_units:
        return f"{len(names)} unit{'s' if len(names) > 1 else ''}"
    return str(plan.recompute)


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
