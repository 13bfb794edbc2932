"""The second model of the study *stages*, which the policies cut differently. Pure.

Most policies cut a transformer of equal blocks alike, so no run can tell them apart. A convolutional network has most
of its MACs in early units and most of its parameters in late ones. It goes through the same parts as the first model;
their names begin with `contrast-`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.studies.framework.phrases import joined, percent, times
from stagewright.studies.framework.study import Part, PartContext, Results
from stagewright.studies.framework.tables import study_table
from stagewright.studies.stages.measured import MeasuredRun, baseline_rate, measured_runs, repeated_baselines
from stagewright.table import Table

_PREFIX = "contrast-"
_SHARED = ("calibration", "other-load")  # what both models read
_SHARES = ("parameters", "MACs", "units", "time")
_EQUAL = {"parameters": "parameters", "macs": "MACs", "blocks": "units"}
"""What a policy divides equally."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """The second model: how each policy cuts it into 2 stages, and how fast these are."""

    model: str
    mode: str
    splits: Mapping[str, Any]
    """By policy."""
    runs: tuple[MeasuredRun, ...]
    baseline_rate: float | None
    """Samples/s of one device."""

    @property
    def ordered(self) -> tuple[MeasuredRun, ...]:
        """The splits that have a speed-up, the fastest first."""
        known = (run for run in self.runs if run.speedup is not None)
        return tuple(sorted(known, key=lambda run: run.speedup or 0.0, reverse=True))

    @property
    def slower(self) -> tuple[MeasuredRun, ...]:
        """The splits that are slower than the fastest by more than the variation between runs."""
        return tuple(run for run in self.ordered[1:] if self.ordered[0].differs_from(run))


def contrast_part(part: Part, model: str) -> Part:
    """Turn a part of the study into the same part for the second model."""
    return replace(
        part,
        name=_PREFIX + part.name,
        about=f"{model}, {part.about}",
        needs=tuple(_PREFIX + name for name in part.needs),
        run=partial(_run_for_second, part.run),
    )


def _run_for_second(run: Callable[[PartContext], Any], context: PartContext) -> Any:
    return run(replace(context, results=_second_results(context.results)))


def _second_results(results: Mapping[str, Any]) -> Results:
    """The second model's results, under the names that the first model's have."""
    own = {name.removeprefix(_PREFIX): data for name, data in results.items() if name.startswith(_PREFIX)}
    return Results({name: results[name] for name in _SHARED if name in results} | own)


def read_contrast(results: Results, options: Mapping[str, Any] | None) -> Contrast | None:
    """Read what is known of the second model; None: there is none, or it was not profiled."""
    if options is None:
        return None
    own, mode = _second_results(results), options["modes"][0]
    saved = own.get(f"profile-{mode}")
    if saved is None:
        return None
    return Contrast(
        model=options["model"],
        mode=mode,
        splits=saved["splits"]["2"],
        runs=tuple(measured_runs(own, options, mode)),
        baseline_rate=baseline_rate(own, options, mode),
    )


def contrast_table(contrast: Contrast) -> Table:
    """What the first stage gets of everything, and how fast each split is."""
    rows = [
        (
            run.policies,
            ", ".join(split["cut_names"]),
            *(percent(share) for share in first_stage(split).values()),
            format_s(split["bottleneck_s"]),
            format_bytes(split["sends_bytes"]),
            f"{run.samples_per_s:.1f}",
            f"{run.speedup:.2f}" if run.speedup is not None else "–",
            run.range,
        )
        for run in contrast.ordered or contrast.runs
        for split in (contrast.splits[run.policy],)
    ]
    serial = contrast.baseline_rate
    over = f"over one device, {serial:.1f} samples/s" if serial else "over one device"
    return study_table(
        f"Policies on {contrast.model}: 2 stages, {contrast.mode}",
        ("policy", "cut after", *_SHARES, "bottleneck stage", "sent", "samples/s", "speed-up", "range"),
        rows,
        "Parameters, MACs, units, time: the share of the first stage; an ideal cut has half of the time. Bottleneck "
        f"stage and sent: for one micro-batch. Speed-up: {over}. {repeated_baselines(contrast.runs)}".rstrip(),
    )


def first_stage(split: Mapping[str, Any]) -> dict[str, float]:
    """The share of the first stage in the parameters, MACs, units and measured time of the model."""
    stages = split["stages"]
    amounts = [(stage["parameters"], stage["macs"], len(stage["units"]), stage["time_s"]) for stage in stages]
    return {name: each[0] / (sum(each) or 1) for name, each in zip(_SHARES, zip(*amounts, strict=True), strict=True)}


def explain_shares(contrast: Contrast) -> str:
    """Say what each policy divides equally, and what it makes of the time, by the profile."""
    texts = []
    for run in contrast.ordered:
        share = first_stage(contrast.splits[run.policy])
        texts += [
            f"{policy} gives the first stage {percent(share[_EQUAL[policy]])} of the {_EQUAL[policy]} and "
            f"{percent(share['time'])} of the time"
            for policy in (run.policy, *run.also)
            if policy in _EQUAL
        ]
    if not texts:
        return ""
    return (
        f"By the profile {'; '.join(texts)}. Parameters, MACs and blocks are not time: an early unit with wide "
        "activations reads and writes more memory for each MAC, and has few parameters."
    )


def contrast_summary(contrast: Contrast | None) -> tuple[str, str]:
    """What was measured and what to do, each a sentence; empty where the second model says nothing."""
    if contrast is None or len(contrast.ordered) < 2:
        return "", ""
    slower = contrast.slower
    rates = "; ".join(f"{run.policies} {times(run.speedup or 0.0)}" for run in contrast.ordered)
    measured = f" Policies that cut differently, {contrast.model} with 2 stages, {contrast.mode}: {rates}."
    good = [run.policies for run in contrast.ordered if run not in slower]
    advice = (
        f" Where policies cut differently, use {joined(good, 'or')}: on {contrast.model} faster than "
        f"{joined(run.policies for run in slower)}."
        if slower
        else f" On {contrast.model}, which the policies cut differently, their difference is within the noise."
    )
    return measured, advice
