"""The study *memory*: data, tensor and pipeline parallel on two devices, with and without recomputation.

    for each round:    serial, data, tensor, pipeline, each without and with recomputation
    for each strategy: forecast, and forecast with free communication; what each worker executed
    for each limit:    the most layers by forecast ─► run there and one more (or less, and further) … until k runs and
                       k + 1 does not

The model is of a family with a free number of layers (`gpt-layers:N`). A stage is what is recomputed, so a worker that
holds the whole model (serial, data, tensor) takes it as one stage a block there: it keeps what enters each block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from stagewright.errors import RunError, UnknownName, UsageError
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.spec.plan_rules import OPTIMIZERS
from stagewright.spec.recompute_blocks import checkpoint_by_block
from stagewright.studies.memory.answers import QUESTIONS
from stagewright.studies.memory.findings import conclude
from stagewright.studies.parts.measurements import calibration, measured_data, measured_of, prepared_for
from stagewright.studies.framework.study import Bench, Part, Study

__all__ = ["ON_GPUS", "QUICK", "Options", "next_size", "study"]

QUICK: dict[str, Any] = {
    "model": "gpt-layers:2",
    "sequence_length": 32,
    "batch": 4,
    "rounds": 1,
    "steps": 2,
    "warmup": 1,
    "repeats": 1,
    "optimizer": "sgd",
    "memory_bytes": 88 * 2**20,
}

# Defaults where the devices are GPUs, on which smaller sizes would measure launches and libraries' workspaces.
ON_GPUS: dict[str, Any] = {
    "model": "gpt-layers:12",
    "sequence_length": 128,
    "batch": 16,
    "steps": 5,
    "memory_bytes": 2**30,
}

STRATEGIES = ("data", "tensor", "pipeline")
_BLOCK = "transformer.h."  # what blocks of the family are called, before their number
_MOST_ATTEMPTS = 8  # runs in search of a largest size; the forecast is seldom off by more than a few layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is studied; the defaults are the full size for two cores: about ten minutes."""

    model: str = "gpt-layers:6"
    """A family with a free number of layers, and that number."""
    quick: bool = False
    """Whether defaults are the small ones."""
    strategies: tuple[str, ...] = STRATEGIES
    """What is compared with serial: data, tensor, pipeline."""
    sequence_length: int = 64
    """Tokens of a sample."""
    batch: int = 8
    """Samples in a step, and micro-batches of a pipeline."""
    microbatches: int = 4
    rounds: int = 3
    """Times that everything is run."""
    steps: int = 3
    """Timed steps of a run, and those before them."""
    warmup: int = 2
    repeats: int = 3
    """Rounds of measuring a unit."""
    devices: tuple[str, ...] = ("cpu:0", "cpu:1")
    """One device a worker."""
    memory_bytes: int = 256 * 2**20
    """Memory of each device while the largest number of layers is looked for."""
    fits: tuple[str, ...] | None = None
    """Where that is found by running: a strategy, or strategy+recompute; None: everywhere, quick in a few places."""
    optimizer: str = "adamw"
    """How parameters are changed."""
    seed: int = 0

    def __post_init__(self) -> None:
        family, _, layers = self.model.partition(":")
        if family != "gpt-layers" or not layers.isdigit():
            raise UsageError(
                f"{self.model!r} has no free number of layers: use --model gpt-layers:N, like gpt-layers:8"
            )
        if len(self.devices) < 2:
            raise UsageError(f"{len(self.devices)} device can't be shared: give two, like --devices cpu:0,cpu:1")
        for strategy in self.strategies:
            if strategy not in STRATEGIES:
                raise UnknownName("strategy", strategy, STRATEGIES)
        shares = {"data": 2, "pipeline": self.microbatches}
        least = max((shares.get(strategy, 1) for strategy in self.strategies), default=1)
        if self.batch < least:
            raise UsageError(
                f"a batch of {self.batch} can't be shared by two replicas and {self.microbatches} micro-batches: use "
                f"--batch {least} or more, or fewer --microbatches"
            )
        known = self.ways
        if self.optimizer not in OPTIMIZERS:
            raise UnknownName("optimizer", self.optimizer, OPTIMIZERS)
        wrong = [way for way in self.fits or () if way not in known]
        if wrong:
            raise UsageError(
                f"{wrong[0]!r} is no strategy whose layers could be counted: use some of {', '.join(known)}"
            )

    @property
    def all_strategies(self) -> tuple[str, ...]:
        """Serial first."""
        return ("serial", *self.strategies)

    @property
    def ways(self) -> tuple[str, ...]:
        """Every strategy without and with recomputation."""
        return tuple(way for strategy in self.all_strategies for way in (strategy, f"{strategy}+recompute"))

    @property
    def fit_ways(self) -> tuple[str, ...]:
        """Where the most layers are found by running."""
        if self.fits is not None or not self.quick:
            return self.ways if self.fits is None else self.fits
        few = {"data": "data", "tensor": "tensor+recompute"}
        return tuple(few[one] for one in self.strategies if one in few)

    @property
    def num_layers(self) -> int:
        """Layers of the model whose speed is measured."""
        return int(self.model.partition(":")[2])

    def plan(self, way: str, num_layers: int | None = None, cuts: tuple[str, ...] = ()) -> Plan:
        """The plan of `serial`, `data`, `tensor+recompute`, … with the model's layers or another number of them."""
        strategy, _, again = way.partition("+")
        mesh = Mesh() if strategy == "serial" else Mesh(**{strategy: 2})
        layers = num_layers or self.num_layers
        plan = replace(self._plan(f"gpt-layers:{layers}", mesh, cuts), recompute="always" if again else "none")
        return checkpoint_by_block(plan, [f"{_BLOCK}{number}" for number in range(layers)])

    def _plan(self, model: str, mesh: Mesh, cuts: tuple[str, ...]) -> Plan:
        return Plan(
            model=ModelSpec(name=model, sequence_length=self.sequence_length, seed=self.seed),
            batch=self.batch,
            mesh=mesh,
            microbatches=self.microbatches if mesh.pipeline > 1 else 1,
            cuts=cuts,
            devices=self.devices[: mesh.num_workers],
            optimizer=OptimizerSpec(name=self.optimizer),  # type: ignore[arg-type]
            seed=self.seed,
            steps=self.steps,
            warmup=self.warmup,
        )


def study(options: Options) -> Study:
    """The study with these options."""
    step_s = _step_s(options)
    parts = [calibration(options.devices)]
    parts += [
        Part(
            name=f"forecast-{strategy}",
            about=f"what units cost as {strategy} has them, and forecasts with real and with free communication",
            run=partial(_forecast, options, strategy),
            needs=("calibration",),
            expected_s=5 + 4 * options.repeats * step_s,
        )
        for strategy in options.all_strategies
    ]
    parts += [
        Part(
            name=f"run-{way}-{turn}",
            about=f"{way.replace('+recompute', ', recomputed')}, round {turn} of {options.rounds}",
            run=partial(_run, options, way),
            needs=("forecast-pipeline",) if way.startswith("pipeline") else (),
            expected_s=_run_s(options, way, step_s),
        )
        for turn in range(1, options.rounds + 1)
        for way in options.ways
    ]
    parts += [
        Part(
            name=f"executed-{strategy}",
            about=f"what each worker of {strategy} executed",
            run=partial(_executed, strategy),
            needs=(f"run-{strategy}-1", f"run-{strategy}+recompute-1"),
        )
        for strategy in options.all_strategies
    ]
    parts += [
        Part(
            name=f"operators-{strategy}",
            about=f"which operators the workers of {strategy} executed",
            run=partial(_operators, strategy),
            needs=(f"run-{strategy}-1",),
            expected_s=4 + 2 * step_s,
        )
        for strategy in options.strategies
    ]
    parts.append(
        Part(
            name="fit-forecast",
            about="the most layers that fit, by forecast",
            run=partial(_fit_forecast, options),
            needs=tuple(f"forecast-{strategy}" for strategy in options.all_strategies),
        )
    )
    parts += [
        Part(
            name=f"fit-{way}",
            about=f"the most layers of {way.replace('+recompute', ', recomputed')}, found by running",
            run=partial(_fit, options, way),
            needs=("fit-forecast",),
            expected_s=2 * _run_s(replace(options, steps=1, warmup=0), way, step_s),
        )
        for way in options.fit_ways
    ]
    return Study(
        name="memory",
        title=f"Memory of {options.model} on two devices",
        options=asdict(options),
        questions=QUESTIONS,
        parts=tuple(parts),
        conclude=partial(conclude, asdict(options) | {"fits": options.fit_ways}),
    )


def _step_s(options: Options) -> float:
    """About what a step takes on one core of those that the pages' figures are from; 0 where the devices are GPUs.

    6 layers, 8 samples of 64 tokens: 0.85 s. Embeddings and the head weigh as much as a layer and a half.
    """
    if options.devices[0].startswith("cuda"):
        return 0.0
    return 0.85 * (options.num_layers + 1.5) / 7.5 * options.batch * options.sequence_length / 512


def _run_s(options: Options, way: str, step_s: float) -> float:
    """About what a run takes: its start, its proof (three steps) and its own steps."""
    return 4 + (3 + options.warmup + options.steps) * step_s * (1.35 if "+" in way else 1.0)


def _forecast(options: Options, strategy: str, bench: Bench) -> dict[str, Any]:
    """Forecasts without and with recomputation, each also with free communication."""
    from stagewright.simulator.simulate import predict
    from stagewright.simulator.what_if import explain_speedup, without_communication

    measured = measured_data(options.plan(strategy), repeats=options.repeats)
    found: dict[str, Any] = {}
    for way in (strategy, f"{strategy}+recompute"):
        prepared = prepared_for(options.plan(way), measured_of(measured), bench.results["calibration"])
        forecast = predict(prepared.costs, prepared.plan.cuts, timeline=False)
        silent = predict(without_communication(prepared.costs), prepared.plan.cuts, timeline=False)
        parts = explain_speedup(prepared.costs)
        found[way] = {
            "step_s": forecast.step_s,
            "serial_s": forecast.serial_s,
            "speedup": forecast.speedup,
            "free_step_s": silent.step_s,
            "free_speedup": silent.speedup,
            "peak_memory_bytes": forecast.peak_memory_bytes,
            "parts": [{"name": one.name, "seconds": one.seconds} for one in parts.parts],
        }
    return {**found, "measured": measured}


def _cuts(options: Options, way: str, num_layers: int, bench: Bench) -> tuple[str, ...]:
    """Where a pipeline of so many layers is cut, by the measured times of its units; () for other strategies."""
    from stagewright.partition.conditions import Conditions
    from stagewright.partition.split import split
    from stagewright.planner.costs.more_layers import with_num_layers

    if not way.startswith("pipeline"):
        return ()
    measured = with_num_layers(measured_of(bench.results["forecast-pipeline"]["measured"]), num_layers)
    conditions = Conditions(num_microbatches=options.microbatches, recompute="+" in way)
    return split(measured.profile, 2, "optimal", conditions).cut_names


def _run(options: Options, way: str, bench: Bench) -> dict[str, Any]:
    return bench.run(options.plan(way, cuts=_cuts(options, way, options.num_layers, bench)))


def _executed(strategy: str, bench: Bench) -> dict[str, Any]:
    """How often each worker did what in one step, from the events of its run; without and with recomputation."""
    from stagewright.studies.parts.traces import counts_of

    ways = (strategy, f"{strategy}+recompute")
    return {way: counts_of(bench.folder / bench.results[f"run-{way}-1"]["run"]) for way in ways}


def _operators(strategy: str, bench: Bench) -> dict[str, Any]:
    """Whether both workers executed the same operators, and what makes the difference."""
    from stagewright.studies.parts.traces import compared_operators

    return compared_operators(bench.folder / bench.results[f"run-{strategy}-1"]["run"])


def _fit_forecast(options: Options, bench: Bench) -> dict[str, Any]:
    """The most layers of every strategy that fit, by forecast: blocks are added to the model as it was measured."""
    from stagewright.planner.costs.measure import ModelCosts
    from stagewright.planner.costs.more_layers import with_num_layers
    from stagewright.planner.fit import fit_strategies

    measured = {one: measured_of(bench.results[f"forecast-{one}"]["measured"]) for one in options.all_strategies}

    def sized(plan: Plan, size: int) -> tuple[Plan, ModelCosts]:
        if plan.mesh.strategy not in measured:
            raise UsageError(f"{plan.mesh.strategy} was left out of this study")
        chosen = replace(plan, model=replace(plan.model, name=f"gpt-layers:{size}"))
        return chosen, with_num_layers(measured[plan.mesh.strategy], size)

    rows = fit_strategies(
        replace(options.plan("serial"), devices=(), steps=1, warmup=0),
        2,
        options.memory_bytes,
        sized,
        "layers",
        now=options.num_layers,
        microbatches=options.microbatches,
    )
    return {
        f"{row.strategy}{'+recompute' if row.recompute else ''}": row.to_dict()
        for row in rows
        if row.strategy.partition(",")[0] in measured
    }


def _fit(options: Options, way: str, bench: Bench) -> dict[str, Any]:
    """The most layers that run under the limit: k ran, and k + 1 did not."""
    forecast = bench.results["fit-forecast"][way]
    if forecast["refused"]:
        raise UsageError(forecast["refused"])
    least = 2 if way.startswith("pipeline") else 1
    ran: dict[int, bool] = {}
    attempts: list[dict[str, Any]] = []
    # Recomputing never fits fewer layers.
    plain = bench.results["fit-forecast"][way.partition("+")[0]]
    size: int | None = max(least, int(forecast["largest"]), int(plain["largest"]))
    while len(attempts) < _MOST_ATTEMPTS and size is not None:
        bench.tell(f"{size} layers")
        plan = options.plan(way, size, _cuts(options, way, size, bench))
        limited = replace(plan, memory_bytes=options.memory_bytes, steps=1, warmup=0)
        attempts.append({"layers": size, **_attempt(limited, bench)})
        ran[size] = attempts[-1]["ran"]
        size = next_size(ran, least)
    largest = max((one for one, good in ran.items() if good), default=0)
    return {
        "largest": largest,
        # Whether one layer more was tried and did not fit.
        "is_exact": ran.get(largest + 1 if largest else least) is False,
        "forecast": forecast["largest"],
        "attempts": attempts,
    }


def next_size(ran: Mapping[int, bool], least: int) -> int | None:
    """The size to try after those that ran (or did not); None: the largest is known.

    A forecast is seldom off by more than one, so one more (or less) comes first; then 2, 4, … further, until there is a
    size that ran and one that did not; then the middle between them.

        7 ran ─► 8 did not: done          7 ran ─► 8 ran ─► 10 ran ─► 14 did not ─► 12 …
    """
    good, bad = [size for size, fits in ran.items() if fits], [size for size, fits in ran.items() if not fits]
    if good and bad:
        middle = (max(good) + min(bad)) // 2
        return None if middle in ran else middle
    further: int = 1 << (len(ran) - 1)
    if good:
        return max(good) + further
    return max(least, min(bad) - further) if min(bad) > least else None


def _attempt(plan: Plan, bench: Bench) -> dict[str, Any]:
    """Run a plan under its limit; anything but a lack of memory is an error."""
    try:
        row = bench.run(plan)
    except RunError as error:
        text = str(error).splitlines()[0]
        if "out of memory" not in text:
            raise
        return {"ran": False, "text": text}
    return {
        "ran": True,
        "peak_memory_bytes": row["peak_memory_bytes"],
        "run": row["run"],
        "text": f"ran, equal to serial: {row['equal']}",
    }
