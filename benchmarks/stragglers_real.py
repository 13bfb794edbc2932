"""Name the slow rank, link, data loader or garbage collector of real jobs, and count right and false verdicts.

    python benchmarks/stragglers_real.py --trials 200 --output FILE      200 faults and 200 clean windows; needs root

Every rank is a process with its own network namespace, on Gloo: DDP with 2 and 4 ranks, and 1F1B pipelines of
torch.distributed.pipelining with 1 and 2 replicas (`jobs/straggling_job.py`). Each trial records a window of steps with
`sw.attach()`, and asks what `stagewright explain RUN` asks. Faults are real, on a rank or link drawn by seed:

    worker               1.5 to 3 times more matrix products in each layer, or SIGSTOP for 55 to 75 % of the time
    link                 HTB limits the bandwidth between the two ranks of one pipeline; its peer is the other pipeline.
                         A message takes 0.3 to 0.6 of a clean step
    data loader          waits for its storage (a sleep in the collate function) for 0.5 to 1 clean step
    garbage collector    gc.collect() over a heap of 0.5 to 1.2 million objects in 4 of 10 steps

What a clean step takes is measured on each mesh before the first trial. Offloads of the network are off: a packet of
64 KiB would pass the limit of a link at once. Automatic garbage collection is off too, as in large training scripts.

The processes of all jobs stay alive between trials, and wait for their next window. On machines with fewer cores than
ranks, the ranks of clean windows disturb each other too: that is what false alarms come from. A worker that is stopped
counts as named with "worker" or "pauses".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from record import write_record
from stagewright.fabric.lab.kernel import disable_offloads, in_namespace, run_tool
from stagewright.fabric.lab.namespaces import Lab, open_lab
from stagewright.fabric.lab.network import LabNetwork
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh
from stagewright.trace.read import read_trace
from stagewright.trace.stragglers.blame import find_culprit
from stagewright.trace.stragglers.from_trace import job_of_trace

CAUSES = ("worker", "link", "data loader", "garbage collector")
MESHES = ("data=2", "data=4", "pipeline=2", "data=2,pipeline=2")
WITH_PEER_LINK = ("data=2,pipeline=2",)
CLEAN_SEED = 10_000
WARM_STEPS, NUM_STEPS, WINDOW = 2, 15, 3
NEAR = 5  # clean windows that a faulty one is compared with
CALIBRATIONS = 3  # clean windows of each mesh before the first trial
LOADING_SHARE = (0.5, 1.0)  # of a clean step: what a slow data loader waits for its storage
MESSAGE_SHARE = (0.3, 0.6)  # of a clean step: what a message takes on a slow link
MESSAGE_BITS = 8 * 4 * 32 * 384  # of a micro-batch of the job
JOB = Path(__file__).parent / "jobs" / "straggling_job.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong in a window of steps."""

    cause: str
    ranks: tuple[int, ...]
    size: float
    """Extra matrix products per layer, bits/s, seconds per batch, or objects of the heap."""
    is_stopped: bool = False
    """Whether a slow worker is stopped again and again, ``size`` being the share of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A window with its fault, if any, and the verdict."""

    seed: int
    mesh: str
    fault: Fault | None
    found: dict[str, Any] | None
    """The culprit as `explain --json` prints it."""
    step_s: float
    """Mean of the recorded steps."""
    recorded_s: float
    """Time that the window took."""
    analysis_s: float

    @property
    def right(self) -> bool:
        if self.fault is None or self.found is None:
            return self.fault is None and self.found is None
        causes = {self.fault.cause} | ({"pauses"} if self.fault.is_stopped else set())
        return self.found["cause"] in causes and set(self.found["ranks"]) == set(self.fault.ranks)


def draw_mesh(seed: int) -> str:
    """Draw the mesh of a seed."""
    return _draw(seed)[0]


def draw_fault(seed: int, step_s: float) -> Fault | None:
    """Draw the fault of a seed, for a mesh whose clean step takes this long."""
    _, fault = _draw(seed)
    if fault is None:
        return None
    if fault.cause == "link":
        return replace(fault, size=MESSAGE_BITS / (fault.size * step_s))
    return replace(fault, size=fault.size * step_s) if fault.cause == "data loader" else fault


def _draw(seed: int) -> tuple[str, Fault | None]:
    """Draw the mesh and the fault of a seed, whose size is relative to the step for links and data loaders."""
    chance = random.Random(seed)
    cause = CAUSES[seed % len(CAUSES)] if seed < CLEAN_SEED else None
    mesh = chance.choice(WITH_PEER_LINK if cause == "link" else MESHES)
    if cause is None:
        return mesh, None
    parsed = Mesh.parse(mesh)
    rank = chance.randrange(parsed.num_workers)
    if cause == "link":
        first = rank - rank % 2
        return mesh, Fault(cause=cause, ranks=(first, first + 1), size=chance.uniform(*MESSAGE_SHARE))
    if cause == "worker" and chance.random() < 0.5:
        return mesh, Fault(cause=cause, ranks=(rank,), size=chance.uniform(0.55, 0.75), is_stopped=True)
    sizes = {"worker": (1.5, 3.0), "data loader": LOADING_SHARE, "garbage collector": (5e5, 1.2e6)}
    return mesh, Fault(cause=cause, ranks=(rank,), size=chance.uniform(*sizes[cause]))


class Job:
    """The processes of a job, one in each host of a lab."""

    def __init__(self, mesh: str, lab: Lab, port: int, folder: Path) -> None:
        self.mesh, self.lab, self.folder = mesh, lab, folder
        count = Mesh.parse(mesh).num_workers
        common = {"WORLD_SIZE": str(count), "MASTER_ADDR": lab.network.address(0), "MASTER_PORT": str(port)}
        environment = {**os.environ, **common, "GLOO_SOCKET_IFNAME": "eth0", "KINETO_LOG_LEVEL": "99"}
        self.processes = []
        for rank in range(count):
            command = ["ip", "netns", "exec", lab.namespace(rank), sys.executable, str(JOB), mesh]
            errors = open(folder / f"{mesh}-{rank}.txt", "w")  # noqa: SIM115  # of a process that outlives this block
            self.processes.append(
                subprocess.Popen(
                    command,
                    env={**environment, "RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            )
            errors.close()
        self.pids = [answer["ready"] for answer in self._answers()]

    def _answers(self) -> list[dict[str, Any]]:
        """Return the next line of each rank."""
        answers = []
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                errors = (self.folder / f"{self.mesh}-{rank}.txt").read_text()[-2000:]
                raise RuntimeError(f"rank {rank} of {self.mesh} ended: {errors}")
            answers.append(json.loads(line))
        return answers

    def record(self, seed: int, fault: Fault | None) -> tuple[Path, float]:
        """Record a window of steps; return its run folder and the time that it took."""
        asked = None if fault is None or fault.is_stopped or fault.cause == "link" else asdict(fault)
        last = WARM_STEPS + NUM_STEPS
        window = {
            "seed": seed,
            "name": "job",
            "root": str(self.folder / f"{seed}"),
            "steps": last + 1,
            "profile_steps": list(range(WARM_STEPS + 1, last, WINDOW)),
            "fault": asked,
        }
        with self._slow(fault):
            for process in self.processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps(window) + "\n")
                process.stdin.flush()
            answers = self._answers()
        return Path(answers[0]["path"]), max(answer["seconds"] for answer in answers)

    @contextlib.contextmanager
    def _slow(self, fault: Fault | None) -> Iterator[None]:
        """Limit a link, or stop a process again and again, if that is the fault."""
        if fault is not None and fault.cause == "link":
            _limit(self.lab, fault.ranks, fault.size)
            yield
            for rank in fault.ranks:
                run_tool(["tc", "-n", self.lab.namespace(rank), "qdisc", "del", "dev", "eth0", "root"])
        elif fault is not None and fault.is_stopped:
            end = threading.Event()
            thread = threading.Thread(target=_stop_repeatedly, args=(self.pids[fault.ranks[0]], fault.size, end))
            thread.start()
            try:
                yield
            finally:
                end.set()
                thread.join()
        else:
            yield

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _limit(lab: Lab, ranks: Sequence[int], bits_per_s: float) -> None:
    """Limit what two hosts send to each other; the rest of their traffic is not."""
    for rank, peer in (tuple(ranks), tuple(reversed(ranks))):
        address = lab.network.address(peer)
        lines = [
            "qdisc add dev eth0 root handle 1: htb default 10",
            "class add dev eth0 parent 1: classid 1:10 htb rate 100gbit quantum 60000",
            f"class add dev eth0 parent 1: classid 1:20 htb rate {bits_per_s:.0f}bit burst 10k quantum 60000",
            f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {address}/32 flowid 1:20",
        ]
        run_tool(["tc", "-n", lab.namespace(rank), "-batch", "-"], "\n".join(lines) + "\n")


def _stop_repeatedly(pid: int, share: float, end: threading.Event) -> None:
    period_s = 0.004
    while not end.is_set():
        os.kill(pid, signal.SIGSTOP)
        time.sleep(share * period_s)
        os.kill(pid, signal.SIGCONT)
        time.sleep((1 - share) * period_s)


def run_trial(job: Job, seed: int, fault: Fault | None) -> Trial:
    """Record a window, and ask who is slow, as `explain` does."""
    path, recorded_s = job.record(seed, fault)
    begin = time.perf_counter()
    trace = read_trace(RunFolder.open(path))
    culprit = find_culprit(job_of_trace(trace))
    seconds = time.perf_counter() - begin
    return Trial(
        seed=seed,
        mesh=job.mesh,
        fault=fault,
        found=None if culprit is None else culprit.to_dict(),
        step_s=statistics.mean(end - start for start, end in trace.spans.values()),
        recorded_s=recorded_s,
        analysis_s=seconds,
    )


def run_trials(seeds: Sequence[int], meshes: Sequence[str], folder: Path) -> Iterator[Trial]:
    """Run faulty and clean trials in turns; a job of each mesh waits for its next window."""
    drawn = {seed: draw_mesh(seed) for seed in sorted(seeds, key=lambda seed: (seed % CLEAN_SEED, seed))}
    with open_lab(LabNetwork.parse(hosts=4, mtu=9000)) as lab, contextlib.ExitStack() as stack:
        for host in range(4):  # a slow link limits packets of its MTU: 64 KiB at once would pass before the limit acts
            in_namespace(lab.namespace(host), lambda: disable_offloads("eth0"))
        jobs: dict[str, Job] = {}
        usual_s: dict[str, float] = {}
        for number, mesh in enumerate(mesh for mesh in meshes if mesh in drawn.values()):
            jobs[mesh] = Job(mesh, lab, 29540 + number, folder)
            stack.callback(jobs[mesh].close)
        for mesh, job in jobs.items():
            windows = [run_trial(job, -1 - number, None) for number in range(CALIBRATIONS)]
            usual_s[mesh] = _median([window.step_s for window in windows])
            print(f"{mesh}: a clean step takes {1e3 * usual_s[mesh]:.1f} ms", flush=True)
        for seed, mesh in drawn.items():
            if mesh in jobs:
                yield run_trial(jobs[mesh], seed, draw_fault(seed, usual_s[mesh]))


def summarize(trials: Sequence[Trial]) -> dict[str, Any]:
    """Count right and false verdicts by cause and mesh."""
    faulty, clean = [t for t in trials if t.fault is not None], [t for t in trials if t.fault is None]
    usual_s = {mesh: _median([t.step_s for t in clean if t.mesh == mesh]) for mesh in MESHES}
    rows = []
    for cause in CAUSES:
        own = [trial for trial in faulty if trial.fault is not None and trial.fault.cause == cause]
        costs = [1 - near_s / trial.step_s for trial in own if (near_s := _near_s(trial, clean))]
        named = sum(trial.right for trial in own)
        cost = {"min_cost": min(costs, default=0.0), "median_cost": _median(costs)}
        rows.append({"cause": cause, "trials": len(own), "named": named, **cost})
    return {
        "causes": rows,
        "faulty": len(faulty),
        "named": sum(trial.right for trial in faulty),
        "clean": len(clean),
        "false_alarms": sum(not trial.right for trial in clean),
        "step_s": usual_s,
        "steps": NUM_STEPS,
        "loading_share": LOADING_SHARE,
        "message_share": MESSAGE_SHARE,
        "longest_window_s": max((trial.recorded_s for trial in trials), default=0.0),
        "slowest_analysis_s": max((trial.analysis_s for trial in trials), default=0.0),
        "wrong": [asdict(trial) for trial in trials if not trial.right],
    }


def _near_s(trial: Trial, clean: Sequence[Trial]) -> float:
    """Return the median step of the clean windows of a mesh that were recorded nearest to a trial."""
    own = [other for other in clean if other.mesh == trial.mesh]
    return _median([t.step_s for t in sorted(own, key=lambda t: abs(t.seed % CLEAN_SEED - trial.seed))[:NEAR]])


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _show(trial: Trial) -> None:
    fault, found = trial.fault, trial.found
    asked = "none" if fault is None else f"{fault.cause} {fault.ranks} {fault.size:.3g}{' stop' * fault.is_stopped}"
    answer = "none" if found is None else f"{found['cause']} {tuple(found['ranks'])} {found['share']:.1%}"
    print(
        f"{'ok   ' if trial.right else 'WRONG'} seed {trial.seed}, {trial.mesh}: {asked}: {answer}; step "
        f"{1e3 * trial.step_s:.1f} ms, window {trial.recorded_s:.1f} s, analysis {trial.analysis_s:.2f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="faults, and as many clean windows")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"run only these; {CLEAN_SEED} and above have no fault")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=MESHES, help="run only the trials of these")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no trial after this time")
    parser.add_argument("--keep", type=Path, help="folder for the run folders, which are else removed")
    parser.add_argument("--output", type=Path, help="where to write the record")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.trials)
    seeds = options.seeds or [*numbers, *(CLEAN_SEED + number for number in numbers)]
    trials: list[Trial] = []
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for trial in run_trials(seeds, options.meshes, folder):
            trials.append(trial)
            _show(trial)
            if options.output is not None:
                write_record(options.output, summarize(trials))
            if time.monotonic() - begin_s > options.limit_s:
                break
    summary = summarize(trials)
    for row in summary["causes"]:
        print(f"{row['cause']}: {row['named']} of {row['trials']} named with rank and cause")
    print(
        f"all: {summary['named']} of {summary['faulty']} named; {summary['false_alarms']} false alarms in "
        f"{summary['clean']} clean windows; the slowest analysis took {summary['slowest_analysis_s']:.2f} s"
    )


if __name__ == "__main__":
    main()
