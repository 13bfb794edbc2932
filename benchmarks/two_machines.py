"""Plan for the link between two machines, run the plan there, and compare the forecast with the measured step.

    python benchmarks/two_machines.py --output two_machines.json

The machines are network namespaces, each with one core, and the cable between them is shaped by a token bucket (tc's
tbf) to 0.1, 1 and 10 Gbit/s. For each rate:

    calibrate    P2P, all-reduces and their overlap with compute are measured over that cable, as on any machine
    plan         the search uses that link; a plan for one device is among the candidates
    run          torchrun on both machines: parity check, then timed steps
    compare      the forecast made before the run, with the median step

Needs root, and a machine that does nothing else: both the forecast and the steps are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.link_calibration import ROUNDS
from namespaces import Machine, run_workers, two_machines
from record import write_record
from stagewright.api.plan import plan as find_plan
from stagewright.machine.machine import default_devices
from stagewright.planner.calibration.calibrate import Calibration, calibrate, calibrate_from_rounds
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.spec.plan_file import write_plan

BENCHMARKS = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit-tiny")
    parser.add_argument("--image-size", type=int, default=112, help="0: the model's")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--gbits", default="0.1,1,10", help="rates of the link, in Gbit/s")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of calibrating the link")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("network namespaces need root")
    here = calibrate(default_devices(2))
    rows: list[dict[str, Any]] = []
    for gbits in map(float, options.gbits.split(",")):
        with tempfile.TemporaryDirectory() as folder, two_machines(gbits * 1e9) as machines:
            rows.append({"gbits": gbits, **measure(Path(folder), machines, here, options)})
        print(json.dumps(rows[-1]), flush=True)
        if options.output is not None:
            settings = {name: getattr(options, name) for name in ("model", "image_size", "batch", "steps")}
            write_record(options.output, {**settings, "rows": rows})
    for row in rows:
        print(
            f"{row['gbits']:4g} Gbit/s: {row['mesh']:10} forecast {row['forecast_s'] * 1e3:6.0f} ms, "
            f"measured {row['measured_s'] * 1e3:6.0f} ms, error {row['error']:+.1%}"
        )


def measure(
    folder: Path, machines: tuple[Machine, Machine], here: Calibration, options: argparse.Namespace
) -> dict[str, Any]:
    """Calibrate the link, plan for it, run the plan."""
    calibration = calibrate_link(folder, machines, here, options.rounds)
    cache = folder / "cache"
    cache.mkdir()
    # A pace of almost zero: the search must not measure this machine's loopback instead.
    (cache / "calibration.json").write_text(json.dumps(replace(calibration, pace_s=1e-9).to_dict()))
    found = find_plan(
        options.model,
        cluster=calibration.cluster(2),
        batch=options.batch,
        image_size=options.image_size or None,
        schedules=("gpipe", "1f1b", "interleaved"),
        recompute=("none",),
        cache=cache,
        repeats=5,
    )
    best = found.search.best[0]
    devices = default_devices(2)[: best.plan.mesh.num_workers]
    result = run(folder, machines, replace(best.plan, devices=devices, steps=options.steps))
    return {
        "mesh": str(best.plan.mesh),
        "microbatches": best.plan.microbatches,
        "schedule": best.plan.schedule if best.plan.mesh.pipeline > 1 else None,
        "shard": best.plan.shard,
        "link_bytes_per_s": calibration.link.bandwidth_bytes_per_s,
        "link_latency_s": calibration.link.latency_s,
        "collective_bytes_per_s": calibration.collective.bandwidth_bytes_per_s,
        "forecast_s": best.forecast.step_s,
        "measured_s": result.latency_s,
        "error": best.forecast.step_s / result.latency_s - 1,
        "equal": result.equal,
        "candidates": [
            {"mesh": str(one.plan.mesh), "microbatches": one.plan.microbatches, "step_s": one.forecast.step_s}
            for one in found.search.best[:5]
        ],
        "serial_s": None if found.search.serial is None else found.search.serial.forecast.step_s,
        "data_s": None if found.search.data_parallel is None else found.search.data_parallel.forecast.step_s,
        "noise": calibration.noise,
    }


def calibrate_link(folder: Path, machines: tuple[Machine, Machine], here: Calibration, num_rounds: int) -> Calibration:
    """Measure the link with the same job as this machine's; the executor's overhead is this machine's."""
    plan = Plan(model=ModelSpec(name="mlp-mnist"), batch=64, mesh=Mesh(data=2), devices=default_devices(2))
    write_plan(plan, folder / "calibration.toml")
    run_folder = folder / "calibration"
    start(
        machines,
        folder / "calibration.toml",
        *("--job", "jobs.link_calibration:run", "--run-folder", str(run_folder)),
        environment={ROUNDS: str(num_rounds)},
    )
    return calibrate_from_rounds(here, json.loads((run_folder / "calibration.json").read_text()))


def run(folder: Path, machines: tuple[Machine, Machine], plan: Plan) -> RunResult:
    """Run a plan on as many of the machines as it has workers."""
    write_plan(plan, folder / "plan.toml")
    start(machines[: plan.mesh.num_workers], folder / "plan.toml", "--run-folder", str(folder / "run"))
    result = RunFolder.open(folder / "run").result()
    assert result is not None
    return result


def start(machines: tuple[Machine, ...], plan: Path, *words: str, environment: dict[str, str] | None = None) -> None:
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    ends = run_workers(machines, plan, *words, environment={"PYTHONPATH": path, **(environment or {})}, limit_s=480)
    if any(code for code, _, _ in ends):
        sys.exit("\n".join(text for _, text, _ in ends))


if __name__ == "__main__":
    main()
