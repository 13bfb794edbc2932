"""How fast: samples a second, speed-up against the ideal, and why it is not n."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stagewright.quantity import format_s
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import Bar, BarChart, BarPart, Section, Table, folded
from stagewright.report.page.slug import slug
from stagewright.runs.baseline import is_alike
from stagewright.trace.breakdown import PARTS, breakdown

__all__ = ["speed_section", "why_section"]

# What takes from n ×, as events show it.
_WORDS = {
    "compute": "the same work took longer than serial's share of it: crowded cores, small pieces, what all do again",
    "transfer": "messages being handed over, encoded, decoded and on their way",
    "collective": "sums and gathers that were waited for",
    "wait": "waiting for a peer that was late",
    "bubble": "waiting that the schedule makes: fill and drain",
    "overhead": "the engine's own work between all that",
}


def speed_section(runs: Sequence[RunData]) -> Section | None:
    """Bars of throughput and speed-up; for a single run there is nothing to compare, so no chart."""
    timed = [run for run in runs if run.status == "done" and run.result.get("samples_per_s")]
    groups: list[list[RunData]] = []
    for run in timed:
        own = next((group for group in groups if _comparable(group[0], run)), None)
        if own is None:
            groups.append([run])
        else:
            own.append(run)
    names: list[str] = []
    for group in groups:
        name = _what(group[0], groups)
        before = sum(one == name or one.startswith(f"{name} #") for one in names)
        names.append(f"{name} #{before + 1}" if before else name)
    rates = tuple(
        _rates(group, name, several=len(groups) > 1)
        for group, name in zip(groups, names, strict=True)
        if len(group) > 1
    )
    if not rates:
        return None
    speedups = [(run, run.speedup) for run in timed if run.speedup is not None]
    gains = BarChart(
        name="speed-up",
        title="Speed-up over serial, against the ideal",
        quantity="times",
        mark_name="ideal: as many times as there are workers",
        in_table=True,
        bars=tuple(
            Bar(
                label=run.label,
                parts=(BarPart(name="", paint=run.paint, start=0.0, end=speedup),),
                text=f"{speedup:.2f} × of {run.plan.mesh.num_workers}",
                mark=float(run.plan.mesh.num_workers),
            )
            for run, speedup in speedups
            if speedup is not None
        ),
    )
    parallel = any(run.plan.mesh.num_workers > 1 for run, _ in speedups)
    if parallel:
        return Section(name="speed", title="Speed", items=(*rates, gains))
    reason = "No speed-up is shown: no parallel run here is proven equal to a serial run of the same batch."
    return Section(name="speed", title="Speed", prose=(reason,), items=rates)


def _comparable(one: RunData, other: RunData) -> bool:
    """Whether the runs are of one comparison: rates of others say nothing beside each other."""
    if one.plan.task is not None or other.plan.task is not None:
        return (one.plan.model.name, one.plan.task) == (other.plan.model.name, other.plan.task)
    return is_alike(one.plan, other.plan)


def _what(run: RunData, groups: Sequence[Sequence[RunData]]) -> str:
    """A comparison's name: its model, and what tells it from others of that model."""
    plan = run.plan
    if plan.task is not None:
        return f"{plan.model.name} on {plan.task}"
    others = [group[0].plan for group in groups if group[0].plan.task is None]
    others = [other for other in others if other.model.name == plan.model.name]
    device = plan.devices[0].partition(":")[0] if plan.devices else ""
    words = {
        f"batch {plan.batch}": any(other.batch != plan.batch for other in others),
        plan.dtype: any(other.dtype != plan.dtype for other in others),
        "training" if plan.training else "inference": any(other.training != plan.training for other in others),
        device: any(other.devices and other.devices[0].partition(":")[0] != device for other in others),
    }
    return ", ".join([plan.model.name, *(word for word, differs in words.items() if differs)])


def _rates(runs: Sequence[RunData], what: str, *, several: bool) -> BarChart:
    """Runs of one comparison."""
    return BarChart(
        name=f"throughput-{slug(what)}" if several else "throughput",
        title=f"{what}: samples a second" if several else "Samples a second",
        quantity="number",
        in_table=True,
        bars=tuple(
            Bar(
                label=run.label,
                parts=(BarPart(name="", paint=run.paint, start=0.0, end=run.result["samples_per_s"]),),
                text=f"{run.result['samples_per_s']:.1f}/s",
            )
            for run in runs
        ),
    )


def why_section(runs: Sequence[RunData]) -> Section | None:
    """From n × down to what was reached, a bar for each reason."""
    parallel = [run for run in runs if run.is_timed and run.plan.mesh.num_workers > 1]
    if not parallel:
        return None
    items: list[BarChart | Table] = []
    reasons: list[str] = []
    for run in parallel:
        if run.explanation is not None:
            items += _explained(run)
        elif run.serial_s is None:
            reasons.append(f"{run.label}: no serial run of the same batch is known.")
        elif run.trace is None:
            reasons.append(f"{run.label}: {run.missing.get('trace', 'there are no events')}.".replace("..", "."))
        else:
            items.append(_measured(run))
    if not items:
        reasons.insert(0, "There is nothing to show here.")
    return Section(name="why", title="Why the speed-up is not n", prose=tuple(reasons), items=folded(items, "runs"))


def _explained(run: RunData) -> list[BarChart | Table]:
    """By the planner: differences between forecasts, the rest unexplained."""
    from stagewright.simulator.what_if import PARTS as MEANINGS

    assert run.explanation is not None
    parts, change = run.explanation.parts, run.explanation.change
    steps = _large({part.name: part.seconds for part in parts.parts}, parts.step_s)
    advice = (
        "No change that was tried gains 1 %."
        if change is None
        else f"What would gain most: {change.what}, {change.gain:+.0%} by forecast."
    )
    chart = _waterfall(run, parts.serial_s, parts.ideal_s, steps, parts.step_s, "explained", note=advice)
    rows = tuple(
        (name, format_s(seconds).replace("-", "−"), MEANINGS.get(name, "each below 0.3 %")) for name, seconds in steps
    )
    return [chart, Table(head=("part", "time", "what it is"), rows=rows, right=frozenset((1,)))]


def _measured(run: RunData) -> BarChart:
    """By the events: what the workers did on average beside serial's share."""
    assert run.trace is not None
    assert run.serial_s is not None
    shares = breakdown(run.trace, run.trace.median_step)
    each = len(shares) * run.batches_a_step
    mean = {name: sum(one.parts()[name] for one in shares) / each for name in PARTS}
    ideal = run.serial_s / run.plan.mesh.num_workers
    step = sum(mean.values())
    mean["compute"] -= ideal
    steps = _large(mean, step)
    told = "; ".join(f"{name}: {_WORDS[name]}" for name, _ in steps if name in _WORDS)
    batch = "" if run.batches_a_step == 1 else f" of a stream of {run.batches_a_step} batches, for one of them"
    note = f"Means over workers in step {run.trace.median_step}{batch}, which took {format_s(step)}. {told}."
    return _waterfall(run, run.serial_s, ideal, steps, step, "measured", note=note)


def _large(parts: Mapping[str, float], step_s: float) -> list[tuple[str, float]]:
    """The parts that can be seen, and the others as one, so that all still add up."""
    steps = [(name, seconds) for name, seconds in parts.items() if abs(seconds) >= 0.003 * step_s]
    rest = sum(parts.values()) - sum(seconds for _, seconds in steps)
    return steps if abs(rest) < 1e-4 * step_s else [*steps, ("smaller parts", rest)]


def _waterfall(
    run: RunData,
    serial_s: float,
    ideal_s: float,
    steps: Sequence[tuple[str, float]],
    step_s: float,
    how: str,
    *,
    note: str,
) -> BarChart:
    """In speed-up: each part takes what the step's time becomes longer by."""
    count = run.plan.mesh.num_workers

    def bar(name: str, paint: str, start: float, end: float, text: str) -> Bar:
        return Bar(label=name, parts=(BarPart(name="", paint=paint, start=start, end=end, hint=text),), text=text)

    bars = [bar(f"{count} workers", "tone-ideal", 0.0, float(count), f"{count:.2f} × in {format_s(ideal_s)}")]
    at, now = float(count), ideal_s
    for name, seconds in steps:
        now += seconds
        after = serial_s / now if now > 0 else at
        sign = "+" if seconds > 0 else "−"
        text = f"{after - at:+.2f} ×, {sign} {format_s(abs(seconds))}".replace("-", "−")
        bars.append(bar(name, "tone-bad" if seconds > 0 else "tone-good", min(at, after), max(at, after), text))
        at = after
    bars.append(bar("reached", run.paint, 0.0, serial_s / step_s, f"{serial_s / step_s:.2f} × in {format_s(step_s)}"))
    title = f"{run.label}: from {count} × down to what was reached ({how})"
    return BarChart(name=f"why-{slug(run.label)}", title=title, quantity="times", bars=tuple(bars), note=note)
