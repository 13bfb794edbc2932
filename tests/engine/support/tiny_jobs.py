"""Jobs for workers that need no model: each does what a test wants to see, or fails in one way.

They run in worker processes, which find this module on their PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stagewright.engine.worker.faults import activity, describe_shapes
from stagewright.engine.worker.recorder import recorder
from stagewright.errors import UsageError


def _note(folder: Any, context: Any, **values: Any) -> None:
    """Leave a file for the test."""
    path = Path(folder.path) / "workers" / str(context.rank) / "seen.json"
    path.write_text(json.dumps({"pid": os.getpid(), **values}))


def _forward(context: Any, step: int) -> None:
    """What an executor does before it computes."""
    shapes = describe_shapes([torch.zeros(4, 3)])
    activity.begin("forward", step=step, stage=context.pipeline, microbatch=2, shapes=shapes)


def _exchange(steps: int, pause_s: float = 0.02) -> None:
    """Steps that need every worker."""
    for step in range(steps):
        activity.begin("all-reduce", step=step)
        dist.all_reduce(torch.ones(4))
        time.sleep(pause_s)


def add_up(plan: Any, context: Any, folder: Any) -> None:
    """The sum of all ranks plus one; with what surrounds the worker."""
    total = torch.tensor([float(context.rank + 1)])
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    sys.stdout.write(f"out {context.rank}\n")
    sys.stderr.write(f"err {context.rank}\n")
    _note(
        folder,
        context,
        total=total.item(),
        cores=sorted(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        omp=os.environ.get("OMP_NUM_THREADS"),
        interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        backend=dist.get_backend(),
        store=os.environ.get("MASTER_ADDR"),
        port=int(os.environ.get("MASTER_PORT", "0")),
        plan=plan.model.name,
    )


def _fail_on(worker: int, context: Any, folder: Any, how: Any) -> None:
    _note(folder, context, port=int(os.environ["MASTER_PORT"]))
    _exchange(3)
    if context.rank == worker:
        _forward(context, step=3)
        how()
    _exchange(100_000)


def raises(plan: Any, context: Any, folder: Any) -> None:
    """Worker 1 raises; its peer loses the connection."""

    def boom() -> None:
        raise ValueError("boom in the middle")

    _fail_on(1, context, folder, boom)


def out_of_memory(plan: Any, context: Any, folder: Any) -> None:
    """Worker 1 wants more than there is: torch's error becomes ours, which says all in its sentence."""
    _fail_on(1, context, folder, lambda: torch.empty(10**14))


def wrong_use(plan: Any, context: Any, folder: Any) -> None:
    """Every worker finds that the input is wrong."""
    raise UsageError("there is no task 'digit'; did you mean 'digits'?")


def killed(plan: Any, context: Any, folder: Any) -> None:
    """Worker 1 is killed."""
    _fail_on(1, context, folder, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped(plan: Any, context: Any, folder: Any) -> None:
    """Worker 1 is stopped; worker 0 waits for it."""
    _fail_on(1, context, folder, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def loops(plan: Any, context: Any, folder: Any) -> None:
    """Worker 1 never comes back, and does not listen to SIGTERM."""

    def spin_for_ever() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass

    _fail_on(1, context, folder, spin_for_ever)


def waits(plan: Any, context: Any, folder: Any) -> None:
    """Both workers wait for a message that no one sends."""
    _note(folder, context)
    activity.begin("receive", step=0, stage=context.pipeline, microbatch=0)
    dist.recv(torch.zeros(1), src=1 - context.rank)


def exits(plan: Any, context: Any, folder: Any) -> None:
    """Worker 1 leaves without a word."""

    def leave() -> None:
        sys.stdout.write("last words\n")
        os._exit(7)

    _fail_on(1, context, folder, leave)


def calls_sys_exit(plan: Any, context: Any, folder: Any) -> None:
    """Worker 1's code ends the interpreter, as a script does that reports success."""
    _fail_on(1, context, folder, lambda: sys.exit(0))


def exits_with_zero(plan: Any, context: Any, folder: Any) -> None:
    """Worker 1 ends at once, with the exit code of success."""
    _fail_on(1, context, folder, lambda: os._exit(0))


def fills_the_disk(plan: Any, context: Any, folder: Any) -> None:
    """Worker 1 writes metrics until the disk of the run folder is full."""

    def fill() -> None:
        with folder.worker(context.rank) as own:
            while True:
                own.append_metrics(step=1, note="x" * 4096)

    _fail_on(1, context, folder, fill)


def _recorded_until(context: Any, folder: Any, how: Any) -> None:
    """Recorded steps; in the fourth, worker 1 fails in its forward pass while worker 0 waits for it."""
    _note(folder, context, port=int(os.environ["MASTER_PORT"]))
    recorder.open(torch.device("cpu"))
    for number in range(100):
        with recorder.step(number):
            recorder.stage, recorder.microbatch = context.pipeline, 2
            _forward(context, step=number)
            start = recorder.now()
            if number == 3 and context.rank == 1:
                how()
            recorder.add("forward", start)
            activity.begin("reduce loss", step=number)
            start = recorder.now()
            dist.all_reduce(torch.ones(1))
            recorder.add("collective", start, note="loss")


def raises_in_a_step(plan: Any, context: Any, folder: Any) -> None:
    """… it raises."""
    _recorded_until(context, folder, lambda: [].pop())


def hangs_in_a_step(plan: Any, context: Any, folder: Any) -> None:
    """… it never comes back."""
    _recorded_until(context, folder, lambda: time.sleep(1000))


def killed_in_a_step(plan: Any, context: Any, folder: Any) -> None:
    """… it is killed."""
    _recorded_until(context, folder, lambda: os.kill(os.getpid(), signal.SIGKILL))


def goes_on(plan: Any, context: Any, folder: Any) -> None:
    """Runs until it is ended, with a child process of its own."""
    child = subprocess.Popen(["sleep", "600"])
    _note(folder, context, child=child.pid, port=int(os.environ["MASTER_PORT"]))
    _exchange(100_000)


def one_raises_alone(plan: Any, context: Any, folder: Any) -> None:
    """Worker 1 raises while the other does not talk to it: only the watch on the store can tell."""
    _note(folder, context)
    activity.begin("barrier")
    dist.barrier()
    if context.rank == 1:
        _forward(context, step=0)
        raise ValueError("boom on the second machine")
    while True:
        activity.begin("forward", step=0, stage=0, microbatch=0)
        time.sleep(0.05)


def link_is_cut(plan: Any, context: Any, folder: Any) -> None:
    """Worker 1 takes its network interface down: from then on nobody is answered, and nothing is refused."""
    _exchange(3)
    if context.rank == 1:
        subprocess.run(["ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "down"], check=True)
    _exchange(100_000)


def deletes_the_folder(plan: Any, context: Any, folder: Any) -> None:
    """Worker 1 deletes the run folder and writes to it, sooner than the launcher looks for it."""
    dist.barrier()
    if context.rank == 1:
        shutil.rmtree(folder.path)
        (Path(folder.path) / "metrics.jsonl").write_text("x")
    _exchange(100_000)
