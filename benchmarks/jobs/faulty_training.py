"""The training job with one fault in one worker, at one moment; the fault comes from the environment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sklearn.datasets  # noqa: F401  # imported while workers start, which has a time limit of its own
import torch
import transformers.modeling_utils  # noqa: F401

from injection.variables import CLOCK, VARIABLE
from stagewright.engine.jobs import train, training_loop
from stagewright.engine.parallel import trainer
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.files.atomic import replace_text
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan

JUMP_S = 3600
STALL_S = 4.0

_num_steps = 0


def run(plan: Plan, context: WorkerContext, folder: RunFolder) -> None:
    """Train, and fail as the environment says."""
    fault = json.loads(os.environ[VARIABLE])
    # A stopped worker goes on for a moment while it is ended.
    if fault["hangs"] and (context.rank != fault["worker"] or fault["kind"] == "cut network"):
        threading.Thread(target=_note_progress, args=(Path(f"{fault['clock']}.{context.rank}"),), daemon=True).start()
    if context.rank == fault["worker"]:
        _count_steps()
        _arm(fault["moment"], lambda: _fail(fault, folder))
    train.run_training(plan, context, folder)


def merge_results(plan: Plan, folder: RunFolder) -> Any:
    """Under torchrun, worker 0 writes the result as for the job without a fault."""
    return train.merge_results(plan, folder)


def _note_progress(path: Path) -> None:
    """Write when this worker last began an action: it goes on until it needs the one that hangs."""
    count = -1
    while True:
        if activity.count != count:
            count = activity.count
            replace_text(repr(time.time()), path)  # this worker may be killed meanwhile
        time.sleep(0.02)


def _count_steps() -> None:
    step = training_loop.Trainer.step

    def counted(*args: Any, **options: Any) -> Any:
        global _num_steps
        outcome = step(*args, **options)
        _num_steps += 1
        return outcome

    training_loop.Trainer.step = counted  # type: ignore[method-assign]


def _arm(moment: str, fail: Callable[[], None]) -> None:
    """Call ``fail`` at a moment of the run."""
    if moment == "start":
        fail()
    elif moment == "load":
        _before(train, "load_training_model", fail)
    elif moment == "first step":
        _before(training_loop.Trainer, "step", fail)
    elif moment == "checkpoint":
        _before_publication(2, fail)
    elif moment == "evaluation":
        _before(training_loop.TrainingLoop, "evaluate", fail)
    else:
        assert moment == "end"
        _before(training_loop.recorder, "close", fail)


def _before(holder: Any, name: str, fail: Callable[[], None]) -> None:
    """Call ``fail`` before the first call of a function."""
    function, calls = getattr(holder, name), [0]

    def wrapped(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            fail()
        return function(*args, **options)

    setattr(holder, name, wrapped)


def _before_publication(number: int, fail: Callable[[], None]) -> None:
    """Call ``fail`` in a checkpoint when this worker has written its files, if it has any, and waits for the others."""
    write, calls = trainer.write_checkpoint, [0]

    def wrapped(path: Path, *, barrier: Callable[[], None], **options: Any) -> None:
        calls[0] += 1
        waits = [0]

        def wait() -> None:
            waits[0] += 1
            if (calls[0], waits[0]) == (number, 2):
                fail()
            barrier()

        write(path, barrier=wait, **options)

    trainer.write_checkpoint = wrapped  # type: ignore[assignment]


def _fail(fault: dict[str, Any], folder: RunFolder) -> None:
    """Inject the fault; a slow disk, a clock that jumps and a cut network let this worker go on."""
    Path(fault["clock"]).write_text(json.dumps({"time_s": time.time(), "steps": _num_steps}))
    kind = fault["kind"]
    if kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, kind))
        time.sleep(60)
    elif kind == "exception":
        raise ValueError("an injected fault")
    elif kind == "sys.exit":
        sys.exit(0)
    elif kind == "os._exit":
        os._exit(0)
    elif kind == "out of memory":
        torch.empty(10**14)
    elif kind == "endless loop":
        while True:
            time.sleep(0.1)
    elif kind == "full disk":
        with open(folder.path / "filler", "wb") as file:
            while True:
                file.write(b"x" * 65536)
                file.flush()
    elif kind == "unwritable folder":
        # Not even root may write to immutable folders; a read-only mount is refused while files are open.
        folders = [folder.path, *(path for path in folder.path.rglob("*") if path.is_dir())]
        subprocess.run(["chattr", "+i", *folders], check=True)
        (folder.path / "probe").write_text("x")
    elif kind == "deleted folder":
        shutil.rmtree(folder.path, ignore_errors=True)
        time.sleep(60)
    elif kind in ("fork server killed", "lost agent"):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    elif kind == "cut network":
        subprocess.run(["ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "down"], check=True)
    elif kind == "slow disk":
        thaw = f"sleep {STALL_S}; exec fsfreeze --unfreeze {fault['mount']}"
        subprocess.Popen(["sh", "-c", thaw], start_new_session=True)
        subprocess.run(["fsfreeze", "--freeze", fault["mount"]], check=True)
    elif kind == "clock jump":
        Path(os.environ[CLOCK]).write_text(str(JUMP_S if fault["worker"] else -JUMP_S))
    else:
        assert kind == "launcher killed", kind
        os.kill(int(fault["launcher"]), signal.SIGKILL)
        time.sleep(60)
