"""The training job with one fault in one worker, at one moment; the fault comes from the environment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stagewright.engine.jobs import train, training_loop
from stagewright.engine.state import checkpoint
from stagewright.engine.worker.context import WorkerContext
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan

VARIABLE = "STAGEWRIGHT_BENCHMARK_FAULT"


def run(plan: Plan, context: WorkerContext, folder: RunFolder) -> None:
    """Train, and fail as the environment says."""
    fault = json.loads(os.environ[VARIABLE])
    if context.rank == fault["worker"]:
        _arm(fault["moment"], lambda: _fail(fault, folder))
    train.run_training(plan, context, folder)


def _arm(moment: str, fail: Callable[[], None]) -> None:
    """Call ``fail`` at a moment of the run."""
    if moment == "start":
        fail()
    elif moment == "load":
        _before(train, "load_training_model", fail)
    elif moment == "first step":
        _before(training_loop.Trainer, "step", fail)
    elif moment == "checkpoint":
        _before(checkpoint, "write_safetensors", fail, skip=1)
    elif moment == "evaluation":
        _before(training_loop.TrainingLoop, "evaluate", fail)
    else:
        assert moment == "end"
        _before(training_loop.recorder, "close", fail)


def _before(holder: Any, name: str, fail: Callable[[], None], skip: int = 0) -> None:
    """Call ``fail`` before a function, after it was called ``skip`` times."""
    function, calls = getattr(holder, name), [0]

    def wrapped(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == skip + 1:
            fail()
        return function(*args, **options)

    setattr(holder, name, wrapped)


def _fail(fault: dict[str, Any], folder: RunFolder) -> None:
    Path(fault["clock"]).write_text(repr(time.time()))
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
    elif kind == "read-only folder":
        subprocess.run(["mount", "-o", "remount,ro", fault["mount"]], check=True)
        (folder.path / "probe").write_text("x")
    elif kind == "deleted folder":
        shutil.rmtree(folder.path)
        time.sleep(60)
    elif kind == "fork server killed":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    else:
        assert kind == "launcher killed", kind
        os.kill(int(fault["launcher"]), signal.SIGKILL)
        time.sleep(60)
