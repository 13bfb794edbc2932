"""Throughput of units chosen for recomputation, against the best uniform policy at the same memory.

    python benchmarks/memory_by_unit.py --image-size 64 --batch 32
    python benchmarks/memory_by_unit.py --image-size 64 --batch 32 --mesh pipeline=2 --microbatches 4

The memory limit lies between what the plan needs with everything recomputed and without recomputation (`--share` of the
way), so that it binds. Uniform policies: none, always (each block by itself where there is no pipeline), and one yes or
no for each stage with every cut; the forecast chooses the best that fits. Both plans run under the limit, which the
engine enforces, in alternating order; each round gives one ratio of throughputs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from record import write_record
from stagewright.cluster.cluster import Cluster, DeviceGroup
from stagewright.engine.jobs.compare import run_plan
from stagewright.errors import StagewrightError
from stagewright.machine.machine import default_devices
from stagewright.planner.costs.measure import ModelCosts, measure_model
from stagewright.planner.forecast import prepare_plan, profiled_size
from stagewright.planner.search.by_unit import recompute_units
from stagewright.planner.search.candidates import CandidateBuilder
from stagewright.planner.search.result import RankedPlan
from stagewright.quantity import format_bytes
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.spec.activation_checkpointing import block_ends, checkpoint_by_block, describe_recompute
from stagewright.spec.plan import Mesh, ModelSpec, Plan


@dataclass(frozen=True, slots=True)
class _OneSize:
    """A cost source that knows one micro-batch size."""

    costs: ModelCosts

    def model(self, size: int, tensor: int) -> ModelCosts:
        return self.costs


def uniform_plans(base: Plan, measured: ModelCosts) -> Iterator[Plan]:
    """Yield every uniform policy, with every cut."""
    units = measured.profile.units
    if base.mesh.pipeline == 1:
        yield base
        yield checkpoint_by_block(replace(base, recompute="always"), block_ends(units))
        return
    names = [unit.name for unit in units[:-1]]
    for cuts in itertools.combinations(names, base.mesh.pipeline - 1):
        for flags in itertools.product((False, True), repeat=base.mesh.pipeline):
            yield replace(base, cuts=cuts, recompute=flags)


def best_uniform(base: Plan, measured: ModelCosts, cluster: Cluster) -> tuple[Plan, float, int] | None:
    """Return the fastest uniform plan that fits by its forecast, its step time and its peak memory."""
    best: tuple[Plan, float, int] | None = None
    for plan in uniform_plans(base, measured):
        forecast = prepare_plan(plan, measured, cluster).forecast()
        if forecast.fits and (best is None or forecast.step_s < best[1]):
            best = plan, forecast.step_s, forecast.peak_memory_bytes
    return best


def peak_bytes(plan: Plan, measured: ModelCosts, cluster: Cluster) -> int:
    """Return the largest counted peak of any worker."""
    forecast = prepare_plan(plan, measured, cluster).forecast()
    return max(worker.memory.counted_bytes for worker in forecast.workers)


def choose_plans(base: Plan, measured: ModelCosts, share: float) -> tuple[Plan, RankedPlan, Plan]:
    """Return the best uniform plan, the solved plan and the one without recomputation, under a limit that binds."""
    cluster = Cluster(devices=(DeviceGroup(kind="cpu", count=base.mesh.num_workers),))
    cut = prepare_plan(base, measured, cluster).plan
    always = checkpoint_by_block(replace(cut, recompute="always"), block_ends(measured.profile.units))
    low, high = peak_bytes(always, measured, cluster), peak_bytes(cut, measured, cluster)
    limited = replace(base, memory_bytes=int(low + share * (high - low)))
    uniform = best_uniform(limited, measured, cluster)
    builder = CandidateBuilder(_OneSize(measured), cluster, EngineOverheads(), "pipeline", 1.0)  # type: ignore[arg-type]
    solved = recompute_units(builder, limited)
    if uniform is None or solved is None:
        raise SystemExit(f"nothing fits in {format_bytes(limited.memory_bytes or 0)}; use a larger --share")
    sizes = [format_bytes(size) for size in (limited.memory_bytes or 0, low, high)]
    print(f"limit {sizes[0]}; all recomputed {sizes[1]}, none {sizes[2]}")
    print(f"uniform: {uniform[0].recompute}, cuts {len(uniform[0].cuts)}, forecast step {uniform[1]:.3f} s")
    print(f"by unit: {solved.plan.recompute}, cuts {solved.plan.cuts}, forecast step {solved.forecast.step_s:.3f} s")
    return uniform[0], solved, replace(cut, memory_bytes=limited.memory_bytes)


def measure(plan: Plan) -> dict[str, Any]:
    """Run a plan and return its throughput, memory and parity."""
    with tempfile.TemporaryDirectory() as folder:
        row = run_plan(plan, Path(folder))
    return {
        "recompute": describe_recompute(plan),
        "samples_per_s": row.samples_per_s,
        "peak_memory_bytes": list(row.peak_memory_bytes),
        "equal": row.equal,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit-tiny")
    parser.add_argument("--sequence-length", type=int)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--mesh", default="serial")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.75, help="where the limit lies between always and none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", help="write the record to this file")
    options = parser.parse_args(arguments)
    mesh = Mesh.parse(options.mesh)
    base = Plan(
        model=ModelSpec(name=options.model, sequence_length=options.sequence_length, image_size=options.image_size),
        batch=options.batch,
        mesh=mesh,
        microbatches=options.microbatches,
        steps=options.steps,
        warmup=1,
        devices=default_devices(mesh.num_workers, share=True),
    )
    measured = measure_model(base, size=profiled_size(base)[0], repeats=3)
    uniform, solved, none = choose_plans(base, measured, options.share)
    try:
        measure(none)
        print("without recomputation: fits, so the limit does not bind")
    except StagewrightError as error:
        print(f"without recomputation: {str(error).splitlines()[0]}")
    rows, ratios = [], []
    for number in range(options.rounds):
        order = [("uniform", uniform), ("by unit", solved.plan)][:: 1 if number % 2 == 0 else -1]
        found = {name: measure(plan) for name, plan in order}
        ratios.append(found["by unit"]["samples_per_s"] / found["uniform"]["samples_per_s"])
        rows.append(found)
        print(
            f"round {number + 1}: "
            + ", ".join(f"{name} {row['samples_per_s']:.1f}" for name, row in found.items())
            + f" samples/s, ratio {ratios[-1]:.3f}",
            flush=True,
        )
    median = statistics.median(ratios)
    print(f"by unit / best uniform: {median:.3f} (median of {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f})")
    if options.output:
        limit = solved.plan.memory_bytes
        write_record(options.output, {"limit_bytes": limit, "ratio": median, "ratios": ratios, "rounds": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
