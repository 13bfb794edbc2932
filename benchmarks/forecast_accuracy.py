"""How true forecasts are: plans forecast from a profile, and run.

    python benchmarks/forecast_accuracy.py --json

The executor's own work is measured (every few plans anew), then workers prove the plan equal to serial and take turns:
one of them measures the model's units, loss and optimiser on its core, both measure links, sums and how they crowd each
other; then all run some steps. A shared machine may be a third slower some seconds later, and so steps and what
forecasts are made of are spread over the same minute. Around each step every worker also times the model in one piece,
without the engine, and the step's forecast has its cores as fast as that. What counts is the mean over turns of the
median forecast and of the median step: of a core that goes at either of two speeds, a median over all is the speed that
was a little more frequent. Beside it are the errors by medians over all, and those of forecasts from what was measured
at the beginning of each turn alone, with the machine's crowding: luck moves these by more.
`--only 3` or `--only 0-4` runs some. Memory is the peak of the fullest worker.
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

# Model, options of the model, batch, and what makes the plan; three of each strategy at least. `steps`: batches of a
# stream, in inference.
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
    parser.add_argument("--turns", type=int, default=6, help="times that a plan is forecast, and run for some steps")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a turn")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of measuring units in a turn")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of measuring the machine in a turn")
    parser.add_argument("--calibrate-every", type=int, default=2, help="plans after which the machine is measured anew")
    parser.add_argument("--only", default="", help="one plan or a range of them, from 0")
    parser.add_argument("--devices", default="", help="devices with semicolons; otherwise the machine's first")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    sys.path.insert(0, str(JOBS))  # workers are copies of this process, and look for their job here
    from stagewright.machine.machine import default_devices
    from stagewright.planner.calibration.calibrate import calibrate

    low, _, high = options.only.partition("-")
    devices = tuple(options.devices.split(";")) if options.devices else default_devices(2)
    chosen = PLANS[int(low) : int(high or low) + 1] if options.only else PLANS
    chosen = tuple(one for one in chosen if len(devices) > 1 or one["mesh"] == "serial")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        for number, about in enumerate(chosen):
            if number % options.calibrate_every == 0:
                found = calibrate(devices)
                calibration = Path(root) / f"calibration-{number}.json"
                calibration.write_text(json.dumps(found.to_dict()))
            rows.append(forecast_and_run(about, make_plan(about, devices), calibration, options, root))
            print(describe_row(rows[-1]), file=sys.stderr, flush=True)
            if options.output:  # a benchmark that is ended early leaves what it has
                write_record(options.output, summary(rows))
    if options.json:
        print(json.dumps(summary(rows), indent=2))
    else:
        print("\n".join([*map(describe_row, rows), describe_all(summary(rows))]))


def forecast_and_run(
    about: dict[str, Any], plan: Any, calibration: Path, options: argparse.Namespace, root: str
) -> dict[str, Any]:
    """One plan."""
    from stagewright.engine.launch.launcher import launch
    from stagewright.runs.run_folder import RunFolder

    settings = {name: getattr(options, name) for name in ("turns", "steps", "repeats", "rounds")}
    os.environ["FORECAST_TURNS"] = json.dumps(settings | {"calibration": str(calibration)})
    folder = RunFolder.create(root, plan)
    launch(plan, folder, job="forecast_turns:run_job")
    workers = [
        json.loads((folder.worker(rank).path / "turns.json").read_text()) for rank in range(plan.mesh.num_workers)
    ]
    forecasts = sorted((one for worker in workers for one in worker["forecasts"]), key=lambda one: one["turn"])
    turns = [
        [max(times) for times in zip(*together, strict=True)]
        for together in zip(*(worker["steps_s"] for worker in workers), strict=True)
    ]
    steps = [taken for turn in turns for taken in turn]
    return {
        "plan": describe(about),
        "equal": workers[0]["equality"]["equal"],
        # One value a turn on both sides, then their mean: both are treated alike.
        "forecast_s": statistics.mean(statistics.median(one["paired_s"]) for one in forecasts),
        "measured_s": statistics.mean(statistics.median(turn) for turn in turns),
        "forecast_unpaired_s": statistics.mean(one["step_s"] for one in forecasts),
        "forecast_median_s": statistics.median(step_s for one in forecasts for step_s in one["paired_s"]),
        "measured_median_s": statistics.median(steps),
        "forecast_memory_bytes": max(one["memory_bytes"] for one in forecasts),
        "measured_memory_bytes": max(worker["memory_bytes"] for worker in workers),
        "forecasts_s": [one["paired_s"] for one in forecasts],
        "unpaired_s": [one["step_s"] for one in forecasts],
        "steps_s": turns,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far off they are."""
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


def make_plan(about: dict[str, Any], devices: tuple[str, ...]) -> Any:
    from stagewright.engine.parallel.resolve import resolve_plan
    from stagewright.spec.plan import Mesh, ModelSpec, Plan

    rest = {name: value for name, value in about.items() if name not in ("model", "sequence_length", "image_size")}
    mesh = Mesh.parse(rest.pop("mesh"))
    model = ModelSpec(
        name=about["model"], sequence_length=about.get("sequence_length"), image_size=about.get("image_size")
    )
    return resolve_plan(Plan(model=model, mesh=mesh, devices=devices[: mesh.num_workers], **rest))


def describe(about: dict[str, Any]) -> str:
    words = [about["model"], about["mesh"], f"batch {about['batch']}"]
    words += [f"{about['microbatches']} micro-batches"] if "microbatches" in about else []
    words += [about[name] for name in ("schedule",) if name in about]
    words += ["recomputed"] if about.get("recompute") == "always" else []
    words += ["sharded"] if about.get("shard") else []
    words += [f"codec {about['codec']}"] if "codec" in about else []
    words += ["inference"] if about.get("training") is False else []
    return ", ".join(words)


def describe_row(row: dict[str, Any]) -> str:
    error = row["forecast_s"] / row["measured_s"] - 1
    memory = row["forecast_memory_bytes"] / row["measured_memory_bytes"] - 1
    text = (
        f"{row['plan']:60} {row['forecast_s']:8.4f} s {row['measured_s']:8.4f} s {error:+6.1%}, memory {memory:+6.1%}"
    )
    text += f", by medians {row['forecast_median_s'] / row['measured_median_s'] - 1:+6.1%}"
    text += f", unpaired {row['forecast_unpaired_s'] / row['measured_s'] - 1:+6.1%}"
    text += f" ({min(row['unpaired_s']):.3f} to {max(row['unpaired_s']):.3f} s)"
    return text + ", NOT equal to serial" * (not row["equal"])


def describe_all(data: dict[str, Any]) -> str:
    return (
        f"mean error {data['mean_error']:.1%}, worst {data['worst_error']:.1%}; "
        f"unpaired {data['mean_error_unpaired']:.1%}, {data['worst_error_unpaired']:.1%}; "
        f"by medians {data['mean_error_of_medians']:.1%}, {data['worst_error_of_medians']:.1%}; "
        f"memory at most {data['worst_memory_error']:.1%} off"
    )


if __name__ == "__main__":
    main()
