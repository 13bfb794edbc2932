"""Two machines, played by two network namespaces with a cable between them, under plain ``torchrun``.

    namespace a  198.18.x.1 ══ veth ══ 198.18.x.2  namespace b        (198.18.0.0/15 is set aside for tests)
    torchrun --node-rank 0                torchrun --node-rank 1

The namespaces, the cable and every process are gone afterwards, also when a test fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from stagewright.cluster.device import usable_cores
from stagewright.engine.worker.faults import read_doing
from stagewright.engine.worker.process import ProcessMark
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.spec.plan_file import read_plan, write_plan
from stagewright.trace.read import read_trace

CORES = sorted(usable_cores())


def why_not() -> str:
    """The reason why this machine can't play two."""
    if shutil.which("ip") is None:
        return "two machines are network namespaces, and there is no `ip` here"
    if os.geteuid() != 0:
        return "two machines are network namespaces, which only root can make"
    name = f"sw-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "" if made.returncode == 0 else f"network namespaces can't be made here: {made.stderr.strip()}"


def later() -> list[str]:
    """What makes a process's clock differ from this machine's, as another machine's does; nothing where it can't be."""
    words = ["unshare", "--time", "--fork", "--kill-child", f"--monotonic={LATER_S}"]
    if shutil.which("unshare") is None:
        return []
    return words if subprocess.run([*words, "true"], capture_output=True).returncode == 0 else []


LATER_S = 1000
REASON = why_not()
LATER = [] if REASON else later()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]


@dataclass(frozen=True, slots=True)
class Machine:
    """One of the two."""

    name: str
    interface: str
    address: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=120)


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Two namespaces and the cable between them."""
    number = os.getpid() % 250
    pair = [
        Machine(
            name=f"sw-{side}-{os.getpid()}", interface=f"sw{side}{os.getpid()}"[:15], address=f"198.18.{number}.{at}"
        )
        for at, side in ((1, "a"), (2, "b"))
    ]
    try:
        for one in pair:
            ip("netns", "add", one.name)
        a, b = pair
        ip("link", "add", a.interface, "netns", a.name, "type", "veth", "peer", b.interface, "netns", b.name)
        for one in pair:
            ip("-n", one.name, "address", "add", f"{one.address}/24", "dev", one.interface)
            ip("-n", one.name, "link", "set", "lo", "up")
            ip("-n", one.name, "link", "set", one.interface, "up")
        yield pair
    finally:
        for one in pair:
            inside = subprocess.run(["ip", "netns", "pids", one.name], capture_output=True, text=True)
            for pid in inside.stdout.split():  # none but those that were started below live in there
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", one.name], capture_output=True)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    devices = (f"cpu:{CORES[0]}", f"cpu:{CORES[-1]}")
    write_plan(Plan(model=ModelSpec(name="mlp"), batch=4, mesh=Mesh(data=2), devices=devices), path)
    return path


def torchrun(
    machines: list[Machine],
    plan: Path,
    job: str,
    *words: str,
    limit_s: float = 240,
    folders: Sequence[Path] | None = None,
    second_in: Sequence[str] = (),
) -> list[tuple[int, str]]:
    """Run a job on both machines, each in a folder of its own if they are given; exit code and standard error.

    ``second_in``: a command that the second machine's runs in.
    """
    started = []
    for rank, (one, folder) in enumerate(zip(machines, folders or [plan.parent] * 2, strict=True)):
        command = ["ip", "netns", "exec", one.name, *(second_in if rank else ())]
        command += [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1", "--max-restarts", "0"]
        command += ["--master-addr", machines[0].address, "--master-port", "29517"]
        command += ["-m", "stagewright", "worker", str(plan), "--job", job, *words]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]
            ).rstrip(os.pathsep),
            "GLOO_SOCKET_IFNAME": one.interface,
        }
        started.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    until_s = time.monotonic() + limit_s
    try:
        ended = []
        for process in started:
            _, err = process.communicate(timeout=max(1.0, until_s - time.monotonic()))
            ended.append((process.returncode, err))
        return ended
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()


def test_a_sum_over_two_machines(machines: list[Machine], plan: Path) -> None:
    ended = torchrun(machines, plan, "tiny_jobs:add_up")
    assert [code for code, _ in ended] == [0, 0], ended
    (run,) = (plan.parent / "runs").iterdir()  # worker 0 named it, and both wrote there
    for rank, one in enumerate(machines):
        seen = json.loads((run / "workers" / str(rank) / "seen.json").read_text())
        assert (seen["total"], seen["backend"], seen["interface"]) == (3.0, "gloo", one.interface)
        assert (seen["store"], seen["port"]) == (machines[0].address, 29517)
        assert seen["cores"] == [(CORES[0], CORES[-1])[rank]]
        # Others can see what it did last, and which process it was.
        assert read_doing(run / "workers" / str(rank) / "activity.txt").action == "finish"
        mark = ProcessMark.read(run / "workers" / str(rank) / "process.json")
        assert mark is not None
        assert mark.state() == "gone"
    assert (run / "plan.toml").read_text() == plan.read_text()


def test_two_machines_agree_on_cuts_and_leave_one_result(machines: list[Machine], tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    devices = (f"cpu:{CORES[0]}", f"cpu:{CORES[-1]}")
    model = ModelSpec(name="mlp-mnist")
    write_plan(Plan(model=model, batch=8, mesh=Mesh(pipeline=2), microbatches=2, steps=2, devices=devices), path)
    folders = [tmp_path / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
    ended = torchrun(machines, path, "stagewright.engine.jobs.measure:run_job", folders=folders, second_in=LATER)
    assert [code for code, _ in ended] == [0, 0], ended
    (run,) = (folders[0] / "runs").iterdir()
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["equal"], result["workers"]) == ("done", True, 2)
    assert len(result["peak_memory_bytes"]) == 2  # the other machine's worker sent its part
    assert len(read_plan(run / "plan.toml").cuts) == 1
    # Events of both machines are in worker 0's folder, and on its clock.
    trace = read_trace(RunFolder.open(run))
    assert trace.steps == (0, 1)
    clock = json.loads((run / "workers" / "1" / "clock.json").read_text())
    assert abs(clock["offset_s"] + (LATER_S if LATER else 0)) <= clock["error_s"] < 0.1
    assert trace.workers[1].clock_error_s == clock["error_s"]
    ends = [
        [one for one in worker.events if one.kind == kind]
        for worker, kind in zip(trace.workers, ("send", "receive"), strict=True)
    ]
    for sent, received in zip([one for one in ends[0] if one.peer == 1], ends[1], strict=True):
        assert sent.microbatch == received.microbatch
        assert received.end_s >= sent.start_s - clock["error_s"], "no message arrives before it is sent"


def test_a_failure_on_one_machine_ends_the_other(machines: list[Machine], plan: Path) -> None:
    run = plan.parent / "run"
    ended = torchrun(machines, plan, "tiny_jobs:one_raises_alone", "--run-folder", str(run))
    assert [code for code, _ in ended] == [1, 1]
    assert "stagewright: worker 1 " in ended[1][1]
    assert "ValueError: boom on the second machine" in ended[1][1]
    assert "step 0, stage 0, micro-batch 2, forward, shapes (4, 3) float32" in ended[1][1]
    # Worker 0 did not talk to worker 1: it learned of the failure from the store, and says so.
    assert "worker 1 failed: ValueError: boom on the second machine" in ended[0][1]
    times_s = [json.loads((run / "workers" / str(rank) / "error.json").read_text())["time_ns"] / 1e9 for rank in (0, 1)]
    assert 0 <= times_s[0] - times_s[1] < 60
    assert json.loads((run / "result.json").read_text())["status"] == "failed"


@pytest.mark.long
def test_a_link_that_dies_is_named_on_both_machines(machines: list[Machine], plan: Path) -> None:
    """TCP reports nothing for many minutes; Gloo and the store's client wait."""
    run = plan.parent / "run"
    ended = torchrun(machines, plan, "tiny_jobs:link_is_cut", "--run-folder", str(run), "--hang-s", "20")
    assert [code for code, _ in ended] == [1, 1], ended
    (first,) = [line for line in ended[0][1].splitlines() if line.startswith("stagewright: ")]
    assert re.search(r"worker 0 \(.*worker 1 on .* has not answered for \d+ s: .*the network to it is down", first)
    (second,) = [line for line in ended[1][1].splitlines() if line.startswith("stagewright: ")]
    store = f"the store at {machines[0].address}:29517 has not answered for 20 s"
    assert re.search(rf"worker 1 \(.*{store}: that machine, or the network to it, is down", second)
    result = RunFolder.open(run).result()
    assert result is not None
    assert "worker 1 on" in str(result.error)
