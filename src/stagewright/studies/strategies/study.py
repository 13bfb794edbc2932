"""The study *strategies*: pipeline or data parallel, in real training runs and with large batches.

    for each task:   samples ─► profile, cuts ─► forecasts
    for each round:  single-device baseline ─► each experiment for which this machine has devices ─► speed-up
    for each seed:   every experiment trained ─► accuracy (workers may share devices: that does not change it)
    at the end:      batch 256, 1k, 4k under a memory limit (`large`)

As published, 4 workers use twice the batch and twice the learning rate of 2. Several batches make several cases of a
task: rte, rte-b64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from stagewright.spec.plan import Plan
from stagewright.studies.framework.study import Findings, Part, PartContext, Results, Study, with_evidence
from stagewright.studies.parts.measurements import calibration, load_model_costs, measure_costs, prepare_forecast
from stagewright.studies.parts.samples import samples_folder, samples_part
from stagewright.studies.strategies.answers import EVIDENCE, QUESTIONS, answers
from stagewright.studies.strategies.large import large_parts
from stagewright.studies.strategies.measured import Experiment, measured_experiments
from stagewright.studies.strategies.options import Options
from stagewright.studies.strategies.summary import summarize
from stagewright.studies.strategies.tables import figures, tables


def build_study(options: Options) -> Study:
    recipes = options.recipes
    trained = ", ".join(f"{recipes[task].model} on {recipes[task].shown_data}" for task in options.tasks)
    return Study(
        name="strategies",
        title=f"Pipeline and data parallel: {trained}",
        options=asdict(options),
        questions=QUESTIONS,
        parts=tuple(_parts(options)),
        conclude=partial(conclude, asdict(options) | {"recipes": recipes, "cuts": options.all_cuts}),
    )


def conclude(options: Mapping[str, Any], results: Results) -> Findings:
    experiments = {case: measured_experiments(results, options, case) for case in options["recipes"]}
    shown, drawn = tables(results, options, experiments), figures(options, experiments)
    return Findings(
        summary=summarize(results, options, experiments),
        tables=shown,
        answers=with_evidence(answers(results, options, experiments), EVIDENCE, shown, drawn),
        figures=drawn,
    )


def _parts(options: Options) -> Iterator[Part]:
    def shown(case: str) -> str:
        return case.replace("-b", ", batch ")

    yield calibration(options.devices)
    for task in options.tasks:
        yield samples_part(task, options.data, options.train_samples, options.judged_samples)
    for task in options.cases:
        yield Part(
            name=f"profile-{task}",
            about=f"profile the units of {options.recipe(task).model}, and split it for every pipeline",
            run=partial(_profile, options, task),
        )
        yield Part(
            name=f"forecast-{task}",
            about=f"forecast every experiment on {shown(task)}",
            run=partial(_forecast, options, task),
            needs=("calibration", f"profile-{task}"),
        )
    for round_number in range(1, options.rounds + 1):
        shown_round = f"round {round_number} of {options.rounds}"
        for task in options.cases:
            yield Part(
                name=f"plain-{task}-{round_number}",
                about=f"plain torch loop, {shown(task)}, {shown_round}",
                run=partial(_plain_loop, options, task),
            )
            for count in filter(options.is_run, options.workers):
                yield Part(
                    name=f"speed-{task}-serial-{count}-{round_number}",
                    about=f"baseline with the batch of {count} workers, {shown(task)}, {shown_round}",
                    run=partial(_speed, options, task, None, count, round_number),
                )
            for experiment in options.experiments:
                if options.is_run(experiment.workers):
                    yield Part(
                        name=f"speed-{task}-{experiment.name}-{round_number}",
                        about=f"{experiment.full_name}, {shown(task)}, {shown_round}",
                        run=partial(_speed, options, task, experiment, experiment.workers, round_number),
                        needs=(f"profile-{task}",),
                    )
    for task in options.cases:
        for seed in options.seeds:
            for experiment in options.experiments:
                yield Part(
                    name=f"train-{task}-{experiment.name}-{seed}",
                    about=f"train {shown(task)}, {experiment.full_name}, seed {seed}",
                    run=partial(_train, options, task, experiment, seed),
                    needs=(f"data-{options.recipe(task).task}", f"profile-{task}"),
                )
    yield from large_parts(options)


def _profile(options: Options, task: str, context: PartContext) -> dict[str, Any]:
    """Profile the model at three micro-batch sizes, up to the baseline's largest batch; cut every pipeline."""
    from stagewright.partition.conditions import Conditions
    from stagewright.partition.split import split
    from stagewright.planner.costs.interpolation import interpolate_at
    from stagewright.studies.parts.training import cuts_of_client

    batch = options.recipe(task).batch
    few = max(2, batch // 8)  # batch norm needs more than one sample
    most = batch * max(options.workers) // 2  # on a GPU, time does not grow in proportion to the samples
    measured = []
    for size in sorted({few, max(few + 2, batch // 2), max(few + 2, most)}):
        context.note(f"{size} samples")
        plan = replace(options.plan(task, None, options.seeds[0]), batch=size)
        measured.append(measure_costs(plan, repeats=options.repeats))
    models = [load_model_costs(costs) for costs in measured]
    cuts: dict[str, list[str]] = {}
    for experiment in options.experiments:
        if experiment.strategy != "pipeline":
            continue
        microbatch_size = options.plan(task, experiment, 0).batch // experiment.microbatches
        profile = interpolate_at(models, microbatch_size).profile
        if experiment.client_units is not None:
            names = [unit.name for unit in profile.units]
            cuts[experiment.name] = list(cuts_of_client(names, *experiment.client_units, options.recipe(task).model))
            continue
        policy, count = ("client-server", 3) if experiment.is_client else ("time", experiment.workers)
        chosen = split(profile, count, policy, Conditions(num_microbatches=experiment.microbatches))
        cuts[experiment.name] = list(chosen.cut_names)
    large_cuts = split(interpolate_at(models, options.piece).profile, 2, "time", Conditions()).cut_names
    return {"measured": measured, "cuts": cuts, "large_cuts": list(large_cuts)}


def _cuts(context: PartContext, task: str, experiment: Experiment | None) -> tuple[str, ...]:
    return () if experiment is None else tuple(context.results[f"profile-{task}"]["cuts"].get(experiment.name, ()))


def _forecast(options: Options, task: str, context: PartContext) -> dict[str, Any]:
    """Forecast every experiment as if each worker had its own device."""
    from stagewright.planner.costs.interpolation import interpolate_at
    from stagewright.planner.costs.measure import plan_microbatch_sizes

    models = [load_model_costs(costs) for costs in context.results[f"profile-{task}"]["measured"]]

    def rate(plan: Plan) -> float:
        measured = interpolate_at(models, max(plan_microbatch_sizes(plan)))
        return prepare_forecast(plan, measured, context.results["calibration"]).forecast().samples_per_s

    forecasts = {}
    for experiment in options.experiments:
        samples_per_s = rate(options.plan(task, experiment, options.seeds[0], _cuts(context, task, experiment)))
        # The baseline runs its batch undivided, as it is measured.
        baseline = rate(options.plan(task, None, options.seeds[0], workers=experiment.workers))
        forecasts[experiment.name] = {"samples_per_s": samples_per_s, "speedup": samples_per_s / baseline}
    return forecasts


def _speed(
    options: Options, task: str, experiment: Experiment | None, workers: int, round_number: int, context: PartContext
) -> dict[str, Any]:
    from stagewright.studies.parts.traces import read_breakdown

    plan = options.plan(task, experiment, options.seeds[0], _cuts(context, task, experiment), workers=workers)
    forecasts = context.results.get(f"forecast-{task}") or {}
    if experiment is None:
        data = forecasts.get(f"data-{workers}")
        return context.run(plan, forecast_rate=None if data is None else data["samples_per_s"] / data["speedup"])
    forecast = forecasts.get(experiment.name, {})
    row = context.run(
        plan, baselines=(f"speed-{task}-serial-{workers}-{round_number}",), forecast_rate=forecast.get("samples_per_s")
    )
    return {**row, "shares": read_breakdown(context.folder / row["run"])}


def _plain_loop(options: Options, task: str, context: PartContext) -> dict[str, Any]:
    """Time the loop that a user would write, with the batch of two workers."""
    from stagewright.studies.parts.plain_loop import time_plain_loop

    return time_plain_loop(options.plan(task, None, options.seeds[0], workers=2))


def _train(options: Options, task: str, experiment: Experiment, seed: int, context: PartContext) -> dict[str, Any]:
    from stagewright.studies.parts.training import train_by_pipeline

    plan = options.plan(task, experiment, seed, _cuts(context, task, experiment))
    name = options.recipe(task).task
    plan = replace(plan, task=name, epochs=options.epochs, steps=1, warmup=0)
    result = train_by_pipeline(plan, context.runs, data=samples_folder(options.data, name, context), note=context.note)
    return {**result, "shared": not options.is_run(experiment.workers)}
