"""The best plans of a search, what they are beside, and what came of running them."""

from __future__ import annotations

from rich import box
from rich.table import Table

from stagewright.planner.search.search import Found, Ranked
from stagewright.planner.search.verify import Verified
from stagewright.quantity import format_bytes, format_s

__all__ = ["codec_remark", "plan_remarks", "plan_table", "verified_table"]


def plan_table(found: Found, title: str) -> Table:
    """The best first; below them what they are beside, always: one device alone, and plain data parallel."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("", justify="right")
    table.add_column("mesh", style="bold", no_wrap=True)
    table.add_column("micro-batches", justify="right")
    table.add_column("schedule", no_wrap=True)
    table.add_column("recompute", no_wrap=True)
    for name in ("step", "samples/s", "speed-up", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what it loses by")
    for place, one in enumerate(found.best, start=1):
        table.add_row(str(place), *_cells(one))
    known = [one.plan for one in found.best]
    beside = [one for one in (found.serial, found.data_parallel) if one is not None and one.plan not in known]
    if beside:
        table.add_section()
    for one in beside:
        table.add_row("", *_cells(one), style="dim")
    return table


def _mesh(mesh: str, shard: bool) -> str:
    return mesh + (" sharded" if shard else "")


def _cells(one: Ranked) -> list[str]:
    forecast, plan = one.forecast, one.plan
    memory = format_bytes(forecast.peak_memory_bytes) + ("" if forecast.fits else " (too much)")
    return [
        _mesh(str(plan.mesh), plan.shard),
        str(plan.microbatches),
        plan.schedule if plan.mesh.pipeline > 1 else "–",
        str(plan.recompute),
        format_s(forecast.step_s),
        f"{forecast.samples_per_s:.4g}",
        f"{forecast.speedup:.2f} ×",
        memory,
        one.reason,
    ]


def plan_remarks(found: Found) -> list[str]:
    """How the search went, and why strategies that are not among the best lose."""
    lines = [
        f"{found.num_plans} plans, {found.num_exact} of them forecast exactly, {found.num_unfit} did not fit, "
        f"in {found.seconds:.1f} s"
    ]
    lines += [f"{strategy}: {why}" for strategy, why in found.losers.items()]
    if found.data_parallel is None:
        lines.append("plain data parallel: the batch has fewer samples than there are devices")
    elif not found.data_parallel.forecast.fits:
        lines.append("plain data parallel does not fit")
    else:
        gain = found.data_parallel.forecast.step_s / found.best[0].forecast.step_s
        lines.append(f"the best is {gain:.2f} × as fast as plain data parallel")
    lines.append("speed-up is over one device alone; memory has the optimiser's states in it")
    above = max(found.best, key=lambda one: one.forecast.speedup / one.plan.mesh.num_workers)
    if round(above.forecast.speedup, 2) > above.plan.mesh.num_workers:
        lines.append(
            f"{above.forecast.speedup:.2f} × on {above.plan.mesh.num_workers} devices is more than there are: "
            f"{_why_above(found)}"
        )
    return lines


def _why_above(found: Found) -> str:
    if found.is_serial_by_line:
        return "one device was forecast from smaller micro-batches, since its own would take long to measure"
    if found.serial is not None and found.serial.plan.microbatches > 1:
        return f"one device takes {found.serial.plan.microbatches} micro-batches and adds up their gradients"
    return "smaller pieces take less for each sample than the whole batch, or the machine changed between measurements"


def codec_remark(found: Found) -> str:
    """What a codec on the links would gain over the best plan."""
    one = found.with_codec
    if one is None:
        return "no codec on the links makes any plan quicker than the best"
    gain = found.best[0].forecast.step_s / one.forecast.step_s
    return (
        f"with {one.codec} on its links, {one.plan.mesh} ({one.plan.microbatches} micro-batches, {one.plan.schedule}) "
        f"would take {format_s(one.forecast.step_s)}, {gain:.2f} × as fast as the best; it changes values: "
        f"--codecs {one.codec} takes it"
    )


def verified_table(verified: Verified) -> Table:
    """Predicted beside measured; a plan has the number that it has among the best."""
    table = Table(
        title="run on this machine",
        caption=f"regret of taking the first: {verified.regret:.1%}"
        + ("; forecasts were off, so this machine was measured again" if verified.recalibrated else "")
        + "".join(f"\nnot run: {why}" for why in verified.left_out),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", justify="right")
    table.add_column("mesh", style="bold")
    table.add_column("micro-batches", justify="right")
    table.add_column("schedule")
    table.add_column("recompute")
    for name in ("forecast", "measured", "error", "memory forecast", "measured memory"):
        table.add_column(name, justify="right")
    table.add_column("equal")
    for one in verified.plans:
        table.add_row(
            str(one.place),
            _mesh(one.mesh, one.shard),
            str(one.microbatches),
            one.schedule if "pipeline" in one.mesh else "–",
            one.recompute,
            format_s(one.forecast_s),
            format_s(one.measured_s),
            f"{one.error:+.1%}",
            format_bytes(one.forecast_memory_bytes),
            format_bytes(one.measured_memory_bytes),
            "[green]yes[/green]" if one.equal else "[red]NO[/red]",
        )
    return table
