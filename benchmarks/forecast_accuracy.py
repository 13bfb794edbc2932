"""Accuracy of forecasts: forecast plans from a profile, and run them.

    python benchmarks/forecast_accuracy.py --json

Engine overhead is calibrated (again every few plans). Then workers check parity and take turns: one of them measures
the model's units, loss and optimizer on its core, both measure links, collectives and contention; then all run a few
steps. A shared machine may be a third slower seconds later, so steps and the measurements behind their forecasts are
spread over the same minute. Around each step every worker also times the whole model, without the engine, and the
step's forecast uses cores of that speed (*paired*). The error compares the mean over turns of the median forecast with
that of the median step: for a core that runs at either of two speeds, a median over all steps would be the slightly
more frequent speed. Also reported: errors of medians over all steps, and of forecasts from the measurements at the
start of each turn alone, with the machine's contention (*unpaired*), which vary more by chance.
`--only 3` or `--only 0-4` selects plans. Memory is the highest peak of any worker.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import write_record

JOBS = Path(__file__).resolve().parent / "jobs"

# Model, its options, batch and plan; at least three of each strategy. In inference, `steps` are batches of a stream.
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
    {"model": "gpt-layers:6", "sequence_length": 64, "batch": 8, "mesh": "data=2", "shard": True},
    {"model": "gpt-layers:6", "sequence_length": 64, "batch": 8, "mesh": "tensor=2"},
    {"model": "deit-tiny", "batch": 8, "mesh": "pipeline=2", "microbatches": 4, "codec": "block8"},
    {
        "model": "bert-minilm",
        "sequence_length": 64,
        "batch": 8,
        "mesh": "pipeline=2",
        "microbatches": 4,
        "training": False,
        "steps": 4,
    },
    {"model": "bert-minilm", "sequence_length": 64, "batch": 8, "mesh": "tensor=2", "training": False, "steps": 4},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6, help="times that a plan is forecast and run for a few steps")
    parser.add_argument("--steps", type=int, default=4, help="timed steps per turn")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of measuring units per turn")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of measuring the machine per turn")
    parser.add_argument("--calibrate-every", type=int, default=2, help="plans between two calibrations of the machine")
    parser.add_argument("--only", default="", help="index or range of plans, from 0")
    parser.add_argument("--devices", default="", help="devices, separated by semicolons; default: the machine's first")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    sys.path.insert(0, str(JOBS))  # workers are forked from this process and import their job from here
    from stagewright.machine.machine import default_devices
    from stagewright.planner.calibration.calibrate import calibrate

    low, _, high = options.only.partition("-")
    devices = tuple(options.devices.split(";")) if options.devices else default_devices(2)
    chosen = PLANS[int(low) : int(high or low) + 1] if options.only else PLANS
    chosen = tuple(settings for settings in chosen if len(devices) > 1 or settings["mesh"] == "serial")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        for number, settings in enumerate(chosen):
            if number % options.calibrate_every == 0:
                measured = calibrate(devices)
                calibration = Path(root) / f"calibration-{number}.json"
                calibration.write_text(json.dumps(measured.to_dict()))
            rows.append(forecast_and_run(settings, make_plan(settings, devices), calibration, options, root))
            print(describe_row(rows[-1]), file=sys.stderr, flush=True)
            if options.output:  # a benchmark that is stopped early leaves its results
                write_record(options.output, summary(rows))
    if options.json:
        print(json.dumps(summary(rows), indent=2))
    else:
        print("\n".join([*map(describe_row, rows), describe_all(summary(rows))]))


def forecast_and_run(
    settings: dict[str, Any], plan: Any, calibration: Path, options: argparse.Namespace, root: str
) -> dict[str, Any]:
    """Forecast and run one plan."""
    from stagewright.engine.launch.launcher import launch
    from stagewright.runs.run_folder import RunFolder

    counts = {name: getattr(options, name) for name in ("turns", "steps", "repeats", "rounds")}
    os.environ["FORECAST_TURNS"] = json.dumps(counts | {"calibration": str(calibration)})
    folder = RunFolder.create(root, plan)
    launch(plan, folder, job="forecast_turns:run_job")
    workers = [
        json.loads((folder.worker(rank).path / "turns.json").read_text()) for rank in range(plan.mesh.num_workers)
    ]
    forecasts = sorted(
        (forecast for worker in workers for forecast in worker["forecasts"]), key=lambda forecast: forecast["turn"]
    )
    turns = [
        [max(times) for times in zip(*together, strict=True)]
        for together in zip(*(worker["steps_s"] for worker in workers), strict=True)
    ]
    steps = [step_s for turn in turns for step_s in turn]
    return {
        "plan": describe(settings),
        "equal": workers[0]["equality"]["equal"],
        # One value per turn on both sides, then their mean, so that both are treated alike.
        "forecast_s": statistics.mean(statistics.median(forecast["paired_s"]) for forecast in forecasts),
        "measured_s": statistics.mean(statistics.median(turn) for turn in turns),
        "forecast_unpaired_s": statistics.mean(forecast["step_s"] for forecast in forecasts),
        "forecast_median_s": statistics.median(step_s for forecast in forecasts for step_s in forecast["paired_s"]),
        "measured_median_s": statistics.median(steps),
        "forecast_memory_bytes": max(forecast["memory_bytes"] for forecast in forecasts),
        "measured_memory_bytes": max(worker["memory_bytes"] for worker in workers),
        "forecasts_s": [forecast["paired_s"] for forecast in forecasts],
        "unpaired_s": [forecast["step_s"] for forecast in forecasts],
        "steps_s": turns,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the errors over all plans."""
    errors = [abs(row["forecast_s"] / row["measured_s"] - 1) for row in rows]
    unpaired = [abs(row["forecast_unpaired_s"] / row["measured_s"] - 1) for row in rows]
    medians = [abs(row["forecast_median_s"] / row["measured_median_s"] - 1) for row in rows]
    memory = [abs(row["forecast_memory_bytes"] / row["measured_memory_bytes"] - 1) for row in rows]
    return {
        "plans": rows,
        "mean_error": statistics.mean(errors),
        "worst_error": max(errors),
        "mean_error_unpaired": statistics.mean(unpaired),
        "worst_error_unpaired": max(unpaired),
        "mean_error_of_medians": statistics.mean(medians),
        "worst_error_of_medians": max(medians),
        "worst_memory_error": max(memory),
    }


def make_plan(settings: dict[str, Any], devices: tuple[str, ...]) -> Any:
    from stagewright.engine.parallel.resolve import resolve_plan
    from stagewright.spec.plan import Mesh, ModelSpec, Plan

    rest = {name: value for name, value in settings.items() if name not in ("model", "sequence_length", "image_size")}
    mesh = Mesh.parse(rest.pop("mesh"))
    model = ModelSpec(
        name=settings["model"], sequence_length=settings.get("sequence_length"), image_size=settings.get("image_size")
    )
    return resolve_plan(Plan(model=model, mesh=mesh, devices=devices[: mesh.num_workers], **rest))


def describe(settings: dict[str, Any]) -> str:
    words = [settings["model"], settings["mesh"], f"batch {settings['batch']}"]
    words += [f"{settings['microbatches']} micro-batches"] if "microbatches" in settings else []
    words += [settings[name] for name in ("schedule",) if name in settings]
    words += ["activation checkpointing"] if settings.get("recompute") == "always" else []
    words += ["FSDP"] if settings.get("shard") else []
    words += [f"codec {settings['codec']}"] if "codec" in settings else []
    words += ["inference"] if settings.get("training") is False else []
    return ", ".join(words)


def describe_row(row: dict[str, Any]) -> str:
    error = row["forecast_s"] / row["measured_s"] - 1
    memory = row["forecast_memory_bytes"] / row["measured_memory_bytes"] - 1
    text = (
        f"{row['plan']:60} {row['forecast_s']:8.4f} s {row['measured_s']:8.4f} s {error:+6.1%}, memory {memory:+6.1%}"
    )
    text += f", of medians {row['forecast_median_s'] / row['measured_median_s'] - 1:+6.1%}"
    text += f", unpaired {row['forecast_unpaired_s'] / row['measured_s'] - 1:+6.1%}"
    text += f" ({min(row['unpaired_s']):.3f} to {max(row['unpaired_s']):.3f} s)"
    return text + ", FAILED the parity check" * (not row["equal"])


def describe_all(data: dict[str, Any]) -> str:
    return (
        f"mean error {data['mean_error']:.1%}, worst {data['worst_error']:.1%}; "
        f"unpaired {data['mean_error_unpaired']:.1%}, {data['worst_error_unpaired']:.1%}; "
        f"of medians {data['mean_error_of_medians']:.1%}, {data['worst_error_of_medians']:.1%}; "
        f"worst memory error {data['worst_memory_error']:.1%}"
    )


if __name__ == "__main__":
    main()
