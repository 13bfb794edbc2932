"""The best plans of a search as tables, and remarks on the search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagewright.planner.search.result import RankedPlan, SearchResult
from stagewright.planner.search.verify import VerifiedPlan, VerifiedPlans
from stagewright.quantity import format_bytes, format_s
from stagewright.spec.activation_checkpointing import describe_recompute
from stagewright.spec.plan import Plan
from stagewright.spec.strategy import sharding_name
from stagewright.table import Cell, Table, number_columns, text_columns

if TYPE_CHECKING:
    from stagewright.api.plan import PlanResult

_PLAN_COLUMNS = (
    *number_columns(""),
    *text_columns("mesh"),
    *number_columns("micro-batches"),
    *text_columns("schedule", "recompute"),
)


def plan_result_table(result: PlanResult) -> Table:
    """Tabulate the result of `stagewright.plan`."""
    base = result.base
    devices = f"{result.cluster.num_devices} devices"
    title = f"{base.model.name}: batch {base.batch}, {base.precision}, {base.optimizer.name}, {devices}, forecast"
    return plan_table(result.search, title)


def plan_table(result: SearchResult, title: str) -> Table:
    """Tabulate the best plans, then one device alone and plain data parallelism for comparison."""
    plans = [ranked.plan for ranked in result.best]
    references = [
        ranked for ranked in (result.serial, result.data_parallel) if ranked is not None and ranked.plan not in plans
    ]
    priced = result.best[0].price_per_step is not None
    rows: list[tuple[str | Cell, ...]] = [
        (str(rank), *_format_plan(ranked, priced)) for rank, ranked in enumerate(result.best, start=1)
    ]
    rows += [tuple(Cell(text, "faint") for text in ("", *_format_plan(ranked, priced))) for ranked in references]
    return Table(
        title=title,
        columns=(
            *_PLAN_COLUMNS,
            *number_columns("step", "samples/s", "speed-up", "memory", *(["cost of a step"] if priced else [])),
            *text_columns("main loss", wrap=True),
        ),
        rows=tuple(rows),
    )


def _format_mesh(plan: Plan | VerifiedPlan) -> str:
    return f"{plan.mesh} {sharding_name(plan.shard, plan.zero, plan.fsdp_gather, plan.fsdp_shards)}".rstrip()


def _format_plan(ranked: RankedPlan, priced: bool) -> list[str]:
    forecast, plan = ranked.forecast, ranked.plan
    memory = format_bytes(forecast.peak_memory_bytes) + ("" if forecast.fits else " (too much)")
    return [
        _format_mesh(plan),
        str(plan.microbatches),
        plan.schedule if plan.mesh.pipeline > 1 else "–",
        describe_recompute(plan),
        format_s(forecast.step_s),
        f"{forecast.samples_per_s:.4g}",
        f"{forecast.speedup:.2f} ×",
        memory,
        *(["–" if ranked.price_per_step is None else f"{ranked.price_per_step:.4g}"] if priced else []),
        ranked.reason,
    ]


def plan_remarks(result: SearchResult) -> list[str]:
    """Summarize the search, and say why strategies that are not among the best are slower."""
    how = "forecast by formulas" if result.best[0].costs is None else "simulated exactly"
    lines = [
        f"{result.num_plans} plans, {result.num_exact} of them {how}, {result.num_unfit} did not fit, "
        f"in {result.seconds:.1f} s"
    ]
    lines += [f"{strategy}: {reason}" for strategy, reason in result.losers.items()]
    if result.data_parallel is None:
        lines.append("plain data parallel: the batch has fewer samples than there are devices")
    elif not result.data_parallel.forecast.fits:
        lines.append("plain data parallel does not fit")
    else:
        gain = result.data_parallel.forecast.step_s / result.best[0].forecast.step_s
        lines.append(f"the best plan is {gain:.2f} × as fast as plain data parallel")
    lines.append("speed-up is over the single-device baseline; memory includes optimizer states")
    steepest = max(result.best, key=lambda ranked: ranked.forecast.speedup / ranked.plan.mesh.num_workers)
    if round(steepest.forecast.speedup, 2) > steepest.plan.mesh.num_workers:
        lines.append(
            f"{steepest.forecast.speedup:.2f} × on {steepest.plan.mesh.num_workers} devices is superlinear: "
            f"{_explain_superlinear(result, steepest)}"
        )
    return lines


def _explain_superlinear(result: SearchResult, steepest: RankedPlan) -> str:
    if result.is_serial_interpolated:
        return "the baseline was forecast from smaller micro-batches, because the whole batch takes long to measure"
    if result.serial is not None and result.serial.plan.microbatches > steepest.plan.microbatches:
        return f"the baseline accumulates gradients over {result.serial.plan.microbatches} micro-batches"
    return "small micro-batches take less time per sample than the whole batch, or the machine's speed changed"


def codec_remark(result: SearchResult) -> str:
    """Say what a codec on the links would gain over the best plan."""
    ranked = result.with_codec
    if ranked is None:
        return "no codec on the links makes any plan faster than the best"
    plan, gain = ranked.plan, result.best[0].forecast.step_s / ranked.forecast.step_s
    return (
        f"with {ranked.codec} on its links, {plan.mesh} ({plan.microbatches} micro-batches, {plan.schedule}) "
        f"would take {format_s(ranked.forecast.step_s)}, {gain:.2f} × as fast as the best; it is lossy: "
        f"--codecs {ranked.codec} allows it"
    )


def verified_table(verified: VerifiedPlans) -> Table:
    """Tabulate forecast and measured values of the plans that ran, numbered as in the ranking."""
    rows: list[tuple[str | Cell, ...]] = [
        (
            str(plan.place),
            _format_mesh(plan),
            str(plan.microbatches),
            plan.schedule if "pipeline" in plan.mesh else "–",
            plan.recompute,
            format_s(plan.forecast_s),
            format_s(plan.measured_s),
            f"{plan.error:+.1%}",
            format_bytes(plan.forecast_memory_bytes),
            format_bytes(plan.measured_memory_bytes),
            Cell("ok", "good") if plan.equal else Cell("NO", "bad"),
        )
        for plan in verified.plans
    ]
    recalibrated = "; forecasts were off, so this machine was measured again" if verified.recalibrated else ""
    return Table(
        title="Measured on this machine",
        columns=(
            *_PLAN_COLUMNS,
            *number_columns("forecast", "measured", "error", "forecast memory", "measured memory"),
            *text_columns("parity"),
        ),
        rows=tuple(rows),
        notes=(
            f"regret of the first plan: {verified.regret:.1%}{recalibrated}",
            *(f"not run: {reason}" for reason in verified.left_out),
        ),
    )
