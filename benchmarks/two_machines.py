"""Plan for the link between two machines, run the plan there, and compare the forecast with the measured step.

    python benchmarks/two_machines.py --output two_machines.json

The machines are network namespaces, each with one core, and the cable between them is shaped by a token bucket (tc's
tbf) to 0.1, 1 and 10 Gbit/s. For each rate:

    calibrate    P2P, all-reduces and their overlap with compute are measured over that cable, as on any machine
    plan         the search uses that link; the fastest plan is chosen, which may be the one for one machine
    run          torchrun on both machines: parity check, then timed steps; the fastest plan for two machines runs too
    compare      the forecast made before the run, with the median step

Last, the cable is cut during a step: both machines must name it. Needs root, and a machine that does nothing else: both
the forecast and the steps are measured. It takes about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from injection import inject
from jobs.link_calibration import ROUNDS
from namespaces import Machine, run_workers, two_machines
from record import write_record
from stagewright.api.plan import plan as find_plan
from stagewright.machine.machine import default_devices
from stagewright.planner.calibration.calibrate import Calibration, calibrate, calibrate_from_rounds
from stagewright.planner.search.result import RankedPlan
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.spec.plan_file import write_plan

BENCHMARKS = Path(__file__).resolve().parent
HANG_S = 10.0  # until a dead link is noticed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit-tiny")
    parser.add_argument("--image-size", type=int, default=112, help="0: the model's")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--gbits", default="0.1,1,10", help="rates of the link, in Gbit/s")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runs", type=int, default=3, help="runs of each plan")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of calibrating the link")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("network namespaces need root")
    begun_s = time.monotonic()
    here = calibrate(default_devices(2))
    figures: dict[str, Any] = {
        **{name: getattr(options, name) for name in ("model", "image_size", "batch", "steps", "runs")},
        "rows": [],
    }

    def save() -> None:
        if options.output is not None:
            write_record(options.output, {**figures, "seconds": round(time.monotonic() - begun_s)})

    for gbits in map(float, options.gbits.split(",")):
        with tempfile.TemporaryDirectory() as folder, two_machines(gbits * 1e9) as machines:
            row = {"gbits": gbits, **measure(Path(folder), machines, here, options)}
        figures["rows"].append(row)
        save()
        for plan in row["plans"]:
            print(
                f"{time.monotonic() - begun_s:4.0f} s  {gbits:4g} Gbit/s: {plan['mesh']:10} forecast "
                f"{plan['forecast_s'] * 1e3:6.0f} ms, measured {plan['measured_s'] * 1e3:6.0f} ms, "
                f"error {plan['error']:+.1%}{', chosen' if plan['chosen'] else ''}",
                flush=True,
            )
    with tempfile.TemporaryDirectory() as references:
        fault = {"kind": "cut network", "moment": "first step", "plan": "pipeline", "worker": 1}
        figures["dead_link"] = inject(fault, HANG_S, Path(references))
    save()
    print(figures["dead_link"]["error"])


def measure(
    folder: Path, machines: tuple[Machine, Machine], here: Calibration, options: argparse.Namespace
) -> dict[str, Any]:
    """Calibrate the link, plan for it, run the plans."""
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
    ).search
    assert found.serial is not None
    ranked = sorted([found.serial, *found.best], key=lambda candidate: candidate.forecast.step_s)
    chosen = [ranked[0], *([found.best[0]] if ranked[0] is found.serial else [])]
    return {
        "link_bytes_per_s": calibration.link.bandwidth_bytes_per_s,
        "link_latency_s": calibration.link.latency_s,
        "collective_bytes_per_s": calibration.collective.bandwidth_bytes_per_s,
        "noise": calibration.noise,
        "serial_s": found.serial.forecast.step_s,
        "data_s": None if found.data_parallel is None else found.data_parallel.forecast.step_s,
        "plans": [
            {"chosen": number == 0, **run(folder / f"plan-{number}", machines, candidate, options)}
            for number, candidate in enumerate(chosen)
        ],
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


def run(
    folder: Path, machines: tuple[Machine, Machine], candidate: RankedPlan, options: argparse.Namespace
) -> dict[str, Any]:
    """Run a plan several times on as many of the machines as it has workers."""
    num_workers = candidate.plan.mesh.num_workers
    plan = replace(candidate.plan, devices=default_devices(2)[:num_workers], steps=options.steps)
    folder.mkdir()
    write_plan(plan, folder / "plan.toml")
    results = []
    for number in range(options.runs):
        run_folder = folder / f"run-{number}"
        start(machines[:num_workers], folder / "plan.toml", "--run-folder", str(run_folder))
        result = RunFolder.open(run_folder).result()
        assert result is not None
        results.append(result)
    measured_s = statistics.median(result.latency_s for result in results)
    return {
        "mesh": str(plan.mesh),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule if plan.mesh.pipeline > 1 else None,
        "shard": plan.shard,
        "forecast_s": candidate.forecast.step_s,
        "measured_s": measured_s,
        "runs_s": [result.latency_s for result in results],
        "error": candidate.forecast.step_s / measured_s - 1,
        "equal": all(result.equal for result in results),
    }


def start(machines: tuple[Machine, ...], plan: Path, *words: str, environment: dict[str, str] | None = None) -> None:
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    ends = run_workers(machines, plan, *words, environment={"PYTHONPATH": path, **(environment or {})}, limit_s=480)
    if any(code for code, _, _ in ends):
        sys.exit("\n".join(text for _, text, _ in ends))


if __name__ == "__main__":
    main()
