"""The study *stages*: one device against 2, 3, 4, 6 pipeline stages by every split policy, inference and training.

    for each mode:  profile ─► split of every policy ─► forecast of every split
    for each round: single-device baseline ─► each split for which this machine has devices
    then:           the best run explained: where its time went, why its speed-up is below n
    second model:   profile ─► split of every policy; in each round baseline ─► each split (`contrast`)

Runs of one round are close in time, so a speed-up is a ratio within a round. Stages that share a core have no
meaningful speed-up: they are forecast, or with --oversubscribe run and marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from stagewright.cluster.device import num_separate
from stagewright.errors import UsageError
from stagewright.studies.framework.study import Findings, Part, PartContext, Results, Study, with_evidence
from stagewright.studies.parts.measurements import calibration, load_model_costs, measure_costs, prepare_forecast
from stagewright.studies.stages.answers import EVIDENCE, QUESTIONS, answers
from stagewright.studies.stages.contrast import contrast_part, read_contrast
from stagewright.studies.stages.measured import explained_results, measured_runs
from stagewright.studies.stages.options import Options
from stagewright.studies.stages.summary import summarize
from stagewright.studies.stages.tables import figures, tables


def build_study(options: Options) -> Study:
    second = options.contrast_options
    return Study(
        name="stages",
        title=f"Stages of {options.model}",
        options=asdict(options),
        questions=QUESTIONS,
        parts=tuple(_parts(options)),
        conclude=partial(conclude, asdict(options) | {"contrast_options": second and asdict(second)}),
    )


def conclude(options: Mapping[str, Any], results: Results) -> Findings:
    runs = {mode: measured_runs(results, options, mode) for mode in options["modes"]}
    results = explained_results(results, runs)
    contrast = read_contrast(results, options.get("contrast_options"))
    shown, drawn = tables(results, options, runs, contrast), figures(results, options, runs)
    return Findings(
        summary=summarize(results, options, runs, contrast),
        tables=shown,
        answers=with_evidence(answers(results, options, runs, contrast), EVIDENCE, shown, drawn),
        figures=drawn,
    )


def _parts(options: Options) -> Iterator[Part]:
    yield calibration(options.devices)
    for mode in options.modes:
        yield _profile_part(options, mode)
        yield Part(
            name=f"forecast-{mode}",
            about=f"forecast every split in {mode}",
            run=partial(_forecast, options, mode),
            needs=("calibration", f"profile-{mode}"),
        )
    yield from _run_parts(options)
    for mode in options.modes:
        yield Part(
            name=f"why-{mode}",
            about=f"explain the best pipeline in {mode}",
            run=partial(_explain, options, mode),
            needs=("calibration", f"profile-{mode}", f"run-{mode}-serial-1"),
        )
    second = options.contrast_options
    if second is not None:
        for part in (_profile_part(second, second.modes[0]), *_run_parts(second)):
            yield contrast_part(part, second.model)


def _profile_part(options: Options, mode: str) -> Part:
    return Part(
        name=f"profile-{mode}",
        about=f"profile the units in {mode}, and split by every policy",
        run=partial(_profile, options, mode),
    )


def _run_parts(options: Options) -> Iterator[Part]:
    """In each round the baseline and every split, so that those that are compared are close in time."""
    for round_number in range(1, options.rounds + 1):
        for mode in options.modes:
            yield Part(
                name=f"run-{mode}-serial-{round_number}",
                about=f"single-device baseline, {mode}, round {round_number} of {options.rounds}",
                run=partial(_run_serial, options, mode),
            )
            for count in options.run_stages:
                for policy in options.policies:
                    yield Part(
                        name=f"run-{mode}-{count}-{policy}-{round_number}",
                        about=f"pipeline, {count} stages by {policy}, {mode}, round {round_number} of {options.rounds}",
                        run=partial(_run, options, mode, count, policy, round_number),
                        needs=(f"profile-{mode}",),
                    )


def _profile(options: Options, mode: str, context: PartContext) -> dict[str, Any]:
    """Profile the model at the size of a micro-batch, and split it by every policy."""
    from stagewright.partition.conditions import Conditions
    from stagewright.partition.split import split

    measured = measure_costs(options.plan(mode, 2), repeats=options.repeats)
    profile = load_model_costs(measured).profile
    # Inference streams batches through a full pipeline: only the bottleneck stage matters.
    conditions = Conditions(num_microbatches=options.microbatches if mode == "training" else None)
    splits: dict[str, dict[str, Any]] = {}
    for count in options.stages:
        by_policy: dict[str, Any] = {}
        for policy in options.policies:
            try:
                by_policy[policy] = split(profile, count, policy, conditions).to_dict()
            except UsageError as error:
                by_policy[policy] = {"error": str(error)}
        splits[str(count)] = by_policy
    return {"measured": measured, "splits": splits}


def _cuts(splits: Mapping[str, Any], count: int, policy: str) -> tuple[str, ...]:
    """Return the cuts of a policy; UsageError if it can't split the model."""
    split = splits[str(count)][policy]
    if "error" in split:
        raise UsageError(split["error"])
    return tuple(split["cut_names"])


def _same_as(splits: Mapping[str, Any], count: int, policy: str) -> str | None:
    """Return an earlier policy with the same cuts."""
    cuts = splits[str(count)][policy].get("cut_names")
    for earlier, split in splits[str(count)].items():
        if earlier == policy:
            return None
        if split.get("cut_names") == cuts:
            return str(earlier)
    return None


def _forecast(options: Options, mode: str, context: PartContext) -> dict[str, Any]:
    """Forecast every split; record the error of a policy that can't split."""
    from stagewright.simulator.what_if import explain_speedup

    saved = context.results[f"profile-{mode}"]
    measured, splits = load_model_costs(saved["measured"]), saved["splits"]
    data: dict[str, Any] = {}
    for count in options.stages:
        data[str(count)] = {}
        for policy in options.policies:
            try:
                plan = options.plan(mode, count, _cuts(splits, count, policy))
                prepared = prepare_forecast(plan, measured, context.results["calibration"], options.cluster)
            except UsageError as error:
                data[str(count)][policy] = {"error": str(error)}
                continue
            forecast, parts = prepared.forecast(), explain_speedup(prepared.costs)
            data[str(count)][policy] = {
                "samples_per_s": forecast.samples_per_s,
                "step_s": forecast.step_s,
                "speedup": forecast.speedup,
                "parts": [{"name": part.name, "seconds": part.seconds} for part in parts.parts],
            }
    return data


def _run_serial(options: Options, mode: str, context: PartContext) -> dict[str, Any]:
    forecasts = (context.results.get(f"forecast-{mode}") or {}).values()
    # A forecast's speed-up is over the same model's forecast on one device.
    serial_rates = [
        forecast["samples_per_s"] / forecast["speedup"]
        for by_policy in forecasts
        for forecast in by_policy.values()
        if forecast.get("speedup")
    ]
    is_here = serial_rates and not options.cluster
    return context.run(options.plan(mode, 1), forecast_rate=serial_rates[0] if is_here else None)


def _run(
    options: Options, mode: str, count: int, policy: str, round_number: int, context: PartContext
) -> dict[str, Any]:
    """Run a split, unless an earlier policy has the same cuts."""
    splits = context.results[f"profile-{mode}"]["splits"]
    cuts = _cuts(splits, count, policy)
    earlier = _same_as(splits, count, policy)
    if earlier is not None:
        return {"same_as": earlier}
    is_shared = count > num_separate(options.devices)
    forecast = (context.results.get(f"forecast-{mode}") or {}).get(str(count), {}).get(policy, {})
    row = context.run(
        options.plan(mode, count, cuts),
        baselines=(f"run-{mode}-serial-{round_number}",),
        # A forecast is for devices like these, one for each stage.
        forecast_rate=None if is_shared or options.cluster else forecast.get("samples_per_s"),
    )
    return row | {"shared": is_shared}


def _explain(options: Options, mode: str, context: PartContext) -> dict[str, Any]:
    """Explain the fastest pipeline with the most stages: its speed-up losses, and its time breakdown."""
    from stagewright.planner.explain import explain_run
    from stagewright.runs.run_folder import RunFolder
    from stagewright.studies.parts.traces import read_breakdown

    runs = [run for run in measured_runs(context.results, asdict(options), mode) if run.equal]
    if not runs:
        raise UsageError(f"no pipeline in {mode} has run on the {len(options.devices)} devices; give 2 or more")
    runs = [run for run in runs if not run.shared] or runs
    most = max(run.num_stages for run in runs)
    # Without a plausible speed-up, or on shared devices, the run is still traced, but not explained.
    best = max((run for run in runs if run.num_stages == most), key=lambda run: run.speedup or 0.0)
    folder = RunFolder.open(context.folder / best.run)
    measured = load_model_costs(context.results[f"profile-{mode}"]["measured"])
    prepared = prepare_forecast(folder.plan(), measured, context.results["calibration"])
    return {
        "stages": best.num_stages,
        "policy": best.policies,
        "run": best.run,
        **explain_run(prepared, folder).to_dict(),
        "shares": read_breakdown(folder.path),
        "serial_shares": read_breakdown(context.folder / context.results[f"run-{mode}-serial-1"]["run"]),
    }
