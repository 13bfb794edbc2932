"""Inject seeded faults into training runs, and check how each run ends.

    python benchmarks/faults.py --faults 200 --output faults.json
    python benchmarks/faults.py --only 17

A fault has a kind (SIGKILL, SIGSTOP, SIGSEGV, an exception, sys.exit, os._exit, out of memory, an endless loop, a full
disk, a read-only or deleted folder, a killed launcher or fork server), a moment (start, load, first step, checkpoint,
evaluation, end), a plan (pipeline, data, FSDP, tensor) and a worker. Every run must end within 10 s of the fault, a
hang within its limit and one second; name the worker and the cause; have the exit code 1; leave no process after 3 s;
and resume from its last checkpoint with the losses of an uninterrupted run. Full disks and read-only folders are small
file systems in memory, which need root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from jobs.faulty_training import VARIABLE
from stagewright.engine.jobs.train import TrainingOptions, train
from stagewright.engine.launch.fork_server import start_fork_server
from stagewright.engine.state.checkpoint import latest
from stagewright.engine.worker.process import ProcessMark
from stagewright.errors import RunError, StagewrightError
from stagewright.spec.plan import Plan

JOB = "jobs.faulty_training:run"
END_S, ORPHAN_S = 10.0, 3.0
HANGS = ("SIGSTOP", "endless loop")
PLANS: dict[str, dict[str, Any]] = {
    "pipeline": {"mesh": "pipeline=2", "microbatches": 2, "schedule": "gpipe", "cuts": ("vit.layers.1",)},
    "data": {"mesh": "data=2"},
    "FSDP": {"mesh": "data=2", "shard": True},
    "tensor": {"mesh": "tensor=2"},
}
MOMENTS = ("start", "load", "first step", "checkpoint", "evaluation", "end")
CAUSES = {
    "SIGKILL": "was killed: SIGKILL",
    "SIGSEGV": "was killed: SIGSEGV",
    "SIGSTOP": "its process is stopped",
    "exception": "failed: ValueError: an injected fault",
    "sys.exit": "ended: its code called sys.exit(0)",
    "os._exit": "ended: exit code 0 before its job was done",
    "out of memory": "out of memory",
    "endless loop": "no worker has made progress",
    "full disk": "No space left on device",
    "read-only folder": "Read-only file system",
    "deleted folder": "was deleted or moved",
    "fork server killed": "its fork server",
    "launcher killed": "",
}
WITHOUT_WORKER = ("deleted folder", "fork server killed", "launcher killed")
ON_SMALL_DISK = ("full disk", "read-only folder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run the fault with this number alone")
    parser.add_argument("--hang-s", type=float, default=10.0, help="time limit of a hang; more on a busy machine")
    parser.add_argument("--limit-s", type=float, help="begin no further fault after this time")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--single", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.single is not None:
        run_single(json.loads(options.single))
        return
    start_fork_server()
    rows, begun_s = [], time.monotonic()
    for number, fault in enumerate(choose_faults(options.faults, options.seed)):
        if options.only not in (None, number) or (fault["kind"] in ON_SMALL_DISK and os.geteuid() != 0):
            continue
        if options.limit_s is not None and time.monotonic() - begun_s > options.limit_s:
            break
        row = {"number": number, **fault, **inject(fault, options.hang_s)}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(rows, indent=1) + "\n")
    summarize(rows)


def choose_faults(count: int, seed: int) -> list[dict[str, Any]]:
    """Return seeded faults; each kind and each moment occurs about as often as the others."""
    chance = random.Random(seed)
    kinds = [kind for kind in CAUSES for _ in range(-(-count // len(CAUSES)))]
    chance.shuffle(kinds)
    return [
        {
            "kind": kind,
            "moment": MOMENTS[index % len(MOMENTS)],
            "plan": chance.choice(list(PLANS)),
            "worker": chance.randrange(2),
        }
        for index, kind in enumerate(kinds[:count])
    ]


def make_plan(name: str) -> Plan:
    options = PLANS[name]
    cores = sorted(os.sched_getaffinity(0))
    devices = (f"cpu:{cores[0]}", f"cpu:{cores[-1]}")
    training = {"task": "digits", "epochs": 2, "checkpoint_every": 2}
    return Plan.of("digits-vit", 256, devices=devices, **{**training, **options})


def final_losses(result: Any) -> list[float]:
    return [epoch.evaluation_loss for epoch in result.history.epochs]


@cache
def reference(plan: str) -> list[float]:
    """Return the losses of an uninterrupted run."""
    with tempfile.TemporaryDirectory() as root:
        return final_losses(train(make_plan(plan), root))


def inject(fault: dict[str, Any], hang_s: float) -> dict[str, Any]:
    """Run one fault and return what was observed."""
    root = Path(tempfile.mkdtemp(prefix="stagewright-fault-"))
    mounted = fault["kind"] in ON_SMALL_DISK
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", root], check=True)
    handle, clock = tempfile.mkstemp()
    os.close(handle)
    try:
        in_process = fault["kind"] not in ("launcher killed", "fork server killed")
        hangs = fault["kind"] in HANGS
        told = {**fault, "clock": clock, "mount": str(root), "root": str(root), "hang_s": hang_s if hangs else 300.0}
        code, error = (run_in_process if in_process else run_in_child)(told)
        ended_s = time.time()
        begun_s = float(Path(clock).read_text() or "nan")
        pids = [mark for path in root.glob("*/workers/*/process.json") if (mark := ProcessMark.read(path))]
        until_s = time.monotonic() + ORPHAN_S
        while any(mark.state() not in ("gone", "unknown") for mark in pids) and time.monotonic() < until_s:
            time.sleep(0.05)
        orphans = sum(mark.state() not in ("gone", "unknown") for mark in pids)
        if mounted:
            subprocess.run(["mount", "-o", "remount,rw,size=200m", root], check=True)
        resumed = resume(fault["plan"], root)
        cause = CAUSES[fault["kind"]]
        named = fault["kind"] in WITHOUT_WORKER or f"worker {fault['worker']} " in error
        end_s = ended_s - begun_s
        wanted = -9 if fault["kind"] == "launcher killed" else 1
        checks = {
            "in_time": end_s <= (hang_s + 1 if hangs else END_S),
            "named": cause in error and named,
            "exit_code": code == wanted,
            "no_orphans": orphans == 0,
            "resumed": resumed is None or resumed == reference(fault["plan"]),
        }
        first = error.partition("\n")[0][:160]
        return {
            "end_s": round(end_s, 2),
            **checks,
            "ok": all(checks.values()),
            "could_resume": bool(resumed),
            "error": first,
        }
    finally:
        if mounted:
            subprocess.run(["umount", "-l", root], check=False)
        shutil.rmtree(root, ignore_errors=True)
        Path(clock).unlink()


def run_in_process(told: dict[str, Any]) -> tuple[int, str]:
    os.environ[VARIABLE] = json.dumps({**told, "launcher": os.getpid()})
    try:
        train(make_plan(told["plan"]), told["root"], hang_s=told["hang_s"], job=JOB)
    except StagewrightError as error:
        return error.exit_code, str(error)
    finally:
        del os.environ[VARIABLE]
    return 0, ""


def run_in_child(told: dict[str, Any]) -> tuple[int, str]:
    """Run in a process of its own, whose launcher or fork server can be killed."""
    done = subprocess.run(
        [sys.executable, __file__, "--single", json.dumps(told)], capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stderr


def run_single(told: dict[str, Any]) -> None:
    code, error = run_in_process(told)
    print(error, file=sys.stderr)
    sys.exit(code)


def resume(plan: str, root: Path) -> list[float] | str | None:
    """Return the losses after resuming from the last checkpoint, or the error; None where there is no checkpoint."""
    checkpoints = [path for folder in root.iterdir() if (path := latest(folder / "checkpoints"))]
    if not checkpoints:
        return None
    try:
        result = train(make_plan(plan), root, options=TrainingOptions(checkpoint=str(checkpoints[-1])))
    except RunError as error:
        return str(error)
    return final_losses(result)


def summarize(rows: list[dict[str, Any]]) -> None:
    """Print one line for each kind of fault."""
    print(f"{'fault':20} {'runs':>5} {'as wanted':>10} {'ended after, median and longest':>32} {'resumed':>8}")
    for kind, count in Counter(row["kind"] for row in rows).items():
        same = [row for row in rows if row["kind"] == kind]
        times = sorted(row["end_s"] for row in same)
        middle = f"{times[len(times) // 2]:.1f} s, {times[-1]:.1f} s"
        good, back = sum(row["ok"] for row in same), sum(row["could_resume"] for row in same)
        print(f"{kind:20} {count:5} {good:10} {middle:>32} {back:8}")
    print(f"{sum(row['ok'] for row in rows)} of {len(rows)} runs ended as wanted")


if __name__ == "__main__":
    main()
