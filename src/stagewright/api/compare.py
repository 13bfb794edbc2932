"""``sw.compare``: run one batch under several strategies, each verified against the single-device baseline."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stagewright.api.forecast import search_order
from stagewright.api.inputs import parse_devices, parse_strategies, split_options
from stagewright.api.progress import SILENT, Progress
from stagewright.display import Displayed
from stagewright.engine.jobs.compare import compare as run_plans
from stagewright.engine.parallel.resolve import check_cuts
from stagewright.engine.worker.watchdog import HANG_S
from stagewright.errors import UsageError
from stagewright.machine.machine import default_devices
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import check_root
from stagewright.spec.cuda_graphs import can_be_graphs
from stagewright.spec.local_check import check_on_this_machine
from stagewright.spec.optimizer_in_backward import can_step_in_backward
from stagewright.spec.plan import ModelSpec, OptimizerSpec, Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.spec.strategy import parse_strategy, sharding_name
from stagewright.spec.unequal_devices import first_speeds

DEFAULT_BATCH = 32
_MAX_NAMED = 8  # devices in an error message
DEFAULT_STRATEGIES = ("serial", "data", "tensor", "pipeline")
_SCOPES = (
    ("shard", "data parallelism", "has it: add data to --strategy"),
    ("zero", "data parallelism", "has it: add data to --strategy"),
    ("vocab_parallel", "tensor parallelism", "has it: add tensor"),
    ("sequence_parallel", "tensor parallelism", "has it: add tensor"),
    ("cuda_graphs", "serial and pipeline plans", "is one: add pipeline"),
)
"""Options of a plan that some strategies do not have: name, where it applies, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Displayed):
    """The runs of several strategies, each verified against the single-device baseline."""

    plan: Plan
    """What all runs share: model, batch, precision, devices."""
    rows: tuple[RunResult, ...]
    """One result a strategy, also where it was refused or failed."""

    @property
    def fastest(self) -> RunResult | None:
        """The verified run with the highest throughput."""
        return max((row for row in self.rows if row.equal), key=lambda row: row.samples_per_s or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``stagewright compare --json``."""
        return {"model": self.plan.model.name, "rows": [row.to_dict() for row in self.rows]}


def compare(
    model: str,
    *,
    devices: int | str | Sequence[str] = 2,
    strategies: str | Iterable[str] = DEFAULT_STRATEGIES,
    batch: int = DEFAULT_BATCH,
    microbatches: int = 8,
    micro_batch_size: int | None = None,
    rounds: int = 1,
    root: str | Path = "runs",
    hang_s: float = HANG_S,
    progress: Progress = SILENT,
    **options: Any,
) -> Comparison:
    """Run one batch under each strategy, verify each run against the baseline, and return throughput and memory.

    Args:
        model: A name from ``stagewright models``, ``hf:ORG/NAME``, or ``package.module:factory``: worker processes
            build the model themselves.
        devices: How many GPUs or cores, or their names: ``["cuda:0", "cuda:1"]``.
        strategies: Names (serial, data, fsdp, tensor, pipeline) and meshes such as ``data=2,pipeline=2``.
        batch: Global batch: samples in a step, over all workers.
        microbatches: Micro-batches of a pipeline.
        micro_batch_size: Samples in a micro-batch of a pipeline, instead of their number.
        rounds: How many times all strategies are run, interleaved; speed-ups are medians over rounds.
        root: Where run folders go.
        hang_s: Seconds without progress after which a run is ended.
        progress: Receives notes while it runs.
        options: Options of the model (``image_size``, ``sequence_length``, ``weights``, …) and of the plan
            (``schedule``, ``recompute``, ``shard``, ``fsdp_shards``, ``fsdp_gather``, ``zero``, ``vocab_parallel``,
            ``sequence_parallel``, ``codec``, ``optimizer``, ``training``, ``precision``, ``compile``, ``cuda_graphs``,
            ``optimizer_in_backward``, ``steps``, …).

    Example:
        comparison = sw.compare("mlp-mnist", devices=2, strategies="serial,data", batch=256, steps=3)
        print(comparison)
        print(comparison.fastest.strategy)
    """
    about, chosen = split_options(options)
    if isinstance(chosen.get("optimizer"), str):
        chosen["optimizer"] = OptimizerSpec(name=chosen["optimizer"])
    about["seed"] = chosen["seed"] = chosen.get("seed", about.get("seed", 0))
    base = Plan(model=ModelSpec(name=model, **about), batch=batch, devices=parse_devices(devices, progress), **chosen)
    names = parse_strategies(strategies)
    check_root(root)
    if not isinstance(base.speeds, str) and base.speeds and len(base.speeds) != len(base.devices):
        raise UsageError(
            f"--speeds has {len(base.speeds)} for {len(base.devices)} devices: give one for each device, in their order"
        )
    plans = strategy_plans(base, names, len(base.devices), microbatches)
    if micro_batch_size is not None:
        plans = [
            replace(plan, microbatches=max(1, -(-plan.batch // (plan.mesh.data * micro_batch_size))))
            if plan.mesh.pipeline > 1
            else plan
            for plan in plans
        ]
    plans = list(dict.fromkeys(plans))
    check_on_this_machine(base)
    _check_any(plans)
    custom_units = base.units not in ("auto", "leaf")
    for plan in [plan for plan in plans if plan.cuts or custom_units or plan.recomputed_units][:1]:
        check_cuts(plan)
    if len(base.devices) == 1 and len(names) > 1:
        progress.note(f"only one device, {base.devices[0]}: the baseline runs alone; use two, like --devices 2")
    for name, scope, missing in _SCOPES:
        if getattr(base, name) and not any(getattr(plan, name) for plan in plans):
            option = f"--{name.replace('_', '-')}"
            progress.note(f"{option} applies to {scope}, and no strategy here {missing}")

    def report(plan: Plan, text: str) -> None:
        sharding = sharding_name(plan.shard, plan.zero, plan.fsdp_gather, plan.fsdp_shards)
        progress.note(f"{plan.mesh.strategy}{f' ({sharding})' if sharding else ''}: {text} …")

    plans = [search_order(plan, progress) for plan in plans]
    rows = run_plans(plans, root, rounds=rounds, progress=report, hang_s=hang_s)
    if all(row.refused for row in rows):
        raise UsageError(str(rows[0].error))
    return Comparison(plan=base, rows=tuple(rows))


def _enough_devices(devices: Sequence[str], num_workers: int) -> str:
    """Return the option that gives each worker a device, or some of them the same one if this machine has no more."""
    try:
        default_devices(num_workers)
    except UsageError:
        if num_workers > _MAX_NAMED:
            return f"a mesh of at most {len(devices)}"
        names = itertools.islice(itertools.cycle(devices), num_workers)
        return f"--devices {','.join(names)}, where workers share a device"
    return f"--devices {num_workers}"


def strategy_plans(base: Plan, strategies: Sequence[str], num_devices: int, microbatches: int) -> list[Plan]:
    """Make one plan per strategy: a name (serial, data, zero1, fsdp, tensor, pipeline) or a mesh: ``dp=2,pp=2``."""
    plans = []
    for text in strategies:
        strategy = parse_strategy(text, num_devices, base.fsdp_shards)
        mesh, zero = strategy.mesh, strategy.zero
        if mesh.num_workers > num_devices:
            raise UsageError(
                f"strategy {text!r} needs {mesh.num_workers} workers, but there are {num_devices} devices; "
                f"use {_enough_devices(base.devices, mesh.num_workers)}"
            )
        is_pipeline = mesh.pipeline > 1
        shard = zero == 3 or (base.shard and mesh.data > 1 and not zero)
        plans.append(
            replace(
                base,
                mesh=mesh,
                devices=base.devices[: mesh.num_workers],
                speeds=first_speeds(base.speeds, mesh.num_workers),
                microbatches=microbatches if is_pipeline else 1,
                schedule=base.schedule if is_pipeline else "1f1b",
                actions=base.actions if is_pipeline else (),
                stages=base.stages if is_pipeline else None,
                cuts=base.cuts if is_pipeline else (),
                placement=base.placement if is_pipeline else "auto",
                shard=shard,
                fsdp_shards=(strategy.fsdp_shards or base.fsdp_shards) if shard else None,
                fsdp_gather=base.fsdp_gather if shard else "auto",
                zero=zero if zero in (1, 2) else base.zero if mesh.data > 1 and not zero else 0,
                vocab_parallel=base.vocab_parallel and mesh.tensor > 1,
                sequence_parallel=base.sequence_parallel and mesh.tensor > 1,
                optimizer_in_backward=base.optimizer_in_backward and can_step_in_backward(mesh),
                cuda_graphs=base.cuda_graphs and can_be_graphs(mesh),
                codec=base.codec if is_pipeline else "none",
                codec_backward=base.codec_backward if is_pipeline else None,
            )
        )
    return plans


def run_plan(
    plan: Plan, *, root: str | Path = "runs", hang_s: float = HANG_S, progress: Progress = SILENT
) -> Comparison:
    """Run one plan as it is, verified against the single-device baseline."""
    check_plan(plan)
    check_on_this_machine(plan)
    plan = search_order(plan, progress)
    rows = run_plans(
        [plan], root, progress=lambda ran, text: progress.note(f"{ran.mesh.strategy}: {text} …"), hang_s=hang_s
    )
    if rows[0].refused:
        raise UsageError(str(rows[0].error))
    return Comparison(plan=plan, rows=tuple(rows))


def _check_any(plans: Sequence[Plan]) -> None:
    """Raise the first error if every plan is refused; a table has room for a few refused ones."""
    errors = []
    for plan in plans:
        try:
            check_plan(plan)
            return
        except UsageError as error:
            errors.append(error)
    raise errors[0]
