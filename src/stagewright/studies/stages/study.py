"""The study *stages*: serial against 2, 3, 4, 6 pipeline stages, cut by every policy, for inference and training.

    for each mode:  profile ─► splits of every policy ─► forecasts of all
    for each round: serial ─► each split that this machine has the devices for, one after the other
    then:           the best run taken apart: where its time went, why its speed-up is not n

Runs of one round stand close in time, so a speed-up is the ratio within a round. Stages that share a core give no
honest speed-up: those are forecast, or run and marked where that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.studies.parts.measurements import calibration, measured_data, measured_of, prepared_for
from stagewright.studies.framework.study import Bench, Part, Study
from stagewright.studies.stages.answers import QUESTIONS
from stagewright.studies.stages.findings import conclude
from stagewright.studies.stages.measured import measured_runs

__all__ = ["QUICK", "Options", "study"]

QUICK: dict[str, Any] = {
    "model": "deit-tiny",
    "batch": 32,
    "microbatches": 8,
    "rounds": 1,
    "steps": 4,
    "warmup": 1,
    "repeats": 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is studied; the defaults are the full size."""

    model: str = "deit-small"
    """Any model of the zoo."""
    quick: bool = False
    """Whether defaults are the small ones."""
    stages: tuple[int, ...] = (2, 3, 4, 6)
    """Numbers of stages."""
    policies: tuple[str, ...] = ("parameters", "macs", "blocks", "time", "optimal")
    """Policies that cut."""
    modes: tuple[str, ...] = ("inference", "training")
    """inference, training."""
    batch: int = 32
    """Samples in a step, and micro-batches of a pipeline."""
    microbatches: int = 16
    rounds: int = 3
    """Times that everything is run."""
    steps: int = 5
    """Timed steps of a run, and those before them."""
    warmup: int = 2
    repeats: int = 5
    """Rounds of measuring a unit."""
    devices: tuple[str, ...] = ("cpu:0", "cpu:1")
    """One device a worker."""
    oversubscribe: bool = False
    """Whether more stages than devices are run too."""
    cluster: str | None = None
    """Forecasts are for this cluster; None: for this machine, with as many devices as there are stages."""
    image_size: int | None = None
    """Of the model; None: its own."""
    sequence_length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in ("inference", "training")]
        if unknown or not self.modes:
            raise UsageError(
                f"modes are inference and training, not {', '.join(unknown) or 'none'}: use one, or both with a comma"
            )
        if not self.stages or min(self.stages) < 2:
            given = ", ".join(map(str, self.stages)) or "no"
            raise UsageError(f"{given} stages can't be compared with serial: give numbers from 2 up, like 2,4")
        if self.microbatches < max(self.stages):
            raise UsageError(
                f"{self.microbatches} micro-batches can't fill {max(self.stages)} stages: use --microbatches "
                f"{max(self.stages)} or more, or fewer --stages"
            )
        if len(self.devices) < 2 and not self.oversubscribe:
            raise UsageError(
                f"{len(self.devices)} device runs no pipeline: give two, like --devices cpu:0,cpu:1, or --oversubscribe"
            )
        if self.batch < self.microbatches:
            raise UsageError(
                f"a batch of {self.batch} can't be cut into {self.microbatches} micro-batches: use --batch "
                f"{self.microbatches} or more, or fewer --microbatches"
            )

    def plan(self, mode: str, num_stages: int, cuts: tuple[str, ...] = ()) -> Plan:
        """The plan of a run: serial takes its batch in one piece, a pipeline in micro-batches."""
        return Plan(
            model=ModelSpec(
                name=self.model,
                image_size=self.pixels,
                sequence_length=self.sequence_length,
                seed=self.seed,
            ),
            batch=self.batch,
            mesh=Mesh(pipeline=num_stages),
            microbatches=self.microbatches if num_stages > 1 else 1,
            cuts=cuts,
            training=mode == "training",
            devices=tuple(self.devices[worker % len(self.devices)] for worker in range(num_stages)),
            seed=self.seed,
            steps=self.steps,
            warmup=self.warmup,
        )

    @property
    def pixels(self) -> int | None:
        """Of the model's images; the quick model takes small ones unless it is told otherwise."""
        is_quick_model = self.quick and self.model == QUICK["model"]
        return 128 if self.image_size is None and is_quick_model else self.image_size

    @property
    def run_stages(self) -> tuple[int, ...]:
        """Numbers of stages that are run; the others are forecast."""
        return tuple(count for count in self.stages if self.oversubscribe or count <= len(self.devices))


def study(options: Options) -> Study:
    """The study with these options."""
    parts = [calibration(options.devices)]
    for mode in options.modes:
        parts.append(
            Part(
                name=f"profile-{mode}",
                about=f"what each unit costs in {mode}, and where every policy cuts",
                run=partial(_profile, options, mode),
            )
        )
        parts.append(
            Part(
                name=f"forecast-{mode}",
                about=f"forecasts of every split in {mode}",
                run=partial(_forecast, options, mode),
                needs=("calibration", f"profile-{mode}"),
            )
        )
    for turn in range(1, options.rounds + 1):
        for mode in options.modes:
            parts.append(
                Part(
                    name=f"run-{mode}-serial-{turn}",
                    about=f"serial, {mode}, round {turn} of {options.rounds}",
                    run=partial(_run_serial, options, mode),
                )
            )
            for count in options.run_stages:
                for policy in options.policies:
                    parts.append(
                        Part(
                            name=f"run-{mode}-{count}-{policy}-{turn}",
                            about=f"{count} stages cut by {policy}, {mode}, round {turn} of {options.rounds}",
                            run=partial(_run, options, mode, count, policy),
                            needs=(f"profile-{mode}",),
                        )
                    )
    for mode in options.modes:
        parts.append(
            Part(
                name=f"why-{mode}",
                about=f"the best pipeline of {mode}, taken apart",
                run=partial(_explain, options, mode),
                needs=("calibration", f"profile-{mode}", f"run-{mode}-serial-1"),
            )
        )
    return Study(
        name="stages",
        title=f"Stages of {options.model}",
        options=asdict(options),
        questions=QUESTIONS,
        parts=tuple(parts),
        conclude=partial(conclude, asdict(options)),
    )


def _profile(options: Options, mode: str, bench: Bench) -> dict[str, Any]:
    """Measure the model at a micro-batch's size, and cut it by every policy."""
    from stagewright.partition.conditions import Conditions
    from stagewright.partition.split import split

    measured = measured_data(options.plan(mode, 2), repeats=options.repeats)
    profile = measured_of(measured).profile
    # Inference is a stream that fills the pipeline once: only its slowest stage counts.
    conditions = Conditions(num_microbatches=options.microbatches if mode == "training" else None)
    splits: dict[str, dict[str, Any]] = {}
    for count in options.stages:
        found: dict[str, Any] = {}
        for policy in options.policies:
            try:
                found[policy] = split(profile, count, policy, conditions).to_dict()
            except UsageError as error:
                found[policy] = {"error": str(error)}
        splits[str(count)] = found
    return {"measured": measured, "splits": splits}


def _cuts(splits: Mapping[str, Any], count: int, policy: str) -> tuple[str, ...]:
    """Where a policy cuts; raises where it can't."""
    found = splits[str(count)][policy]
    if "error" in found:
        raise UsageError(found["error"])
    return tuple(found["cut_names"])


def _same_as(splits: Mapping[str, Any], count: int, policy: str) -> str | None:
    """An earlier policy that cuts at the same places."""
    wanted = splits[str(count)][policy].get("cut_names")
    for other, found in splits[str(count)].items():
        if other == policy:
            return None
        if found.get("cut_names") == wanted:
            return str(other)
    return None


def _forecast(options: Options, mode: str, bench: Bench) -> dict[str, Any]:
    """The forecast of every split; one that can't be has its reason."""
    from stagewright.simulator.what_if import explain_speedup

    saved = bench.results[f"profile-{mode}"]
    measured, splits = measured_of(saved["measured"]), saved["splits"]
    data: dict[str, Any] = {}
    for count in options.stages:
        data[str(count)] = {}
        for policy in options.policies:
            try:
                plan = options.plan(mode, count, _cuts(splits, count, policy))
                prepared = prepared_for(plan, measured, bench.results["calibration"], options.cluster)
            except UsageError as error:
                data[str(count)][policy] = {"error": str(error)}
                continue
            found, parts = prepared.forecast(), explain_speedup(prepared.costs)
            data[str(count)][policy] = {
                "samples_per_s": found.samples_per_s,
                "step_s": found.step_s,
                "speedup": found.speedup,
                "parts": [{"name": one.name, "seconds": one.seconds} for one in parts.parts],
            }
    return data


def _run_serial(options: Options, mode: str, bench: Bench) -> dict[str, Any]:
    return bench.run(options.plan(mode, 1))


def _run(options: Options, mode: str, count: int, policy: str, bench: Bench) -> dict[str, Any]:
    """One run; none where an earlier policy cuts at the same places."""
    splits = bench.results[f"profile-{mode}"]["splits"]
    cuts = _cuts(splits, count, policy)
    same = _same_as(splits, count, policy)
    if same is not None:
        return {"same_as": same}
    return bench.run(options.plan(mode, count, cuts)) | {"shared": count > len(set(options.devices))}


def _explain(options: Options, mode: str, bench: Bench) -> dict[str, Any]:
    """The waterfall of the fastest pipeline with most stages, and where its steps' time went beside serial's."""
    from stagewright.planner.explain import explain_run
    from stagewright.runs.run_folder import RunFolder
    from stagewright.studies.parts.traces import shares_of

    runs = [one for one in measured_runs(bench.results, asdict(options), mode) if one.speedup is not None]
    if not runs:
        raise UsageError(f"no pipeline of {mode} has run: there are {len(options.devices)} devices; give 2 or more")
    most = max(one.num_stages for one in runs)
    best = max((one for one in runs if one.num_stages == most), key=lambda one: one.speedup or 0.0)
    folder = RunFolder.open(bench.folder / best.run)
    measured = measured_of(bench.results[f"profile-{mode}"]["measured"])
    prepared = prepared_for(folder.plan(), measured, bench.results["calibration"])
    return {
        "stages": best.num_stages,
        "policy": best.policies,
        "run": best.run,
        **explain_run(prepared, folder).to_dict(),
        "shares": shares_of(folder.path),
        "serial_shares": shares_of(bench.folder / bench.results[f"run-{mode}-serial-1"]["run"]),
    }
