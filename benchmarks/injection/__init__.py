"""Inject one fault into a training run of two workers, and check how the run ends and resumes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from injection.variables import CLOCK, VARIABLE
from namespaces import run_workers, two_machines
from stagewright.engine.jobs.train import TrainingOptions, train
from stagewright.engine.state.checkpoint import latest
from stagewright.engine.worker.process import ProcessMark
from stagewright.errors import StagewrightError
from stagewright.spec.plan import Plan
from stagewright.spec.plan_file import write_plan

BENCHMARKS = Path(__file__).resolve().parents[1]
JOB = "jobs.faulty_training:run"
END_S, ORPHAN_S, GOES_ON_S = 10.0, 3.0, 60.0
LONG_HANG_S = 60.0  # of faults that a run must notice without it
CHECKPOINT_EVERY = 2
PLANS: dict[str, dict[str, Any]] = {
    "pipeline": {"mesh": "pipeline=2", "microbatches": 2, "schedule": "gpipe", "cuts": ("vit.layers.1",)},
    "data": {"mesh": "data=2"},
    "FSDP": {"mesh": "data=2", "shard": True},
    "tensor": {"mesh": "tensor=2"},
}
MOMENTS = ("start", "load", "first step", "checkpoint", "evaluation", "end")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a run must end after a kind of fault."""

    cause: str = ""
    """Words that the message must have."""
    names_worker: bool = True
    hangs: bool = False
    goes_on: bool = False
    """The run must go on and succeed."""
    code: int = 1
    where: str = "here"
    """here: in this process; child: in a process of its own; machines: torchrun on two machines."""
    disk: str = ""
    """A file system of its own: tmpfs or ext4."""

    @property
    def needs_root(self) -> bool:
        return bool(self.disk) or self.where == "machines"

    @property
    def order(self) -> int:
        """Kinds that take longer have smaller numbers."""
        return 0 if self.where == "machines" else 1 if self.hangs or self.where == "child" else 2


KINDS: dict[str, Kind] = {
    "SIGKILL": Kind(cause="was killed: SIGKILL"),
    "SIGSEGV": Kind(cause="was killed: SIGSEGV"),
    "SIGSTOP": Kind(cause="its process is stopped", hangs=True),
    "exception": Kind(cause="failed: ValueError: an injected fault"),
    "sys.exit": Kind(cause="ended: its code called sys.exit(0)"),
    "os._exit": Kind(cause="ended: exit code 0 before its job was done"),
    "out of memory": Kind(cause="out of memory"),
    "endless loop": Kind(cause="no worker has made progress", hangs=True),
    "full disk": Kind(cause="No space left on device", disk="tmpfs"),
    "unwritable folder": Kind(cause="Operation not permitted", disk="tmpfs"),
    "deleted folder": Kind(cause="was deleted or moved", names_worker=False),
    "lost agent": Kind(cause="its process ended without a message", where="machines"),
    "cut network": Kind(cause="the network to it", hangs=True, where="machines"),
    "slow disk": Kind(goes_on=True, code=0, disk="ext4"),
    "clock jump": Kind(goes_on=True, code=0, where="child"),
    "launcher killed": Kind(code=-9, names_worker=False, where="child"),
    "fork server killed": Kind(cause="its fork server", names_worker=False, where="child"),
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended."""

    code: int
    error: str = ""
    losses: list[float] = field(default_factory=list)
    end_s: float = field(default_factory=time.time)


def make_plan(name: str) -> Plan:
    cores = sorted(os.sched_getaffinity(0))
    devices = (f"cpu:{cores[0]}", f"cpu:{cores[-1]}")
    training = {"task": "digits", "epochs": 1, "checkpoint_every": CHECKPOINT_EVERY}
    return Plan.of("digits-vit", 256, devices=devices, **{**training, **PLANS[name]})


def reference(plan: str, folder: Path) -> list[float]:
    """Return the losses of an uninterrupted run; the first process that needs them writes them into the folder."""
    path = folder / f"{plan}.json"
    with open(folder / f"{plan}.lock", "w") as lock, tempfile.TemporaryDirectory() as root:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(final_losses(train(make_plan(plan), root))))
        losses: list[float] = json.loads(path.read_text())
        return losses


def final_losses(result: Any) -> list[float]:
    return [epoch.evaluation_loss for epoch in result.history.epochs]


def inject(fault: dict[str, Any], hang_s: float, references: Path) -> dict[str, Any]:
    """Run one fault and return what was observed; ``references``: a folder for the losses of uninterrupted runs."""
    kind = KINDS[fault["kind"]]
    with (
        tempfile.TemporaryDirectory(prefix="stagewright-fault-") as name,
        small_disk(Path(name) / "disk", kind.disk) as root,
    ):
        clock = Path(name) / "clock.json"
        limit_s = hang_s if kind.hangs or kind.goes_on else LONG_HANG_S
        told = {
            **fault,
            "clock": str(clock),
            "mount": str(root),
            "root": str(root),
            "hang_s": limit_s,
            "hangs": kind.hangs,
        }
        ending = {"here": run_here, "child": run_in_child, "machines": run_on_two_machines}[kind.where](told)
        begun = json.loads(clock.read_text()) if clock.exists() else {"time_s": float("nan"), "steps": 0}
        orphans = _count_orphans(root)
        if kind.disk == "tmpfs":
            subprocess.run(["mount", "-o", "remount,size=200m", root], check=True)
            subprocess.run(["chattr", "-R", "-i", root], check=True)
        checkpoint = last_checkpoint(root)
        lost_steps = begun["steps"] - (0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2]))
        # A checkpoint that was being written does not count.
        may_lose = CHECKPOINT_EVERY * (2 if fault["moment"] == "checkpoint" else 1)
        deleted = fault["kind"] == "deleted folder"
        resumed = None if checkpoint is None or kind.goes_on else resume(fault["plan"], root, checkpoint)
        # A hang begins when the other worker needs the one with the fault, too.
        progress_s = [float(path.read_text()) for path in clock.parent.glob("clock.json.*")]
        end_s = ending.end_s - max([begun["time_s"], *progress_s])
        checks = {
            "in_time": end_s <= (hang_s + 1 if kind.hangs else GOES_ON_S if kind.goes_on else END_S),
            "named": kind.cause in ending.error and (not kind.names_worker or _names(fault, kind, ending.error)),
            "exit_code": ending.code == kind.code,
            "no_orphans": orphans == 0,
            "nothing_lost": deleted or lost_steps <= may_lose,
            "same_losses": (ending.losses if kind.goes_on else resumed) in (None, reference(fault["plan"], references)),
        }
        return {
            "end_s": round(end_s, 2),
            **checks,
            "ok": all(checks.values()),
            "steps": begun["steps"],
            "lost_steps": None if deleted else max(0, lost_steps),
            "resumed": resumed is not None,
            "error": _shorten(ending.error, root, first_line=all(checks.values())),
        }


def _shorten(error: str, root: Path, *, first_line: bool) -> str:
    """Return the message without the temporary folder's name."""
    text = error.replace(str(root), "ROOT")
    return text.partition("\n")[0][:200] if first_line else text[-3000:]


def _names(fault: dict[str, Any], kind: Kind, error: str) -> bool:
    if kind.goes_on:
        return True
    if fault["kind"] == "cut network":  # the store is on the first machine: there, worker 1 does not answer
        return "worker 1 " in error and "the store at 198.18." in error
    first_line = error.partition("\n")[0]  # further lines say where the other worker is
    # Both workers write to a disk that is full or read-only: either may be the first to fail.
    return f"worker {fault['worker']} " in first_line or (bool(kind.disk) and "worker " in first_line)


@contextlib.contextmanager
def small_disk(root: Path, kind: str) -> Iterator[Path]:
    """Create a folder, on a small file system of its own where a kind is given."""
    root.mkdir()
    if kind == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", root], check=True, capture_output=True)
    elif kind == "ext4":
        image = root.with_suffix(".ext4")
        with open(image, "wb") as file:
            file.truncate(256 * 2**20)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, root], check=True, capture_output=True)
        shutil.rmtree(root / "lost+found")
    try:
        yield root
    finally:
        if kind == "ext4":
            subprocess.run(["fsfreeze", "--unfreeze", root], check=False, capture_output=True)
        if kind:
            subprocess.run(["umount", "-l", root], check=False, capture_output=True)


def _count_orphans(root: Path) -> int:
    """Return how many workers are left after three seconds."""
    marks = [mark for path in root.glob("*/workers/*/process.json") if (mark := ProcessMark.read(path))]
    until_s = time.monotonic() + ORPHAN_S
    while any(mark.state() not in ("gone", "unknown") for mark in marks) and time.monotonic() < until_s:
        time.sleep(0.05)
    return sum(mark.state() not in ("gone", "unknown") for mark in marks)


def run_here(told: dict[str, Any]) -> Ending:
    os.environ[VARIABLE] = json.dumps({**told, "launcher": os.getpid()})
    try:
        result = train(make_plan(told["plan"]), told["root"], hang_s=told["hang_s"], job=JOB)
    except StagewrightError as error:
        return Ending(code=error.exit_code, error=str(error))
    finally:
        del os.environ[VARIABLE]
    return Ending(code=0, losses=final_losses(result))


def run_in_child(told: dict[str, Any]) -> Ending:
    """Run in a process of its own, whose launcher or fork server can be killed, or whose clock can jump."""
    environment = {**os.environ, "PYTHONPATH": _python_path()}
    if told["kind"] == "clock jump":
        folder = Path(told["clock"]).parent
        library = folder / "clock_jump.so"
        source = BENCHMARKS / "jobs" / "clock_jump.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
        environment |= {"LD_PRELOAD": str(library), CLOCK: str(folder / "jump.txt")}
    command = [sys.executable, BENCHMARKS / "faults.py", "--single", json.dumps(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    losses = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else []
    return Ending(code=done.returncode, error=done.stderr, losses=losses)


def run_on_two_machines(told: dict[str, Any]) -> Ending:
    """Run with torchrun in two network namespaces; the exit code is that of an agent that was not killed."""
    root = Path(told["root"])
    plan, folder = root / "plan.toml", root / "run"
    write_plan(make_plan(told["plan"]), plan)
    environment = {VARIABLE: json.dumps(told), "PYTHONPATH": _python_path()}
    words = ["--job", JOB, "--run-folder", str(folder), "--hang-s", str(told["hang_s"])]
    gone_s: list[float] = []

    def note_end() -> None:
        """Note when both workers are gone; torchrun itself takes another while to end."""
        if not gone_s and Path(told["clock"]).exists():
            marks = [ProcessMark.read(folder / "workers" / rank / "process.json") for rank in "01"]
            if all(mark is not None and mark.state() == "gone" for mark in marks):
                gone_s.append(time.time())

    with two_machines() as machines:
        ends = run_workers(machines, plan, *words, environment=environment, on_poll=note_end)
    result = folder / "result.json"
    error = str(json.loads(result.read_text()).get("error", "")) if result.exists() else ""
    killed = told["worker"] if told["kind"] == "lost agent" else None
    codes = {code for rank, (code, _, _) in enumerate(ends) if rank != killed}
    messages = [line for _, text, _ in ends for line in text.splitlines() if line.startswith("stagewright: ")]
    return Ending(
        code=codes.pop() if len(codes) == 1 else -1,
        error="\n".join([error, *messages]),
        end_s=gone_s[0] if gone_s else max(end_s for _, _, end_s in ends),
    )


def _python_path() -> str:
    return os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])


def last_checkpoint(root: Path) -> Path | None:
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    return next((path for folder in folders if (path := latest(folder / "checkpoints"))), None)


def resume(plan: str, root: Path, checkpoint: Path) -> list[float] | str:
    """Return the losses after resuming from a checkpoint, or the error."""
    try:
        return final_losses(train(make_plan(plan), root, options=TrainingOptions(checkpoint=str(checkpoint))))
    except StagewrightError as error:
        return str(error)
