"""Forked workers that check one case, and the loop that keeps all cores busy with cases.

    main process (torch imported) ─ fork ─► workers of a case, one core each ─ pipe ─► report or error of each

The first error ends a case, and so does its time limit: the other workers may wait for the one that failed. Workers may
have shares of a GPU instead of cores; the main process must not use CUDA, because they are forked from it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axes.cases import BATCH, Case
from axes.models import make_model
from stagewright.cluster.device import Device, check_devices
from stagewright.engine.parallel.model import capture_for
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.engine.worker.context import backend_of, make_context
from stagewright.errors import UsageError
from stagewright.gpu_sharing.mps import stop_daemon
from stagewright.runs.result import ParityReport
from stagewright.spec.plan import Precision
from stagewright.zoo.model import Batch

Outcome = dict[str, Any]
CASE_S = 90.0
"""Default time limit of a case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How cases are run."""

    device: str = "cpu"
    """Of each worker: "cpu", a core for each, or a share of a GPU, such as "cuda:0/8"."""
    precision: Precision = "float32"
    """Of computations: float32, or autocast to bf16."""
    case_s: float = CASE_S
    """Time limit of a case."""


def check_case(case: Case, rank: int, store: str, device: Device, precision: Precision) -> ParityReport:
    """Compare a case with the single-device baseline, as one of its workers."""
    torch.set_num_threads(1)
    mesh = case.mesh
    if device.kind == "cuda":
        torch.cuda.set_device(device.torch_device())
    dist.init_process_group(backend_of(device), init_method=f"file://{store}", rank=rank, world_size=mesh.num_workers)
    context = make_context(mesh, rank, device)
    plan = dataclasses.replace(case.plan((device.text,) * mesh.num_workers), precision=precision)
    model = make_model(case.model, BATCH).to(context.torch_device, plan.memory_bytes)
    model.module.train(plan.training)
    graph = capture_for(plan, model)
    if case.pipeline:
        middle = graph.calls[(len(graph.calls) - 1) // 2]
        plan = dataclasses.replace(plan, cuts=(middle.name,))
    baseline = baseline_of(plan, model, graph, context) if rank == 0 else None
    runner = StepRunner(plan, model, context, graph)
    return check_parity(runner, Batch(args=model.args, kwargs=model.kwargs), baseline)


def _work(case: Case, rank: int, store: str, core: int, conditions: Conditions, pipe: Connection) -> None:
    """Send the outcome of this worker, and wait to be ended, so that peers see no broken connection."""
    tempfile.tempdir = str(Path(store).parent)  # removed with the case, also where a worker is killed
    try:
        device = Device.parse(f"cpu:{core}" if conditions.device == "cpu" else conditions.device)
        if device.kind == "cpu":
            os.sched_setaffinity(0, {core})
        report = check_case(case, rank, store, device, conditions.precision)
        if device.kind == "cuda":
            torch.cuda.synchronize()  # a client of MPS that ends while it computes may take others with it
        pipe.send({"result": "equal" if report.equal else "different", "report": report})
    except UsageError as error:
        pipe.send({"result": "refused", "reason": str(error).splitlines()[0]})
    except Exception as error:
        traceback.print_exc()
        pipe.send({"result": "failed", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
    time.sleep(conditions.case_s)


class RunningCase:
    """The workers of a case that is being checked."""

    def __init__(self, case: Case, cores: Sequence[int], conditions: Conditions) -> None:
        self.case, self.cores = case, tuple(cores)
        self._case_s = conditions.case_s
        self._start = time.monotonic()
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        context = multiprocessing.get_context("fork")
        self._processes, self._outcomes = [], []
        self.pipes: list[Connection] = []
        for rank, core in enumerate(cores):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(case, rank, store, core, conditions, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self.pipes.append(here)

    def poll(self) -> Outcome | None:
        """Return the outcome once it is known."""
        for pipe in [pipe for pipe in self.pipes if pipe.poll()]:
            try:
                self._outcomes.append(pipe.recv())
            except EOFError:
                self._outcomes.append({"result": "failed", "reason": "a worker ended without a word"})
            self.pipes.remove(pipe)
        bad = next((outcome for outcome in self._outcomes if "report" not in outcome), None)
        if bad is not None:
            return self._finished(bad)
        if not self.pipes:
            reports = [outcome["report"] for outcome in self._outcomes]
            worst = max(reports, key=lambda report: (not report.equal, report.max_error))
            return self._finished(
                {
                    "result": "equal" if worst.equal else "different",
                    "error": worst.max_error,
                    "tolerance": worst.tolerance,
                    "reason": "" if worst.equal else worst.worst,
                }
            )
        if time.monotonic() - self._start > self._case_s:
            return self._finished({"result": "failed", "reason": f"no result after {self._case_s:.0f} s"})
        return None

    def _finished(self, outcome: Outcome) -> Outcome:
        return {**outcome, "seconds": round(time.monotonic() - self._start, 1)}

    def end(self) -> None:
        """End the workers."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def run_cases(
    cases: Sequence[Case], processes: int, deadline: float, conditions: Conditions
) -> Iterator[tuple[Case, Outcome]]:
    """Check cases with at most so many workers at a time, each on its own core while there are enough; largest first.

    Cases that are unfinished at the deadline (of ``time.monotonic``) are dropped. On a GPU, a case that fails may leave
    CUDA MPS in a bad state, so the daemon is started anew once the other running cases have ended.
    """
    usable = sorted(os.sched_getaffinity(0))
    most = max((case.mesh.num_workers for case in cases), default=0)
    free = [usable[index % len(usable)] for index in range(max(processes, most))]
    waiting = sorted(cases, key=lambda case: -case.mesh.num_workers)
    running: list[RunningCase] = []
    is_gpu = conditions.device != "cpu"
    renew = is_gpu
    try:
        while (waiting or running) and time.monotonic() < deadline:
            if renew and not running:
                stop_daemon()
                check_devices((conditions.device,))
                renew = False
            for case in [*waiting] if not renew else ():
                if case.mesh.num_workers <= len(free):
                    waiting.remove(case)
                    cores = [free.pop() for _ in range(case.mesh.num_workers)]
                    running.append(RunningCase(case, cores, conditions))
            wait([pipe for entry in running for pipe in entry.pipes], timeout=1.0)
            for entry in [*running]:
                outcome = entry.poll()
                if outcome is not None:
                    entry.end()
                    running.remove(entry)
                    free.extend(entry.cores)
                    renew |= is_gpu and outcome["result"] == "failed"
                    yield entry.case, outcome
    finally:
        for entry in running:
            entry.end()
        stop_daemon()
