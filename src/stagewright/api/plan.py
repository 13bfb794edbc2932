"""``sw.plan``: search for the fastest plan of a model on a cluster."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stagewright.analytic.hardware.devices import efficient_device
from stagewright.analytic.models import load_shape
from stagewright.api.forecast import Measuring
from stagewright.api.inputs import check_names, load_cluster, pop_fields, split_options
from stagewright.api.progress import SILENT, Progress
from stagewright.cluster.cluster import Cluster
from stagewright.codecs.registry import check_codec
from stagewright.display import Displayed
from stagewright.engine.parallel.codec_choice import CANDIDATES
from stagewright.errors import UsageError
from stagewright.machine.machine import default_devices, probe_machine, spread_cores
from stagewright.planner.calibration.calibrate import load_calibration
from stagewright.planner.costs.link_codecs import measure_link_codec
from stagewright.planner.costs.measure import ModelCosts, plan_microbatch_sizes
from stagewright.planner.costs.source import CostSource, MeasuredCostSource
from stagewright.planner.forecast import check_kind
from stagewright.planner.search.analytic import AnalyticSearch
from stagewright.planner.search.price import Search, merge_by_price
from stagewright.planner.search.result import RankedPlan, SearchResult
from stagewright.planner.search.search import search
from stagewright.planner.search.verify import NUM_VERIFIED, VerifiedPlans, verify as run_best
from stagewright.quantity import format_age
from stagewright.schedules.action_order import SEARCHED
from stagewright.schedules.rules import FIXED_SCHEDULES, SCHEDULES
from stagewright.simulator.costs.link_codec import LinkCodec
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.spec.activation_checkpointing import RECOMPUTES, describe_recompute
from stagewright.spec.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from stagewright.spec.plan import AXES, ModelSpec, OptimizerSpec, Plan
from stagewright.spec.plan_file import write_plan
from stagewright.spec.plan_rules import PRECISIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What a search tries."""

    top: int = 10
    """How many plans to return."""
    schedules: Sequence[str] = FIXED_SCHEDULES
    recompute: Sequence[str] = ("none", "always")
    """Modes of activation checkpointing."""
    codecs: Sequence[str] = ("none",)
    """Codecs on the links; all but ``none`` change values."""
    analytic: bool = False
    """Whether costs come from formulas and the hardware's peak instead of measurements."""
    efficiency: float | None = None
    """With `analytic`: the share of the peak that large matrix products reach; None: the device's."""
    price: bool = False
    """Whether to rank by the cost of a step, on all devices and on a half, a quarter, … of them."""

    def check(self) -> None:
        """Refuse unknown names."""
        check_names("schedule", self.schedules, SCHEDULES)
        if self.analytic and SEARCHED in self.schedules:
            raise UsageError(
                'schedule "searched" is ordered for measured times, and --analytic has none: leave out --analytic, or '
                "search other schedules"
            )
        check_names("recompute mode", self.recompute, RECOMPUTES)
        for name in self.codecs:
            check_codec(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult(Displayed):
    """The best plans of a search, with the baseline and plain data parallelism beside them."""

    base: Plan
    """What all plans share: model, batch, precision, optimizer."""
    cluster: Cluster
    search: SearchResult
    verified: VerifiedPlans | None = None
    """The best plans as they ran on this machine."""
    notes: tuple[str, ...] = ()
    """Remarks about where the best plan's times come from."""

    @property
    def best(self) -> Plan:
        """The fastest plan that fits."""
        return self.search.best[0].plan

    def write(self, path: str | Path) -> None:
        """Write the best plan as a TOML file, which ``stagewright train --plan`` and ``sw.parallelize`` read."""
        write_plan(self.best, Path(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``stagewright plan --json``."""
        result = self.search
        assert result.serial is not None
        return {
            "model": self.base.model.name,
            "batch": self.base.batch,
            "precision": self.base.precision,
            "optimizer": self.base.optimizer.name,
            "best": [_row(ranked) for ranked in result.best],
            "serial": _row(result.serial),
            "data_parallel": None if result.data_parallel is None else _row(result.data_parallel),
            "with_codec": None if result.with_codec is None else _row(result.with_codec),
            "losers": result.losers,
            "num_plans": result.num_plans,
            "num_exact": result.num_exact,
            "num_unfit": result.num_unfit,
            "seconds": result.seconds,
            "verified": None if self.verified is None else self.verified.to_dict(),
        }


def plan(
    model: str,
    *,
    cluster: Cluster | str | Path | None = None,
    batch: int = 256,
    verify: bool = False,
    optimizer: str = DEFAULT_OPTIMIZER,
    precision: str = "float32",
    root: str | Path = "runs",
    progress: Progress = SILENT,
    **options: Any,
) -> PlanResult:
    """Search data × tensor × pipeline × micro-batches × schedule × activation checkpointing × FSDP.

    Args:
        model: A name from ``stagewright models``, ``hf:ORG/NAME``, or ``package.module:factory``.
        cluster: Devices and links, or the path of their file; by default this machine.
        batch: Global batch.
        verify: Whether to run the best plans on this machine.
        optimizer: adamw, adam, sgd or rmsprop.
        precision: float32, bf16, bf16-mixed or fp16-mixed.
        root: Where run folders of `verify` go.
        progress: Receives notes while the model is measured.
        options: Options of the model (``image_size``, …), of the search (``top``, ``schedules``, ``recompute``,
            ``codecs``, ``analytic``, ``efficiency``, ``price``) and of measuring (``repeats``, ``fresh``, ``cache``,
            ``rescale``, ``innermost``).

    Example:
        result = sw.plan("mlp-mnist", batch=64, repeats=1)
        print(result)
        result.write("plan.toml")
    """
    space, measuring = pop_fields(SearchSpace, options), pop_fields(Measuring, options)
    about, rest = split_options(options)
    check_names("optimizer", [optimizer], OPTIMIZERS)
    check_names("precision", [precision], PRECISIONS)
    base = Plan(
        model=ModelSpec(name=model, **about),
        batch=batch,
        precision=precision,  # type: ignore[arg-type]  # checked above
        optimizer=OptimizerSpec(name=optimizer),
        **rest,
    )
    where = load_cluster(cluster)
    space.check()
    check_names("axis", [measuring.innermost], AXES)
    if space.analytic:
        if where is None:
            raise UsageError("--analytic needs the hardware: give --cluster, like 8xh100 or a cluster file")
        if verify:
            raise UsageError("--verify runs plans here, but --analytic is for hardware that is not at hand")
        run, source = _analytic_search(base, where, space, measuring), None
    else:
        run, source, where = _measured_search(base, where, space, measuring, verify, progress)
    gc.freeze()  # a search makes many objects; the collector need not scan the imported modules each time
    result = merge_by_price(run, where, space.top) if space.price else run(where.num_devices)
    verified = None
    if verify:
        verified = run_best(result.best, root, cache=measuring.cache_folder, progress=progress.note)
    notes = () if source is None else _profile_notes(result.best[0].plan, source)
    return PlanResult(base=base, cluster=where, search=result, verified=verified, notes=notes)


def _analytic_search(base: Plan, cluster: Cluster, space: SearchSpace, measuring: Measuring) -> Search:
    """Return the search with formulas."""
    formulas = AnalyticSearch(
        base=base,
        shape=load_shape(base.model.name, base.model.sequence_length),
        cluster=cluster,
        device=efficient_device(cluster, space.efficiency),
        innermost=measuring.innermost,
    )

    def run(num_devices: int) -> SearchResult:
        return formulas.search(
            top=space.top,
            schedules=space.schedules,
            recomputes=space.recompute,
            codecs=space.codecs,
            extra_codecs=_extra_codecs(space),
            num_devices=num_devices,
        )

    return run


def _measured_search(
    base: Plan, cluster: Cluster | None, space: SearchSpace, measuring: Measuring, verify: bool, progress: Progress
) -> tuple[Search, CostSource, Cluster]:
    """Return the search with measured units, their source, and the cluster."""
    source, cluster, overheads = _measured_source(base, cluster, measuring, progress)
    codecs, extra = _link_codecs(space.codecs, source, base), _link_codecs(_extra_codecs(space), source, base)

    def run(num_devices: int) -> SearchResult:
        return search(
            base,
            source,
            cluster,
            overheads,
            top=space.top,
            schedules=space.schedules,
            recomputes=space.recompute,
            codecs=codecs,
            extra_codecs=extra,
            innermost=measuring.innermost,
            num_devices=num_devices,
            num_measured=NUM_VERIFIED if verify else 1,
            progress=progress.note,
        )

    return run, source, cluster


def _extra_codecs(space: SearchSpace) -> Sequence[str]:
    return CANDIDATES if list(space.codecs) == ["none"] else ()


def _row(ranked: RankedPlan) -> dict[str, Any]:
    plan, forecast = ranked.plan, ranked.forecast
    return {
        "mesh": str(plan.mesh),
        "strategy": plan.mesh.strategy,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "recompute": describe_recompute(plan),
        "recomputed_units": list(plan.recomputed_units),
        "attention_units": list(plan.attention_units),
        "offloaded_units": [] if isinstance(plan.offload, str) else list(plan.offload),
        "shard": plan.shard,
        "fsdp_shards": plan.fsdp_shards,
        "fsdp_gather": plan.fsdp_gather,
        "zero": plan.zero,
        "codec": ranked.codec,
        "cuts": list(plan.cuts),
        "step_s": forecast.step_s,
        "samples_per_s": forecast.samples_per_s,
        "speedup": forecast.speedup,
        "peak_memory_bytes": forecast.peak_memory_bytes,
        "fits": forecast.fits,
        "price_per_step": ranked.price_per_step,
        "reason": ranked.reason,
    }


def _link_codecs(names: Iterable[str], source: CostSource, base: Plan) -> dict[str, LinkCodec]:
    """Return each codec's measured cost."""
    kind = source.model(1, 1).profile.device.partition(":")[0]
    return {name: measure_link_codec(name, base.compute_dtype, 1 << 20, kind) for name in names}


def _measured_source(
    base: Plan, cluster: Cluster | None, measuring: Measuring, progress: Progress
) -> tuple[CostSource, Cluster, EngineOverheads]:
    """Measure the model here; without a cluster, plan for this machine."""
    calibration = load_calibration(measuring.cache_folder, progress=progress.note)
    device = default_devices(1)[0]
    if cluster is None:
        machine = probe_machine()
        count = len(machine.gpus) or len(spread_cores())
        memory = machine.gpus[0].memory_bytes if machine.gpus else machine.memory_bytes
        if memory is not None and not machine.gpus:
            memory //= count  # workers on cores share the host's memory
        cluster = calibration.cluster(count, memory)
    check_kind(device, cluster, measuring.rescale)

    def measure(plan: Plan, size: int) -> ModelCosts:
        return measuring.measure(plan, size, progress)

    # The largest micro-batch measured is a replica's share in plain data parallelism, as far as it is quick to measure.
    small = 1 if base.batch < 4 else 2
    large = max(small, min(64, base.batch // min(cluster.num_devices, base.batch)))
    source = MeasuredCostSource(
        plan=replace(base, devices=(device,)), small=small, large=large, repeats=measuring.repeats, measure=measure
    )
    return source, cluster, calibration.overheads_on(cluster)


def _profile_notes(best: Plan, source: CostSource) -> tuple[str, ...]:
    """Say where the best plan's times come from."""
    size, tensor = max(plan_microbatch_sizes(best)), best.mesh.tensor
    profile = source.model(size, tensor).profile
    if profile.source == "line":
        return (
            f"micro-batches of {size} take long to measure, so the best plan is forecast from smaller ones; "
            "`stagewright forecast` measures them",
        )
    if profile.source == "cache":
        return (f"the best plan's profile was measured {format_age(profile.age_s)} ago; --fresh measures again",)
    return ()
