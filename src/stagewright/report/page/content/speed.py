"""Sections on speed: throughput, speed-up over the single-device baseline, and where the speed-up is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stagewright.quantity import format_s
from stagewright.report.headline import Candidate, headline, speedup_losses
from stagewright.report.page.content.overview import failure_sentence
from stagewright.report.page.content.runs import RunData, number_repeats
from stagewright.report.page.sections import BarChart, Section, fold_items, plain_bar, slug
from stagewright.runs.baseline import is_comparable
from stagewright.table import Table, number_columns, text_columns

_PART_DESCRIPTIONS = {
    "compute": "computation beyond the baseline's share: contention, micro-batching overhead, redundant work",
    "transfer": "exposed P2P communication, with codecs",
    "collective": "exposed collective communication",
    "wait": "waiting for a late peer (straggler)",
    "bubble": "pipeline bubble: warm-up and drain of the schedule",
    "overhead": "the engine's own work in between",
}


def speed_section(runs: Sequence[RunData]) -> Section | None:
    """Show throughput and speed-up as bars; a single run has nothing to compare with."""
    timed = [run for run in runs if run.status == "done" and run.result.samples_per_s]
    groups = _comparable_groups(timed)
    names = number_repeats(_group_name(group[0], groups) for group in groups)
    throughput = tuple(
        _throughput_chart(group, name, with_name=len(groups) > 1)
        for group, name in zip(groups, names, strict=True)
        if len(group) > 1
    )
    if not throughput:
        return None
    title = "Throughput and speed-up"
    speedups = [(run, run.speedup) for run in timed if run.speedup is not None]
    if any(run.plan.mesh.num_workers > 1 for run, _ in speedups):
        return Section(name="speed", title=title, items=(*throughput, _speedup_chart(speedups)))
    reason = "No speed-up: no parallel run here is verified against a single-device baseline of the same batch."
    return Section(name="speed", title=title, prose=(reason,), items=throughput)


def result_section(runs: Sequence[RunData]) -> Section | None:
    """Lead with the answer of each comparison, then with the reasons of runs that have no result."""
    groups = _comparable_groups([run for run in runs if run.is_timed])
    names = number_repeats(_group_name(group[0], groups) for group in groups)
    sentences = []
    for group, name in zip(groups, names, strict=True):
        prefix = f"{name}: " if len(groups) > 1 else ""
        sentences += [f"{prefix}{sentence}" for sentence in headline([_candidate(run) for run in group])]
    sentences += [failure_sentence(run) for run in runs if run.result.error]
    return Section(name="result", title="Result", prose=tuple(sentences)) if sentences else None


def _candidate(run: RunData) -> Candidate:
    losses = {}
    if run.trace is not None and run.baseline_s is not None:
        losses = speedup_losses(run.trace, run.baseline_s, run.plan.mesh.num_workers, run.batches_per_step)
    return Candidate(result=run.result, speedup=run.speedup, losses=losses)


def _comparable_groups(runs: Sequence[RunData]) -> list[list[RunData]]:
    groups: list[list[RunData]] = []
    for run in runs:
        group = next((group for group in groups if _is_comparable(group[0], run)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return groups


def _speedup_chart(speedups: Sequence[tuple[RunData, float]]) -> BarChart:
    return BarChart(
        name="speed-up",
        title="Speed-up over the single-device baseline",
        quantity="times",
        mark_name="ideal: number of workers",
        in_table=True,
        bars=tuple(
            plain_bar(
                run.label,
                run.paint,
                speedup,
                f"{speedup:.2f} × of {run.plan.mesh.num_workers}",
                mark=float(run.plan.mesh.num_workers),
            )
            for run, speedup in speedups
        ),
    )


def _is_comparable(first: RunData, second: RunData) -> bool:
    """Whether two runs belong to one comparison, so that their throughputs can share a chart."""
    if first.plan.task is not None or second.plan.task is not None:
        return (first.plan.model.name, first.plan.task) == (second.plan.model.name, second.plan.task)
    return is_comparable(first.plan, second.plan)


def _group_name(run: RunData, groups: Sequence[Sequence[RunData]]) -> str:
    """Name a comparison by its model, and by what distinguishes it from others of that model."""
    plan = run.plan
    if plan.task is not None:
        return f"{plan.model.name} on {plan.task}"
    plans = [group[0].plan for group in groups if group[0].plan.task is None]
    plans = [other for other in plans if other.model.name == plan.model.name]
    device = plan.devices[0].partition(":")[0] if plan.devices else ""
    words = {
        f"batch {plan.batch}": any(other.batch != plan.batch for other in plans),
        plan.precision: any(other.precision != plan.precision for other in plans),
        "training" if plan.training else "inference": any(other.training != plan.training for other in plans),
        device: any(other.devices and other.devices[0].partition(":")[0] != device for other in plans),
    }
    return ", ".join([plan.model.name, *(word for word, differs in words.items() if differs)])


def _throughput_chart(runs: Sequence[RunData], name: str, *, with_name: bool) -> BarChart:
    return BarChart(
        name=f"throughput-{slug(name)}" if with_name else "throughput",
        title=f"{name}: throughput (samples/s)" if with_name else "Throughput (samples/s)",
        quantity="number",
        in_table=True,
        bars=tuple(
            plain_bar(run.label, run.paint, run.result.samples_per_s, f"{run.result.samples_per_s:.1f}/s")
            for run in runs
        ),
    )


def speedup_breakdown_section(runs: Sequence[RunData]) -> Section | None:
    """Show how each parallel run gets from the ideal speed-up n to its actual one."""
    parallel = [run for run in runs if run.is_timed and run.plan.mesh.num_workers > 1]
    if not parallel:
        return None
    items: list[BarChart | Table] = []
    reasons: list[str] = []
    for run in parallel:
        if run.explanation is not None:
            items += _explained_items(run)
        elif run.baseline_s is None:
            reasons.append(f"{run.label}: there is no single-device baseline of the same batch.")
        elif run.trace is None:
            reasons.append(f"{run.label}: {run.missing.get('trace', 'no events')}.".replace("..", "."))
        else:
            items.append(_measured_chart(run))
    if not items:
        reasons.insert(0, "No run has a breakdown.")
    items_shown = fold_items(items, "runs")
    return Section(name="speedup-breakdown", title="Speed-up breakdown", prose=tuple(reasons), items=items_shown)


def _explained_items(run: RunData) -> list[BarChart | Table]:
    """Break the speed-up down by forecasts that differ in one cost each; the rest is unexplained."""
    from stagewright.simulator.what_if import LOSSES

    assert run.explanation is not None
    parts, change = run.explanation.parts, run.explanation.change
    losses = _visible_losses({part.name: part.seconds for part in parts.parts}, parts.step_s)
    advice = (
        "No tested change gains 1 %."
        if change is None
        else f"The change with the largest gain: {change.what}, {change.gain:+.0%} by forecast."
    )
    chart = _waterfall(run, parts.serial_s, parts.ideal_s, losses, parts.step_s, "explained", note=advice)
    table = Table(
        columns=(*text_columns("loss"), *number_columns("time"), *text_columns("description", wrap=True)),
        rows=tuple(
            (name, format_s(seconds).replace("-", "−"), LOSSES.get(name, "each below 0.3 %"))
            for name, seconds in losses
        ),
    )
    return [chart, table]


def _measured_chart(run: RunData) -> BarChart:
    """Break the speed-up down by recorded events: mean over workers, compared with the baseline's share."""
    assert run.trace is not None
    assert run.baseline_s is not None
    ideal_s = run.baseline_s / run.plan.mesh.num_workers
    all_losses = speedup_losses(run.trace, run.baseline_s, run.plan.mesh.num_workers, run.batches_per_step)
    step_s = ideal_s + sum(all_losses.values())
    losses = _visible_losses(all_losses, step_s)
    legend = "; ".join(f"{name}: {_PART_DESCRIPTIONS[name]}" for name, _ in losses if name in _PART_DESCRIPTIONS)
    batch = f", a stream of {run.batches_per_step} batches, per batch" if run.batches_per_step > 1 else ""
    note = f"Mean over workers in step {run.trace.median_step}{batch}: {format_s(step_s)}. {legend}."
    return _waterfall(run, run.baseline_s, ideal_s, losses, step_s, "measured", note=note)


def _visible_losses(parts: Mapping[str, float], step_s: float) -> list[tuple[str, float]]:
    """Select the parts large enough to be seen; the others are summed, so that all still add up."""
    losses = [(name, seconds) for name, seconds in parts.items() if abs(seconds) >= 0.003 * step_s]
    rest = sum(parts.values()) - sum(seconds for _, seconds in losses)
    return losses if abs(rest) < 1e-4 * step_s else [*losses, ("other", rest)]


def _waterfall(
    run: RunData,
    baseline_s: float,
    ideal_s: float,
    losses: Sequence[tuple[str, float]],
    step_s: float,
    source: str,
    *,
    note: str,
) -> BarChart:
    """Draw each loss as the speed-up that its time costs."""
    count = run.plan.mesh.num_workers
    text = f"{count:.2f} × in {format_s(ideal_s)}"
    bars = [plain_bar(f"{count} workers", "tone-ideal", float(count), text, hint=text)]
    speedup, elapsed_s = float(count), ideal_s
    for name, seconds in losses:
        elapsed_s += seconds
        after = baseline_s / elapsed_s if elapsed_s > 0 else speedup
        text = f"{after - speedup:+.2f} ×, {'+' if seconds > 0 else '−'} {format_s(abs(seconds))}".replace("-", "−")
        paint = "tone-bad" if seconds > 0 else "tone-good"
        bars.append(plain_bar(name, paint, max(speedup, after), text, start=min(speedup, after), hint=text))
        speedup = after
    actual = baseline_s / step_s
    text = f"{actual:.2f} × in {format_s(step_s)}"
    bars.append(plain_bar("actual", run.paint, actual, text, hint=text))
    return BarChart(
        name=f"speedup-{slug(run.label)}",
        title=f"{run.label}: from the ideal {count} × to the actual speed-up ({source})",
        quantity="times",
        bars=tuple(bars),
        note=note,
    )
