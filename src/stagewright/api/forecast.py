"""``sw.forecast`` and ``sw.explain``: predict a plan's step, and say why its speed-up is not n."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

from stagewright.analytic.forecast import AnalyticForecast
from stagewright.analytic.layout import Layout
from stagewright.analytic.shape import TransformerShape
from stagewright.api.analytic import forecast_analytic
from stagewright.api.inputs import check_names, load_cluster, load_plan, pop_fields
from stagewright.api.progress import SILENT, Progress
from stagewright.cluster.cluster import Cluster
from stagewright.cluster.device import Device
from stagewright.errors import UsageError
from stagewright.machine.machine import default_devices
from stagewright.planner.calibration.calibrate import load_calibration
from stagewright.planner.costs.measure import ModelCosts, measure_model, plan_microbatch_sizes
from stagewright.planner.costs.source import source_for_plan
from stagewright.planner.explain import Explanation, explain_plan, explain_run
from stagewright.planner.forecast import PreparedPlan, check_kind, prepare_plan
from stagewright.planner.resize import resize_prepared
from stagewright.runs.run_folder import RunFolder
from stagewright.simulator.forecast import Forecast
from stagewright.simulator.topology import Topology
from stagewright.simulator.what_if import with_links, with_perfect_balance, without_communication
from stagewright.spec.plan import AXES, Axis, Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.spec.searched_order import lacks_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """How the model is measured for a forecast."""

    repeats: int = 5
    """Rounds of measuring."""
    fresh: bool = False
    """Whether to measure again where a result is cached."""
    cache: str | bool = True
    """The cache folder; True: the user's, False: none."""
    rescale: bool = False
    """Whether times of another kind of device are multiplied by the cluster's speeds."""
    innermost: Axis = "pipeline"
    """The mesh axis whose workers have neighboring ranks."""

    @property
    def cache_folder(self) -> str | None:
        """The cache folder that was named."""
        return self.cache if isinstance(self.cache, str) else None

    def measure(self, plan: Plan, size: int | None, progress: Progress) -> ModelCosts:
        """Measure a plan's model at one size of micro-batch."""
        shared = f", tensor parallel over {plan.mesh.tensor}" if plan.mesh.tensor > 1 else ""
        samples = max(plan_microbatch_sizes(plan)) if size is None else size
        with progress.task(f"measuring {plan.model.name}, micro-batches of {samples}{shared}") as update:
            return measure_model(
                plan, size=size, cache=self.cache, repeats=self.repeats, fresh=self.fresh, progress=update
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Changes to a forecast: what would the step take if …"""

    free_communication: bool = False
    """Links and collectives cost nothing."""
    perfect_balance: bool = False
    """Every stage takes the mean of all stages."""
    bandwidth: float | None = None
    """Bandwidth of every link, in bytes per second."""
    latency_s: float | None = None
    """Latency of every link."""
    devices: int | None = None
    """Number of devices, all alike."""
    infinite_devices: bool = False
    """As many devices as there are units (pipeline) or samples (data)."""

    def __bool__(self) -> bool:
        return self != WhatIf()

    @property
    def is_hypothetical(self) -> bool:
        """Whether no real plan has these costs, so that no change to a plan can be recommended."""
        return self.free_communication or self.perfect_balance

    def apply(self, prepared: PreparedPlan) -> PreparedPlan:
        """Return the forecast's inputs with these changes."""
        if self.devices is not None or self.infinite_devices:
            prepared = resize_prepared(prepared, self.devices)
        if self.bandwidth is not None or self.latency_s is not None:
            prepared = prepared.changed(cluster=with_links(prepared.cluster, self.bandwidth, self.latency_s))
        costs = prepared.costs
        if self.free_communication:
            costs = without_communication(costs)
        if self.perfect_balance:
            costs = with_perfect_balance(costs)
        return replace(prepared, costs=costs)


def measure_plan(
    plan: Plan, cluster: Cluster | None, measuring: Measuring, progress: Progress, *, all_schedules: bool = False
) -> PreparedPlan:
    """Measure what a forecast needs; wrong input is refused before anything is measured.

    With `all_schedules` the split backward is measured too, for schedules other than the plan's.
    """
    check_names("axis", [measuring.innermost], AXES)
    if cluster is not None:
        if cluster.num_devices < plan.mesh.num_workers:
            Topology(mesh=plan.mesh, cluster=cluster)  # raises an error with both numbers
        check_kind(plan.devices[0] if plan.devices else default_devices(1)[0], cluster, measuring.rescale)
    devices = plan.devices if plan.devices and Device.parse(plan.devices[0]).kind == "cuda" else ()
    calibration = load_calibration(measuring.cache_folder, devices=devices, progress=progress.note)
    measured = measuring.measure(plan, max(plan_microbatch_sizes(plan)) if all_schedules else None, progress)
    if cluster is None:
        cluster = calibration.cluster(plan.mesh.num_workers)

    def measure(other: Plan, size: int | None) -> ModelCosts:
        return measuring.measure(other, size, progress)

    return prepare_plan(
        plan,
        measured,
        cluster,
        calibration.overheads_on(cluster),
        innermost=measuring.innermost,
        rescale=measuring.rescale,
        source=source_for_plan(plan, measured, measure, repeats=measuring.repeats),
    )


@overload
def forecast(
    plan: Plan | str | Path,
    *,
    cluster: Cluster | str | Path | None = None,
    analytic: Literal[False] = False,
    progress: Progress = SILENT,
    **options: Any,
) -> Forecast: ...


@overload
def forecast(
    plan: Plan | Layout | str | Path,
    *,
    cluster: Cluster | str | Path | None = None,
    analytic: Literal[True],
    model: TransformerShape | Mapping[str, Any] | str | Path | None = None,
    sequence_length: int | None = None,
    innermost: Axis = "pipeline",
    efficiency: float | None = None,
) -> AnalyticForecast: ...


def forecast(
    plan: Plan | Layout | str | Path,
    *,
    cluster: Cluster | str | Path | None = None,
    analytic: bool = False,
    model: TransformerShape | Mapping[str, Any] | str | Path | None = None,
    sequence_length: int | None = None,
    progress: Progress = SILENT,
    **options: Any,
) -> Forecast | AnalyticForecast:
    """Predict a plan's step: time, speed-up, the timeline of every worker, memory and bytes sent.

    The model's units are measured on this machine, or taken from the cache. With `analytic`, formulas take the place
    of measurements, for hardware that is not at hand; the plan may then also be a layout, which states what the engine
    does not run (sequence, context and expert parallelism, ZeRO, selective recomputation).

    Args:
        plan: A plan, or the path of its file; with `analytic` also a layout, like ``"tp=8,pp=8,mbs=1,m=64,sp"``.
        cluster: Where it would run: a cluster, the path of its file, or a name such as ``8xh100`` or ``32x8xa100``;
            by default this machine.
        analytic: Whether to use formulas instead of measurements.
        model: With `analytic`: a configuration, a folder with one, or a name such as ``gpt3-175b``; by default the
            plan's model.
        sequence_length: With `analytic`: tokens of a sample.
        progress: Receives notes while the model is measured.
        options: What to change (``free_communication``, ``perfect_balance``, ``bandwidth`` in bytes per second,
            ``latency_s``, ``devices``, ``infinite_devices``) and how to measure (``repeats``, ``fresh``, ``cache``,
            ``rescale``, ``innermost``); with `analytic` only ``innermost`` and ``efficiency``, the share of the peak
            that matrix products reach.

    Example:
        forecast = sw.forecast("plan.toml", repeats=1)
        print(forecast.step_s, forecast.speedup)
        print(sw.forecast("plan.toml", repeats=1, free_communication=True).speedup)
        large = sw.forecast("tp=8,pp=8,m=64,sp", model="gpt3-175b", cluster="8x8xa100", analytic=True)
        print(large.step_s, large.mfu)
    """
    if analytic:
        check_names("option of an analytic forecast", options, ["innermost", "efficiency"])
        return forecast_analytic(plan, cluster, model, sequence_length, **options)
    if model is not None or sequence_length is not None or isinstance(plan, Layout):
        raise UsageError("model, sequence_length and layouts belong to analytic forecasts: add analytic=True")
    what_if, measuring = _options(options)
    return what_if.apply(measure_plan(load_plan(plan), load_cluster(cluster), measuring, progress)).forecast()


def explain(
    run_or_plan: Plan | str | Path,
    *,
    cluster: Cluster | str | Path | None = None,
    progress: Progress = SILENT,
    **options: Any,
) -> Explanation:
    """Split the gap between n × and the actual speed-up into its causes, and name the change that gains most.

    Args:
        run_or_plan: A plan, the path of its file, or a run folder; a run is explained by its own measurements.
        cluster: Where the plan would run; by default this machine.
        progress: Receives notes while the model is measured.
        options: As for `forecast`.

    Example:
        explanation = sw.explain("plan.toml", repeats=1)
        print(explanation)
        print(explanation.advice)
    """
    what_if, measuring = _options(options)
    return explain_target(run_or_plan, load_cluster(cluster), what_if, measuring, progress)[0]


def explain_target(
    run_or_plan: Plan | str | Path, cluster: Cluster | None, what_if: WhatIf, measuring: Measuring, progress: Progress
) -> tuple[Explanation, PreparedPlan]:
    """Explain a run or a plan; also return what the forecast was made from."""
    run = None
    if not isinstance(run_or_plan, Plan):
        path = Path(run_or_plan)
        if path.is_dir():
            run = RunFolder.open(path)
        elif not path.exists():
            raise UsageError(f"there is no run or plan {path}; `stagewright runs` lists the runs")
        if run is not None and (what_if or cluster is not None):
            raise UsageError(
                f"a run has its own measurements, so what-if options do not apply; explain its plan: explain "
                f"{path}/plan.toml"
            )
    plan = run.plan() if run is not None else load_plan(run_or_plan)
    prepared = measure_plan(plan, cluster, measuring, progress, all_schedules=True)
    if run is not None:
        return explain_run(prepared, run), prepared
    prepared = what_if.apply(prepared)
    return explain_plan(prepared, changes=not what_if.is_hypothetical), prepared


def _options(options: dict[str, Any]) -> tuple[WhatIf, Measuring]:
    """Split keyword arguments into what to change and how to measure."""
    check_names("option", options, [*WhatIf.__dataclass_fields__, *Measuring.__dataclass_fields__])
    return pop_fields(WhatIf, options), pop_fields(Measuring, options)


def search_order(plan: Plan, progress: Progress) -> Plan:
    """Measure the model and search the plan's order, if it has none; a plan that would be refused stays as it is."""
    if not lacks_order(plan):
        return plan
    try:
        check_plan(plan)
    except UsageError:
        return plan
    progress.note(f"{plan.mesh.strategy}: measuring, and searching the order of actions …")
    return measure_plan(plan, None, Measuring(), progress).plan
