"""The study *memory*: data, tensor and pipeline parallel on two devices, with and without recomputation.

    for each round:    serial, data, tensor, pipeline, each without and with recomputation
    for each strategy: forecast, and forecast with free communication; what each worker executed
    for each limit:    the most layers by forecast ─► run there, one more, one less … until k runs and k + 1 does not

The model is of a family with a free number of layers (`gpt-layers:N`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from stagewright.errors import RunError, UsageError
from stagewright.plan.value import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.study.machine import CALIBRATION, measured_data, measured_of, prepared_for
from stagewright.study.memory_answers import QUESTIONS
from stagewright.study.memory_findings import conclude
from stagewright.study.value import Bench, Part, Study

__all__ = ["QUICK", "Options", "study"]

QUICK: dict[str, Any] = {
    "model": "gpt-layers:4",
    "sequence_length": 64,
    "batch": 8,
    "rounds": 1,
    "steps": 4,
    "warmup": 1,
    "repeats": 2,
    "memory_bytes": 384 * 2**20,
    "fits": ("data", "tensor", "pipeline", "tensor+recompute"),
}

STRATEGIES = ("serial", "data", "tensor", "pipeline")
_MOST_ATTEMPTS = 8  # runs in search of a largest size; the forecast is seldom off by more than a few layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is studied; the defaults are the full size."""

    # A family with a free number of layers, and that number.
    model: str = "gpt-layers:12"
    # Whether defaults are the small ones.
    quick: bool = False
    # Tokens of a sample.
    sequence_length: int = 128
    # Samples in a step, and micro-batches of a pipeline.
    batch: int = 16
    microbatches: int = 4
    # Times that everything is run.
    rounds: int = 3
    # Timed steps of a run, and those before them.
    steps: int = 5
    warmup: int = 2
    # Rounds of measuring a unit.
    repeats: int = 3
    # One device a worker.
    devices: tuple[str, ...] = ("cpu:0", "cpu:1")
    # Memory of each device while the largest number of layers is looked for.
    memory_bytes: int = 2**30
    # Where that is found by running: a strategy, or strategy+recompute.
    fits: tuple[str, ...] = (
        "serial",
        "serial+recompute",
        "data",
        "data+recompute",
        "tensor",
        "tensor+recompute",
        "pipeline",
        "pipeline+recompute",
    )
    # How parameters are changed.
    optimizer: str = "adamw"
    seed: int = 0

    def __post_init__(self) -> None:
        family, _, layers = self.model.partition(":")
        if family != "gpt-layers" or not layers.isdigit():
            raise UsageError(
                f"{self.model!r} has no free number of layers: use --model gpt-layers:N, like gpt-layers:8"
            )
        if len(self.devices) < 2:
            raise UsageError(f"{len(self.devices)} device can't be shared: give two, like --devices cpu:0,cpu:1")
        known = [way for strategy in STRATEGIES for way in (strategy, f"{strategy}+recompute")]
        wrong = [way for way in self.fits if way not in known]
        if wrong:
            raise UsageError(
                f"{wrong[0]!r} is no strategy whose layers could be counted: use some of {', '.join(known)}"
            )

    @property
    def num_layers(self) -> int:
        """Layers of the model whose speed is measured."""
        return int(self.model.partition(":")[2])

    def plan(self, way: str) -> Plan:
        """The plan of `serial`, `data`, `tensor+recompute`, …"""
        strategy, _, again = way.partition("+")
        mesh = Mesh() if strategy == "serial" else Mesh(**{strategy: 2})
        return Plan(
            model=ModelSpec(name=self.model, sequence_length=self.sequence_length, seed=self.seed),
            batch=self.batch,
            mesh=mesh,
            microbatches=self.microbatches if strategy == "pipeline" else 1,
            recompute="always" if again else "none",
            devices=self.devices[: mesh.num_workers],
            optimizer=OptimizerSpec(name=self.optimizer),  # type: ignore[arg-type]
            seed=self.seed,
            steps=self.steps,
            warmup=self.warmup,
        )


def study(options: Options) -> Study:
    """The study with these options."""
    ways = [way for strategy in STRATEGIES for way in (strategy, f"{strategy}+recompute")]
    parts = [CALIBRATION]
    parts += [
        Part(
            name=f"forecast-{strategy}",
            about=f"what units cost as {strategy} has them, and forecasts with real and with free communication",
            run=partial(_forecast, options, strategy),
            needs=("calibration",),
        )
        for strategy in STRATEGIES
    ]
    parts += [
        Part(
            name=f"run-{way}-{turn}",
            about=f"{way.replace('+recompute', ', recomputed')}, round {turn} of {options.rounds}",
            run=partial(_run, options, way),
        )
        for turn in range(1, options.rounds + 1)
        for way in ways
    ]
    parts += [
        Part(
            name=f"executed-{strategy}",
            about=f"what each worker of {strategy} executed",
            run=partial(_executed, strategy),
            needs=(f"run-{strategy}-1", f"run-{strategy}+recompute-1"),
        )
        for strategy in STRATEGIES
    ]
    parts.append(
        Part(name="fit-forecast", about="the most layers that fit, by forecast", run=partial(_fit_forecast, options))
    )
    parts += [
        Part(
            name=f"fit-{way}",
            about=f"the most layers of {way.replace('+recompute', ', recomputed')}, found by running",
            run=partial(_fit, options, way),
            needs=("fit-forecast",),
        )
        for way in options.fits
    ]
    return Study(
        name="memory",
        title=f"Memory of {options.model} on two devices",
        options=asdict(options),
        questions=QUESTIONS,
        parts=tuple(parts),
        conclude=partial(conclude, asdict(options)),
    )


def _forecast(options: Options, strategy: str, bench: Bench) -> dict[str, Any]:
    """Forecasts without and with recomputation, each also with free communication."""
    from stagewright.forecast.predict import predict
    from stagewright.forecast.what_if import explain_parts, without_communication

    measured = measured_data(options.plan(strategy), repeats=options.repeats)
    found: dict[str, Any] = {}
    for way in (strategy, f"{strategy}+recompute"):
        prepared = prepared_for(options.plan(way), measured_of(measured), bench.results["calibration"])
        forecast = predict(prepared.costs, prepared.plan.cuts, timeline=False)
        silent = predict(without_communication(prepared.costs), prepared.plan.cuts, timeline=False)
        parts = explain_parts(prepared.costs)
        found[way] = {
            "step_s": forecast.step_s,
            "serial_s": forecast.serial_s,
            "speedup": forecast.speedup,
            "free_step_s": silent.step_s,
            "free_speedup": silent.speedup,
            "peak_memory_bytes": forecast.peak_memory_bytes,
            "parts": [{"name": one.name, "seconds": one.seconds} for one in parts.parts],
        }
    return found


def _run(options: Options, way: str, bench: Bench) -> dict[str, Any]:
    return bench.run(options.plan(way))


def _executed(strategy: str, bench: Bench) -> dict[str, Any]:
    """How often each worker did what in one step, from the events of its run; without and with recomputation."""
    from stagewright.study.executed import counts_of

    ways = (strategy, f"{strategy}+recompute")
    return {way: counts_of(bench.folder / bench.results[f"run-{way}-1"]["run"]) for way in ways}


def _fit_forecast(options: Options, bench: Bench) -> dict[str, Any]:
    """The most layers of every strategy that fit, by forecast."""
    from stagewright.planner.fit import fit_strategies
    from stagewright.planner.sized import sized_models

    base = replace(options.plan("serial"), devices=(), steps=1, warmup=0)
    family = options.model.partition(":")[0]
    rows = fit_strategies(
        base,
        2,
        options.memory_bytes,
        sized_models("layers", family, cache=False),
        "layers",
        now=options.num_layers,
        microbatches=options.microbatches,
    )
    return {f"{row.strategy}{'+recompute' if row.recompute else ''}": row.to_dict() for row in rows}


def _fit(options: Options, way: str, bench: Bench) -> dict[str, Any]:
    """The most layers that run under the limit: k ran, and k + 1 did not."""
    forecast = bench.results["fit-forecast"][way]
    if forecast["refused"]:
        raise UsageError(forecast["refused"])
    plan = replace(options.plan(way), memory_bytes=options.memory_bytes, steps=1, warmup=0)
    least = plan.num_stages
    ran: dict[int, bool] = {}
    attempts: list[dict[str, Any]] = []
    size = max(least, int(forecast["largest"]))
    while len(attempts) < _MOST_ATTEMPTS and least <= size and size not in ran:
        bench.tell(f"{size} layers")
        attempts.append(_attempt(plan, size, bench))
        ran[size] = attempts[-1]["ran"]
        size += 1 if ran[size] else -1
    largest = max((one for one, good in ran.items() if good), default=0)
    return {
        "largest": largest,
        # Whether one layer more was tried and did not fit.
        "is_exact": ran.get(largest + 1 if largest else least) is False,
        "forecast": forecast["largest"],
        "attempts": attempts,
    }


def _attempt(plan: Plan, num_layers: int, bench: Bench) -> dict[str, Any]:
    """Run so many layers under the limit; anything but a lack of memory is an error."""
    family = plan.model.name.partition(":")[0]
    try:
        row = bench.run(replace(plan, model=replace(plan.model, name=f"{family}:{num_layers}")))
    except RunError as error:
        text = str(error).splitlines()[0]
        if "out of memory" not in text:
            raise
        return {"layers": num_layers, "ran": False, "text": text}
    return {
        "layers": num_layers,
        "ran": True,
        "peak_memory_bytes": row["peak_memory_bytes"],
        "run": row["run"],
        "text": f"ran, equal to serial: {row['equal']}",
    }
