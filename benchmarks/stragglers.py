"""Name the slow rank, link, data loader or garbage collector of simulated jobs, and count right and false verdicts.

    python benchmarks/stragglers.py --trials 200              200 injected faults and 200 clean jobs, by seed
    python benchmarks/stragglers.py --published DIR           the three labelled jobs of StragglerAnalysis (its data/)

A job is a mesh of data-parallel replicas and pipeline stages with 20 steps. Every operation varies by 2 to 5 %, ranks
differ by 0.5 %, and one operation in a hundred takes 1.3 times as long. A fault costs at least 5 % of the step. The
trace of the job, as `stagewright attach` or the profiler records it, is all that the analysis sees.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stagewright.spec.plan import Mesh
from stagewright.trace.events import Trace, TraceEvent, WorkerTrace
from stagewright.trace.stragglers.analysis import analyze
from stagewright.trace.stragglers.blame import Culprit, find_culprit
from stagewright.trace.stragglers.from_trace import job_of_trace
from stagewright.trace.stragglers.operation_table import read_operation_table

CAUSES = ("worker", "link", "data loader", "garbage collector")
MESHES = ("data=4", "data=8", "data=2,pipeline=2", "data=4,pipeline=2", "data=2,pipeline=4")
NUM_STEPS = 20
MIN_COST = 0.05
FORWARD_S, TRANSFER_S, LOADING_S, OPTIMIZER_S, ALLREDUCE_S, HOST_S = 0.02, 0.001, 0.004, 0.006, 0.008, 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with a job."""

    cause: str
    ranks: tuple[int, ...]
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One job with its fault, if any, and the verdict."""

    seed: int
    mesh: str
    fault: Fault | None
    cost: float
    """Share of the step that the fault costs."""
    found: Culprit | None
    seconds: float
    """Time of the analysis."""

    @property
    def right(self) -> bool:
        if self.fault is None or self.found is None:
            return self.fault is None and self.found is None
        return (self.found.cause, set(self.found.ranks)) == (self.fault.cause, set(self.fault.ranks))


def simulate_job(mesh: Mesh, seed: int, fault: Fault | None) -> Trace:
    """Return the trace of a job with 1F1B pipelines and a gradient all-reduce."""
    noise = np.random.default_rng(seed)
    sigma = noise.uniform(0.02, 0.05)
    speeds = 1 + 0.005 * noise.standard_normal(mesh.num_workers)
    num_microbatches = int(noise.integers(2, 5)) * mesh.pipeline if mesh.pipeline > 1 else 1
    events: dict[int, list[TraceEvent]] = {rank: [] for rank in range(mesh.num_workers)}
    begin_s = 0.0
    for step in range(NUM_STEPS):

        def took(seconds: float, rank: int) -> float:
            value = seconds * speeds[rank] * noise.lognormal(0.0, sigma)
            return float(value * (1.3 if noise.random() < 0.01 else 1.0))

        ends = _simulate_step(mesh, step, begin_s, num_microbatches, took, fault, noise, events)
        begin_s = max(ends)
    workers = tuple(
        WorkerTrace(
            rank=rank,
            host="",
            clock_error_s=0.0,
            events=tuple(sorted(events[rank], key=lambda event: (event.start_s, -event.end_s))),
        )
        for rank in events
    )
    return Trace(run=f"seed {seed}", mesh=mesh, training=True, workers=workers, num_steps=NUM_STEPS)


def _simulate_step(mesh, step, begin_s, num_microbatches, took, fault, noise, events) -> list[float]:  # type: ignore[no-untyped-def]
    """Advance all ranks by one step; append their events; return when each ends."""
    now = dict.fromkeys(events, begin_s)
    arrived: dict[tuple[int, str, int], float] = {}

    def add(rank: int, kind: str, start: float, end: float, **about: object) -> None:
        values = {"stage": mesh.coordinates(rank)[2], "microbatch": None, "bytes": None, "peer": None, "note": None}
        stream = about.pop("stream", "compute")
        events[rank].append(
            TraceEvent(step=step, kind=kind, stream=stream, start_s=start, end_s=end, **{**values, **about})  # type: ignore[arg-type]
        )

    def run(rank: int, kind: str, seconds: float, **about: object) -> None:
        add(rank, kind, now[rank], now[rank] + seconds, **about)
        now[rank] += seconds

    def is_faulty(cause: str, *ranks: int) -> bool:
        return fault is not None and fault.cause == cause and set(fault.ranks) == set(ranks)

    for rank in events:
        run(rank, "data-loading", took(LOADING_S, rank) * (fault.factor if is_faulty("data loader", rank) else 1.0))
        run(rank, "launch", took(HOST_S, rank))
        if is_faulty("garbage collector", rank) and noise.random() < 0.4:
            run(rank, "garbage-collection", fault.factor * FORWARD_S)
    queues = {rank: _order(mesh.coordinates(rank)[2], mesh.pipeline, num_microbatches) for rank in events}
    while any(queues.values()):
        for rank, queue in queues.items():
            while queue:
                kind, number = queue[0]
                stage = mesh.coordinates(rank)[2]
                content = "activation" if kind == "forward" else "gradient"
                source = stage - 1 if kind == "forward" else stage + 1
                if 0 <= source < mesh.pipeline:
                    if (rank, content, number) not in arrived:
                        break
                    end = max(now[rank], arrived[rank, content, number])
                    peer = rank + source - stage
                    about = {"microbatch": number, "note": content, "peer": peer, "stream": "receive"}
                    add(rank, "receive", now[rank], end, **about)
                    now[rank] = end
                slow = fault.factor if is_faulty("worker", rank) else 1.0
                run(rank, kind, took(FORWARD_S * (2 if kind == "backward" else 1), rank) * slow, microbatch=number)
                queue.pop(0)
                target = stage + 1 if kind == "forward" else stage - 1
                if 0 <= target < mesh.pipeline:
                    peer = rank + target - stage
                    about = {"microbatch": number, "note": content, "peer": peer, "stream": "send"}
                    add(rank, "send", now[rank], now[rank], **about)
                    slow = fault.factor if is_faulty("link", rank, peer) else 1.0
                    arrived[peer, content, number] = now[rank] + took(TRANSFER_S, rank) * slow
    for stage in range(mesh.pipeline):
        ranks = [rank for rank in events if mesh.coordinates(rank)[2] == stage]
        last = max(now[rank] for rank in ranks)
        transfer = took(ALLREDUCE_S, ranks[0])
        for rank in ranks:
            add(rank, "collective", now[rank], last + transfer, note="data")
            now[rank] = last + transfer
            run(rank, "optimizer", took(OPTIMIZER_S, rank))
    for rank in events:
        add(rank, "step", begin_s, now[rank])
    return list(now.values())


def _order(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[str, int]]:
    """Return the actions of a stage in 1F1B."""
    warmup = min(num_microbatches, num_stages - stage)
    order = [("forward", number) for number in range(warmup)]
    for number in range(num_microbatches):
        order.append(("backward", number))
        if warmup + number < num_microbatches:
            order.append(("forward", warmup + number))
    return order


def make_fault(cause: str, mesh: Mesh, chance: random.Random) -> Fault:
    """Draw a fault of a job."""
    rank = chance.randrange(mesh.num_workers)
    if cause == "link":
        data, _, stage = mesh.coordinates(rank)
        stage = min(stage, mesh.pipeline - 2)
        first = mesh.rank(data, 0, stage)
        return Fault(cause=cause, ranks=(first, first + 1), factor=chance.uniform(20, 80))
    factors = {"worker": (1.15, 2.0), "data loader": (4.0, 15.0), "garbage collector": (1.0, 4.0)}
    return Fault(cause=cause, ranks=(rank,), factor=chance.uniform(*factors[cause]))


def _step_s(trace: Trace) -> float:
    return float(np.mean([end - start for start, end in trace.spans.values()]))


def run_trial(seed: int, cause: str | None) -> Trial:
    """Simulate a job, with a fault that costs enough, and ask who is slow."""
    chance = random.Random(seed)
    meshes = [mesh for mesh in MESHES if cause != "link" or "pipeline" in mesh]
    fault, cost = None, 0.0
    while True:
        mesh = Mesh.parse(chance.choice(meshes))
        if cause is None:
            trace = simulate_job(mesh, seed, None)
            break
        fault = make_fault(cause, mesh, chance)
        trace = simulate_job(mesh, seed, fault)
        cost = 1 - _step_s(simulate_job(mesh, seed, None)) / _step_s(trace)
        if cost >= MIN_COST:
            break
    begin = time.perf_counter()
    found = find_culprit(job_of_trace(trace))
    return Trial(seed=seed, mesh=str(mesh), fault=fault, cost=cost, found=found, seconds=time.perf_counter() - begin)


def published(folder: Path) -> list[dict[str, object]]:
    """Compare with the published answers of the three labelled jobs."""
    rows = []
    for name, cause in (("AR", "worker"), ("ST", "last stage"), ("SE", "sequence lengths")):
        analysis = analyze(read_operation_table(folder / f"trace-{name}.parquet"))
        answers = {
            "S": (analysis.slowdown, json.loads((folder / f"result-{name}.json").read_text())["blocking_slowdown"]),
            "M_W": (analysis.worker_share, json.loads((folder / f"mw-{name}.json").read_text())["Mw"]),
            "M_S": (analysis.last_stage_share, json.loads((folder / f"ms-{name}.json").read_text())["Ms"]),
        }
        rows.append({"job": name, "cause": analysis.cause, "expected": cause, **answers, "verdict": analysis.verdict})
        text = ", ".join(f"{key} {ours:.4f} (published {theirs:.4f})" for key, (ours, theirs) in answers.items())
        print(f"{name}: {text}; cause: {analysis.cause} (published: {cause})")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="faults, and as many clean jobs")
    parser.add_argument("--published", type=Path, help="the folder data/ of StragglerAnalysis")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    content: dict[str, object] = {}
    if options.published is not None:
        content["published"] = published(options.published)
    else:
        injected = [run_trial(seed, CAUSES[seed % len(CAUSES)]) for seed in range(options.trials)]
        clean = [run_trial(10_000 + seed, None) for seed in range(options.trials)]
        for cause in CAUSES:
            own = [trial for trial in injected if trial.fault is not None and trial.fault.cause == cause]
            print(f"{cause}: {sum(trial.right for trial in own)} of {len(own)} named with rank and cause")
        false = [trial for trial in clean if not trial.right]
        right = sum(trial.right for trial in injected)
        slowest_s = max(trial.seconds for trial in [*injected, *clean])
        print(
            f"all: {right} of {len(injected)} named; {len(false)} false alarms in {len(clean)} clean jobs; "
            f"the slowest analysis took {slowest_s:.2f} s"
        )
        for trial in [trial for trial in injected if not trial.right] + false:
            print(f"  seed {trial.seed}, {trial.mesh}: {trial.fault}, costs {trial.cost:.1%}: {trial.found}")
        content["trials"] = {
            "injected": len(injected),
            "named": right,
            "clean": len(clean),
            "false_alarms": len(false),
            "slowest_s": slowest_s,
        }
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
