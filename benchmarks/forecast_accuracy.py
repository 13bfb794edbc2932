"""How true forecasts are: plans forecast from a profile, and then run.

    python benchmarks/forecast_accuracy.py --rounds 3 --json

Each plan is forecast before it is run, in every round anew: the model's units, loss and optimiser are measured on one
of the plan's devices, the engine's own costs with two workers, then the plan is proven equal to serial and timed. What
counts is the median over the rounds, of forecasts and of measured steps. Plans take turns, so that a slow phase of the
machine hits all of them; `--only 3` or `--only 0-4` runs some. Memory is the peak of the fullest worker.

A shared machine may be a fifth slower half a minute later. So a fixed piece of work is timed on each of the plan's
devices before and after both the measuring and the run; `pace` is how much longer it took around the run. Errors are
given as they are, and at one pace. Where a core is slow for seconds and then fast again, neither half a second of work
nor a median says which it was; so errors are given a third time, undisturbed: the lower quartile of the rounds'
forecasts against the lower quartile of all steps of all rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

# model, options of the model, batch, and what makes the plan; three of each strategy at least.
PLANS: tuple[dict[str, Any], ...] = (
    {"model": "bert-minilm", "sequence_length": 64, "batch": 8, "mesh": "serial"},
    {"model": "bert-minilm", "sequence_length": 64, "batch": 8, "mesh": "serial", "microbatches": 4},
    {"model": "bert-minilm", "sequence_length": 64, "batch": 8, "mesh": "data=2"},
    {"model": "bert-minilm", "sequence_length": 64, "batch": 8, "mesh": "tensor=2"},
    {"model": "bert-minilm", "sequence_length": 64, "batch": 8, "mesh": "pipeline=2", "microbatches": 4},
    {
        "model": "bert-minilm",
        "sequence_length": 64,
        "batch": 8,
        "mesh": "pipeline=2",
        "microbatches": 8,
        "schedule": "gpipe",
    },
    {"model": "deit-tiny", "batch": 8, "mesh": "serial"},
    {"model": "deit-tiny", "batch": 8, "mesh": "data=2", "microbatches": 2},
    {"model": "deit-small", "image_size": 112, "batch": 8, "mesh": "tensor=2"},
    {"model": "deit-tiny", "batch": 8, "mesh": "pipeline=2", "microbatches": 4},
    {"model": "deit-tiny", "batch": 8, "mesh": "pipeline=2", "microbatches": 4, "recompute": "always"},
    {"model": "deit-tiny", "batch": 8, "mesh": "pipeline=2", "microbatches": 4, "schedule": "interleaved"},
    {"model": "deit-tiny", "batch": 8, "mesh": "pipeline=2", "microbatches": 4, "schedule": "zbv"},
    {"model": "gpt-layers:6", "sequence_length": 64, "batch": 8, "mesh": "serial", "recompute": "always"},
    {"model": "gpt-layers:6", "sequence_length": 64, "batch": 8, "mesh": "data=2"},
    {"model": "gpt-layers:6", "sequence_length": 64, "batch": 8, "mesh": "pipeline=2", "microbatches": 4},
    {"model": "resnet-50", "image_size": 96, "batch": 16, "mesh": "pipeline=2", "microbatches": 4},
    {"model": "mobilenet-v2", "image_size": 96, "batch": 16, "mesh": "data=2"},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="one plan or a range of them, from 0")
    parser.add_argument("--devices", default="", help="devices with semicolons; otherwise the machine's first")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    from stagewright.cluster.machine import default_devices

    low, _, high = options.only.partition("-")
    devices = tuple(options.devices.split(";")) if options.devices else default_devices(2)
    chosen = PLANS[int(low) : int(high or low) + 1] if options.only else PLANS
    chosen = tuple(one for one in chosen if len(devices) > 1 or one["mesh"] == "serial")
    names = ("forecast_s", "measured_s", "steps_s", "pace", "forecast_memory_bytes", "measured_memory_bytes")
    found: list[dict[str, list[Any]]] = [{name: [] for name in names} for _ in chosen]
    for current in range(options.rounds):
        terms = measure_machine(devices)
        for index, about in enumerate(chosen):
            plan = make_plan(about, devices, options.steps)
            row = forecast_and_run(plan, terms, options.repeats)
            for name, value in row.items():
                found[index][name].append(value)
            error = row["forecast_s"] / row["measured_s"] - 1
            write(chosen, found, options)
            memory = row["forecast_memory_bytes"] / row["measured_memory_bytes"] - 1
            print(
                f"round {current}: {describe(about)}: {row['forecast_s']:.4f} s, measured {row['measured_s']:.4f} s "
                f"({error:+.1%}, at one pace {(1 + error) * row['pace'] - 1:+.1%}), memory {memory:+.1%}",
                file=sys.stderr,
                flush=True,
            )
    report(summary(chosen, found, options.rounds), options)


def summary(chosen: Any, found: Any, rounds: int) -> dict[str, Any]:
    """The medians of the plans that were run, and how far off they are."""
    rows = [
        {
            "plan": describe(about),
            **{name: statistics.median(values) for name, values in one.items() if name != "steps_s"},
            "undisturbed_forecast_s": lower_quartile(one["forecast_s"]),
            "undisturbed_s": lower_quartile([taken for steps in one["steps_s"] for taken in steps]),
        }
        for about, one in zip(chosen, found, strict=True)
        if one["forecast_s"]
    ]
    errors = [abs(row["forecast_s"] / row["measured_s"] - 1) for row in rows]
    paced = [
        abs(
            statistics.median(
                f * p / m for f, m, p in zip(one["forecast_s"], one["measured_s"], one["pace"], strict=True)
            )
            - 1
        )
        for one in found
        if one["forecast_s"]
    ]
    undisturbed = [abs(row["undisturbed_forecast_s"] / row["undisturbed_s"] - 1) for row in rows]
    memory = [abs(row["forecast_memory_bytes"] / row["measured_memory_bytes"] - 1) for row in rows]
    return {
        "plans": rows,
        "mean_error": statistics.mean(errors),
        "worst_error": max(errors),
        "mean_error_at_one_pace": statistics.mean(paced),
        "worst_error_at_one_pace": max(paced),
        "mean_error_undisturbed": statistics.mean(undisturbed),
        "worst_error_undisturbed": max(undisturbed),
        "worst_memory_error": max(memory),
        "rounds": rounds,
    }


def lower_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def write(chosen: Any, found: Any, options: argparse.Namespace) -> None:
    """What there is so far: a benchmark that is ended early leaves it."""
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump({**summary(chosen, found, options.rounds), "rounds_of_each": found}, file, indent=2)


def measure_machine(devices: tuple[str, ...]) -> Any:
    """The engine's own costs, now."""
    from stagewright.planner.calibrate import calibrate

    return calibrate(devices)


def make_plan(about: dict[str, Any], devices: tuple[str, ...], steps: int) -> Any:
    from stagewright.engine.resolve import resolve_plan
    from stagewright.plan.value import Mesh, ModelSpec, Plan

    rest = {name: value for name, value in about.items() if name not in ("model", "sequence_length", "image_size")}
    mesh = Mesh.parse(rest.pop("mesh"))
    model = ModelSpec(
        name=about["model"], sequence_length=about.get("sequence_length"), image_size=about.get("image_size")
    )
    return resolve_plan(
        Plan(model=model, mesh=mesh, devices=devices[: mesh.num_workers], steps=steps, warmup=2, **rest)
    )


def forecast_and_run(plan: Any, calibration: Any, repeats: int) -> dict[str, Any]:
    """Forecast first, then run."""
    from stagewright.engine.compare import run_plan
    from stagewright.planner.forecasting import prepare
    from stagewright.planner.measure import measure_model
    from stagewright.store.run import RunFolder

    before_s = yardstick_s(plan.devices)
    measured = measure_model(plan, cache=False, repeats=repeats)
    between_s = yardstick_s(plan.devices)
    forecast = prepare(plan, measured, calibration.cluster(plan.mesh.num_workers), calibration.terms).forecast()
    del measured
    with tempfile.TemporaryDirectory() as root:
        result = run_plan(replace(plan, cuts=plan.cuts), root)
        steps = [row["seconds"] for row in RunFolder.open(result["run"]).worker(0).metrics()]
    after_s = yardstick_s(plan.devices)
    if not result["equal"]:
        print(f"{plan.model.name}, {plan.mesh}: NOT equal to serial: {result['equality']}", file=sys.stderr)
    return {
        "forecast_s": forecast.step_s,
        "measured_s": result["latency_s"],
        "steps_s": steps,
        "pace": (between_s + after_s) / (before_s + between_s),
        "forecast_memory_bytes": max(memory_of(worker, plan) for worker in forecast.workers),
        "measured_memory_bytes": max(result["peak_memory_bytes"]),
    }


def yardstick_s(devices: tuple[str, ...], repeats: int = 15) -> float:
    """A fixed piece of work on each pinned core, some tens of milliseconds; 1 on GPUs, which nobody shares."""
    import torch

    from stagewright.cluster.device import Device

    places = [Device.parse(one) for one in devices]
    if places[0].kind != "cpu":
        return 1.0
    weights = [torch.randn(512, 512) for _ in range(32)]  # more than a core's own caches hold
    times_s: list[list[float]] = [[] for _ in places]
    for _ in range(repeats):  # in turns, so that a slow moment hits all of them
        for place, taken in zip(places, times_s, strict=True):
            with place.pinned(), torch.no_grad():
                start, value = time.perf_counter(), torch.ones(128, 512)
                for one in weights:
                    value = torch.nn.functional.layer_norm(torch.nn.functional.gelu(value @ one), (512,))
                taken.append(time.perf_counter() - start)
    return statistics.mean(statistics.median(taken) for taken in times_s)


def memory_of(worker: Any, plan: Any) -> int:
    """As the engine measures it: a CPU worker counts its own tensors, without posted receives; CUDA's allocator all."""
    on_cuda = plan.devices[0].startswith("cuda")
    return int(worker.memory.peak_bytes if on_cuda else worker.memory.counted_bytes)


def describe(about: dict[str, Any]) -> str:
    words = [about["model"], about["mesh"], f"batch {about['batch']}"]
    words += [f"{about['microbatches']} micro-batches"] if "microbatches" in about else []
    words += [about[name] for name in ("schedule",) if name in about]
    words += ["recomputed"] if about.get("recompute") == "always" else []
    return ", ".join(words)


def report(data: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(data, indent=2))
        return
    for row in data["plans"]:
        error = row["forecast_s"] / row["measured_s"] - 1
        memory = row["forecast_memory_bytes"] / row["measured_memory_bytes"] - 1
        calm = row["undisturbed_forecast_s"] / row["undisturbed_s"] - 1
        times = f"{row['forecast_s']:8.4f} s {row['measured_s']:8.4f} s"
        print(f"{row['plan']:60} {times} {error:+6.1%} (undisturbed {calm:+6.1%}) {memory:+6.1%}")
    print(
        f"mean error {data['mean_error']:.1%}, worst {data['worst_error']:.1%}; at one pace "
        f"{data['mean_error_at_one_pace']:.1%}, worst {data['worst_error_at_one_pace']:.1%}; undisturbed "
        f"{data['mean_error_undisturbed']:.1%}, worst {data['worst_error_undisturbed']:.1%}; "
        f"memory at most {data['worst_memory_error']:.1%} off"
    )


if __name__ == "__main__":
    main()
