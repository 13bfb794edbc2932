"""The study *memory*: data, tensor and pipeline parallel on two devices, with and without activation checkpointing.

    for each round:    serial, data, tensor, pipeline, each without and with activation checkpointing
    for each strategy: forecast, and forecast with free communication; what each worker executed
    for each variant:  the most layers by forecast ─► run that many and one more (or fewer, in growing steps) until
                       k layers run and k + 1 do not

The model belongs to a family with a free number of layers (`gpt-layers:N`). Activation checkpointing works by stage, so
a worker that holds the whole model (serial, data, tensor) uses one stage per block: it saves only the block inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from stagewright.errors import UsageError
from stagewright.quantity import format_bytes
from stagewright.spec.plan import Plan
from stagewright.studies.framework.study import Findings, Part, PartContext, Results, Study, with_evidence
from stagewright.studies.memory.answers import EVIDENCE, QUESTIONS, answers
from stagewright.studies.memory.measured import SINGLE, baseline_variant, measured_variants, shown_variant
from stagewright.studies.memory.options import Options
from stagewright.studies.memory.summary import summarize
from stagewright.studies.memory.tables import figures, tables
from stagewright.studies.parts.measurements import calibration, load_model_costs, measure_costs, prepare_forecast
from stagewright.studies.parts.search import find_largest


def build_study(options: Options) -> Study:
    return Study(
        name="memory",
        title=f"Memory of {options.model} on two devices",
        options=asdict(options),
        questions=QUESTIONS,
        parts=tuple(_parts(options)),
        conclude=partial(conclude, asdict(options) | {"fits": options.fit_variants}),
    )


def conclude(options: Mapping[str, Any], results: Results) -> Findings:
    variants = measured_variants(results, options)
    shown, drawn = tables(results, options, variants), figures(options, variants)
    return Findings(
        summary=summarize(results, options, variants),
        tables=shown,
        answers=with_evidence(answers(results, options, variants), EVIDENCE, shown, drawn),
        figures=drawn,
    )


def _parts(options: Options) -> Iterator[Part]:
    step_s = _step_s(options)
    yield calibration(options.devices)
    for strategy in options.all_strategies:
        yield Part(
            name=f"forecast-{strategy}",
            about=f"profile the units under {strategy}; forecast with measured and with free communication",
            run=partial(_forecast, options, strategy),
            needs=("calibration",),
            expected_s=5 + 4 * options.repeats * step_s,
        )
    for round_number in range(1, options.rounds + 1):
        for variant in options.variants:
            yield Part(
                name=f"run-{variant}-{round_number}",
                about=f"{shown_variant(variant)}, round {round_number} of {options.rounds}",
                run=partial(_run, options, variant, round_number),
                needs=("forecast-pipeline",) if variant.startswith("pipeline") else (),
                expected_s=_run_s(options, variant, step_s),
            )
    for strategy in options.all_strategies:
        yield Part(
            name=f"executed-{strategy}",
            about=f"count the actions of each worker of {strategy}",
            run=partial(_executed, options, strategy),
            needs=tuple(f"run-{variant}-1" for variant in options.variants if variant.partition("+")[0] == strategy),
        )
    for strategy in options.strategies:
        yield Part(
            name=f"ideal-{strategy}",
            about=f"compute the ideal systems of {strategy} from its recorded steps",
            run=partial(_ideal, options, strategy),
            needs=("forecast-serial", f"run-{strategy}-1"),
        )
        if options.quick and strategy == "tensor":
            continue  # its workers hold shards of the same layers, as the table of actions shows
        yield Part(
            name=f"operators-{strategy}",
            about=f"compare the operators of the workers of {strategy}",
            run=partial(_operators, strategy),
            needs=(f"run-{strategy}-1",),
            expected_s=4 + 2 * step_s,
        )
    yield Part(
        name="fit-forecast",
        about="forecast the most layers that fit",
        run=partial(_fit_forecast, options),
        needs=tuple(f"forecast-{strategy}" for strategy in options.all_strategies),
    )
    for variant in options.fit_variants:
        yield Part(
            name=f"fit-{variant}",
            about=f"find the most layers of {shown_variant(variant)} by running",
            run_name=shown_variant(variant),
            run=partial(_fit, options, variant),
            needs=("fit-forecast",),
            expected_s=2 * _run_s(replace(options, steps=1, warmup=0), variant, step_s),
        )


def _step_s(options: Options) -> float:
    """Estimate the duration of a step on one CPU core of the published study; 0 on GPUs.

    6 layers, 8 samples of 64 tokens: 0.85 s. Embeddings and head cost as much as 1.5 layers.
    """
    if options.devices[0].startswith("cuda"):
        return 0.0
    return 0.85 * (options.num_layers + 1.5) / 7.5 * options.batch * options.sequence_length / 512


def _run_s(options: Options, variant: str, step_s: float) -> float:
    """Estimate the duration of a run: start-up, parity check (three steps) and its own steps."""
    return 4 + (3 + options.warmup + options.steps) * step_s * (1.35 if "+" in variant else 1.0)


def _forecast(options: Options, strategy: str, context: PartContext) -> dict[str, Any]:
    """Forecast without and with activation checkpointing, each also with free communication."""
    from stagewright.simulator.simulate import predict
    from stagewright.simulator.what_if import explain_speedup, without_communication

    # Tensor parallelism is compared with the whole layers, which the baseline has measured at the same batch.
    measured = measure_costs(options.plan(strategy), repeats=options.repeats, cache=context.folder / "profiles")
    forecasts: dict[str, Any] = {}
    for variant in (strategy, f"{strategy}+recompute"):
        prepared = prepare_forecast(options.plan(variant), load_model_costs(measured), context.results["calibration"])
        forecast = predict(prepared.costs, prepared.plan.cuts, timeline=False)
        free = predict(without_communication(prepared.costs), prepared.plan.cuts, timeline=False)
        parts = explain_speedup(prepared.costs)
        forecasts[variant] = {
            "step_s": forecast.step_s,
            "serial_s": forecast.serial_s,
            "speedup": forecast.speedup,
            "free_step_s": free.step_s,
            "free_speedup": free.speedup,
            "peak_memory_bytes": forecast.peak_memory_bytes,
            "parts": [{"name": part.name, "seconds": part.seconds} for part in parts.parts],
        }
    return {**forecasts, "measured": measured}


def _cuts(options: Options, variant: str, num_layers: int, context: PartContext) -> tuple[str, ...]:
    """Return the cuts of a pipeline with this many layers; () for other strategies.

    Cut by MACs, which are exact: a cut by measured times would follow their noise from one study to the next.
    """
    from stagewright.partition.conditions import Conditions
    from stagewright.partition.split import split
    from stagewright.planner.costs.layer_scaling import with_num_layers

    if not variant.startswith("pipeline"):
        return ()
    measured = with_num_layers(load_model_costs(context.results["forecast-pipeline"]["measured"]), num_layers)
    conditions = Conditions(num_microbatches=options.microbatches, recompute="+" in variant)
    return split(measured.profile, 2, "macs", conditions).cut_names


def _run(options: Options, variant: str, round_number: int, context: PartContext) -> dict[str, Any]:
    forecast = (context.results.get(f"forecast-{variant.partition('+')[0]}") or {}).get(variant)
    return context.run(
        options.plan(variant, cuts=_cuts(options, variant, options.num_layers, context)),
        baselines=() if variant.startswith("serial") else [f"run-{single}-{round_number}" for single in SINGLE],
        forecast_rate=None if forecast is None else options.batch / forecast["step_s"],
    )


def _executed(options: Options, strategy: str, context: PartContext) -> dict[str, Any]:
    """Count the actions of each worker in one step, without and with activation checkpointing."""
    from stagewright.studies.parts.traces import read_counts

    variants = [variant for variant in options.variants if variant.partition("+")[0] == strategy]
    return {variant: read_counts(context.folder / context.results[f"run-{variant}-1"]["run"]) for variant in variants}


def _ideal(options: Options, strategy: str, context: PartContext) -> list[dict[str, Any]]:
    """Compute the ideal systems of every round from its own trace."""
    from stagewright.studies.parts.traces import read_ideal

    units = load_model_costs(context.results["forecast-serial"]["measured"]).profile.units
    largest = max(unit.total_s for unit in units) / sum(unit.total_s for unit in units)
    baseline = baseline_variant(context.results, asdict(options))
    rounds = []
    for number in range(1, options.rounds + 1):
        row = context.results.get(f"run-{strategy}-{number}")
        single = context.results.get(f"run-{baseline}-{number}")
        if row is not None:
            baseline_s = single["latency_s"] if single is not None else None
            ideal = read_ideal(
                context.folder / row["run"], batch=options.batch, largest_unit=largest, baseline_s=baseline_s
            )
            rounds.append({"round": number, **ideal})
    return rounds


def _operators(strategy: str, context: PartContext) -> dict[str, Any]:
    """Compare the operators that both workers executed."""
    from stagewright.studies.parts.traces import compare_operators

    return compare_operators(context.folder / context.results[f"run-{strategy}-1"]["run"])


def _fit_forecast(options: Options, context: PartContext) -> dict[str, Any]:
    """Forecast the most layers of every variant, by adding blocks to the measured model."""
    from stagewright.planner.costs.layer_scaling import with_num_layers
    from stagewright.planner.costs.measure import ModelCosts
    from stagewright.planner.fit import fit_strategies, memory_of

    measured = {
        strategy: load_model_costs(context.results[f"forecast-{strategy}"]["measured"])
        for strategy in options.all_strategies
    }

    def sized(plan: Plan, size: int) -> tuple[Plan, ModelCosts]:
        if plan.mesh.strategy not in measured:
            raise UsageError(f"{plan.mesh.strategy} is not part of this study")
        chosen = replace(plan, model=replace(plan.model, name=f"gpt-layers:{size}"))
        return chosen, with_num_layers(measured[plan.mesh.strategy], size)

    rows = fit_strategies(
        replace(options.plan("serial"), devices=(), steps=1, warmup=0),
        2,
        options.memory_bytes,
        memory_of(sized),
        "layers",
        now=options.num_layers,
        microbatches=options.microbatches,
    )
    return {
        f"{row.strategy}{'+recompute' if row.recompute else ''}": row.to_dict()
        for row in rows
        if row.strategy.partition(",")[0] in measured
    }


def _fit(options: Options, variant: str, context: PartContext) -> dict[str, Any]:
    """Find the most layers that run under the memory limit: k ran, and k + 1 did not."""
    forecast = context.results["fit-forecast"][variant]
    if forecast["refused"]:
        raise UsageError(forecast["refused"])
    least = 2 if variant.startswith("pipeline") else 1

    def run(size: int) -> dict[str, Any]:
        known = _known_fit(options, variant, context) if size == options.num_layers else None
        if known is not None:
            return {"layers": size, **known}
        context.note(f"{size} layers")
        plan = options.plan(variant, size, _cuts(options, variant, size, context))
        row = context.run_or_out_of_memory(replace(plan, memory_bytes=options.memory_bytes, steps=1, warmup=0))
        if row["ran"]:
            text = "ran, parity check passed" if row["equal"] else "ran, parity check failed"
            row = {"ran": True, "peak_memory_bytes": row["peak_memory_bytes"], "run": row["run"], "text": text}
        return {"layers": size, **row}

    # Activation checkpointing never fits fewer layers.
    plain = context.results["fit-forecast"][variant.partition("+")[0]]
    start = max(least, int(forecast["largest"]), int(plain["largest"]))
    largest, is_exact, attempts = find_largest(start, least, run)
    return {"largest": largest, "is_exact": is_exact, "forecast": forecast["largest"], "attempts": attempts}


def _known_fit(options: Options, variant: str, context: PartContext) -> dict[str, Any] | None:
    """Whether the model whose speed was measured fits: its timed runs counted the same bytes as a run with a limit.

    None: it was not run, or runs on GPUs, where a limit also counts what the allocator reserves.
    """
    rows = [context.results.get(f"run-{variant}-{number}") for number in range(1, options.rounds + 1)]
    timed = [row for row in rows if row is not None]
    if not timed or any(device.startswith("cuda") for device in options.devices):
        return None
    largest = max(timed, key=lambda row: max(row["peak_memory_bytes"]))
    ran = max(largest["peak_memory_bytes"]) <= options.memory_bytes
    text = "ran without a limit" + ("" if ran else f", with {format_bytes(max(largest['peak_memory_bytes']))}")
    return {
        "ran": ran,
        "peak_memory_bytes": largest["peak_memory_bytes"],
        "run": largest["run"],
        "text": text,
        "is_timed_run": True,
    }
