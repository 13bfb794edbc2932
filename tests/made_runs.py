"""Run folders as workers leave them, made by hand: known times, nothing is run.

pipeline=2, 2 micro-batches, 10 ms an action (backward 20), 1 ms to hand over a message

worker 0  F0 F1 ········· B0 ·· B1 O
worker 1  ·· F0 B0 F1 B1 ········ O
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan

ENVIRONMENT = {
    "system": "Linux 6.1 x86_64",
    "processor": "A processor",
    "cores": [0, 1],
    "memory_bytes": 8 * 2**30,
    "gpus": [],
    "backends": ["gloo"],
    "versions": {"python": "3.11.7", "stagewright": "0.1.0.dev0", "torch": "2.13.0"},
}
SERIAL_S = 0.100
_BEGUN = datetime(2026, 11, 15, 3, 15, 2).astimezone()
_MEMORY = {"parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 0, "activations": 9_000_000, "buffers": 0}


def make_run(
    root: Path,
    mesh: str = "serial",
    *,
    name: str = "digits-vit",
    microbatches: int = 2,
    steps: int = 3,
    events: bool = True,
    step_s: float | None = None,
    equal: bool = True,
    number: int = 0,
    **plan_keys: Any,
) -> RunFolder:
    """A timed run, as `compare` leaves it."""
    shape = Mesh.parse(mesh)
    piped = shape.pipeline > 1
    plan_keys.setdefault("cuts", tuple(f"layers.{at}" for at in range(shape.pipeline - 1)))
    plan = Plan(
        model=ModelSpec(name=name),
        batch=32,
        mesh=shape,
        microbatches=microbatches if piped else 1,
        devices=tuple(f"cpu:{rank}" for rank in range(shape.num_workers)),
        steps=steps,
        **plan_keys,
    )
    folder = RunFolder.create(root, plan, environment=ENVIRONMENT, now=_BEGUN + timedelta(seconds=number))
    workers = [list(one) for one in _events(shape, plan.microbatches, steps)]
    took = step_s if step_s is not None else _median(workers)
    for rank, rows in enumerate(workers):
        with folder.worker(rank) as worker:
            for step in range(steps):
                worker.append_metrics(step=step, seconds=took, loss=2.0 - 0.1 * step, waited_s=0.01)
            if events:
                worker.write_events(rows)
                worker.write_memory(_memory(rank))
        clock = {"host": "here", "offset_s": -100.0 * rank, "error_s": 2e-5 * rank, "wall_s": 0.0}
        (worker.path / "clock.json").write_text(json.dumps(clock))
    count = shape.num_workers
    folder.finish(
        "done",
        {
            "strategy": shape.strategy,
            "workers": count,
            "batch": plan.batch,
            "microbatches": plan.microbatches,
            "schedule": plan.schedule if piped else None,
            "stages": plan.num_stages,
            "cuts": list(plan.cuts),
            "training": True,
            "samples_per_s": plan.batch / took,
            "samples_per_s_spread": 0.04 * plan.batch / took,
            "latency_s": took,
            "equal": equal,
            "equality": {
                "equal": equal,
                "tolerance": 1e-5,
                "loss": 1e-8,
                "outputs": 0.0,
                "gradients": 0.0 if equal else 0.5,
                "buffers": 0.0,
                "worst": "nothing" if equal else "fc.weight",
            },
            "peak_memory_bytes": [sum(_MEMORY.values()) // (rank + 1) for rank in range(count)],
            "process_peak_bytes": [2**28] * count,
            "memory": [{key: size // (rank + 1) for key, size in _MEMORY.items()} for rank in range(count)],
            "link_bytes": {str(edge): 1_048_576 * (edge + 1) for edge in range(shape.pipeline - 1)},
            "collective_bytes": [{"data": 500_000} if shape.data > 1 else {} for _ in range(count)],
            "bound": count * plan.microbatches / (plan.microbatches + shape.pipeline - 1),
            "run": str(folder.path),
        },
    )
    return folder


def make_training(root: Path, mesh: str = "serial", *, seed: int = 0, epochs: int = 3, number: int = 50) -> RunFolder:
    """A training run, as `train` leaves it."""
    shape = Mesh.parse(mesh)
    plan = Plan(
        model=ModelSpec(name="mlp-mnist", seed=seed),
        batch=64,
        mesh=shape,
        microbatches=2 if shape.pipeline > 1 else 1,
        cuts=tuple(f"layers.{at}" for at in range(shape.pipeline - 1)),
        task="digits",
        epochs=epochs,
        seed=seed,
        optimizer=OptimizerSpec(name="adamw", learning_rate=0.001),
    )
    folder = RunFolder.create(root, plan, environment=ENVIRONMENT, now=_BEGUN + timedelta(seconds=number + seed))
    rows = []
    with folder.worker(shape.num_workers - 1) as worker:
        worker.append_metrics(kind="begin", step=0, total=epochs * 10, batches=10)
        for step in range(1, epochs * 10 + 1):
            worker.append_metrics(
                kind="step", step=step, epoch=1, loss=2.3 / step, samples=64, seconds=0.02, waited_s=0
            )
        for epoch in range(1, epochs + 1):
            row = {
                "epoch": epoch,
                "step": 10 * epoch,
                "training_loss": 2.3 / epoch,
                "evaluation_loss": 2.4 / epoch,
                "accuracy": 1 - 0.5 / epoch + 0.01 * seed,
                "samples_per_s": 3000.0,
                "evaluation_s": 0.1,
            }
            worker.append_metrics(kind="epoch", **row)
            rows.append(row)
    last = {"accuracy": rows[-1]["accuracy"], "samples_per_s": 3000.0}
    folder.finish("done", {"epochs": rows, "metric": "accuracy", "steps": 10 * epochs, "seed": seed, **last})
    return folder


def _events(mesh: Mesh, microbatches: int, steps: int) -> Iterator[Iterator[dict[str, Any]]]:
    """GPipe's order on every worker, each on a clock of its own."""
    for rank in range(mesh.num_workers):
        yield _worker_events(mesh, rank, microbatches, steps)


def _worker_events(mesh: Mesh, rank: int, microbatches: int, steps: int) -> Iterator[dict[str, Any]]:
    *_, place = mesh.coordinates(rank)
    last = mesh.pipeline - 1
    forward_s, backward_s = 0.010 * 2 / microbatches, 0.020 * 2 / microbatches
    if mesh.num_workers == 1:
        forward_s, backward_s = SERIAL_S * 0.3, SERIAL_S * 0.6
    forward_end = last + microbatches
    length = forward_end * (forward_s + 0.001) + (last + microbatches) * (backward_s + 0.001) + 0.005
    for step in range(steps):
        base = 100.0 * rank + 1.0 + step * (length + 0.001)
        common = {"step": step, "stage": place}
        yield {"step": step, "kind": "step", "stream": "compute", "start_s": base, "end_s": base + length}
        at = base
        for way, seconds, begin in (
            ("forward", forward_s, base),
            ("backward", backward_s, base + forward_end * (forward_s + 0.001)),
        ):
            waits = place > 0 if way == "forward" else place < last
            sends = place < last if way == "forward" else place > 0
            note = "activation" if way == "forward" else "gradient"
            source, target = (rank - 1, rank + 1) if way == "forward" else (rank + 1, rank - 1)
            lag = place if way == "forward" else last - place
            for chunk in range(microbatches):
                start = max(at, begin + (lag + chunk) * (seconds + 0.001))
                both = {**common, "microbatch": chunk, "note": note, "bytes": 65536}
                if waits:
                    yield {
                        **both,
                        "kind": "receive",
                        "stream": "receive",
                        "start_s": at,
                        "end_s": start,
                        "peer": source,
                    }
                at = start + seconds
                yield {**common, "kind": way, "stream": "compute", "microbatch": chunk, "start_s": start, "end_s": at}
                if sends:
                    sent = {"kind": "send", "stream": "send", "start_s": at, "end_s": at + 0.001, "peer": target}
                    yield {**both, **sent}
                    at += 0.001
        if mesh.data > 1:
            summed = {"kind": "collective", "stream": "compute", "bytes": 250_000, "note": "data", "stage": 0}
            yield {"step": step, **summed, "start_s": at, "end_s": at + 0.0005}
        end = base + length
        yield {"step": step, "kind": "optimizer", "stream": "compute", "start_s": end - 0.002, "end_s": end - 0.001}


def _median(workers: list[list[dict[str, Any]]]) -> float:
    return max(row["end_s"] - row["start_s"] for rows in workers for row in rows if row["kind"] == "step")


def _memory(rank: int) -> Iterator[dict[str, Any]]:
    for at in range(8):
        doing = f"{'forward' if at < 4 else 'backward'} stage {rank} micro-batch {at % 4}"
        kept = 2_000_000 * (at + 1 if at < 4 else 8 - at)
        parts = {"parameters": 4_000_000, "gradients": 4_000_000 * (at > 3), "optimizer": 0, "activations": kept}
        yield {"time_s": 100.0 * rank + 0.01 * at, **parts, "buffers": 0, "other": 0, "doing": doing}
