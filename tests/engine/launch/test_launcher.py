"""Workers are started pinned, talk over the loopback alone, and write where they should."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.multiprocessing.spawn import ProcessContext

from stagewright.cluster.device import usable_cores
from stagewright.engine.launch.launcher import launch
from stagewright.engine.launch.supervisor import Loopback, Supervisor
from stagewright.errors import RunError
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan

CORES = sorted(usable_cores())
DEVICES = (f"cpu:{CORES[0]}", f"cpu:{CORES[-1]}")


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))


@pytest.fixture
def plan() -> Plan:
    return Plan(model=ModelSpec(name="mlp"), batch=4, mesh=Mesh(data=2), devices=DEVICES)


def seen(folder: Path, worker: int) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "workers" / str(worker) / "seen.json").read_text())
    return data


def test_workers_add_up_pinned_and_on_the_loopback(
    plan: Plan, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    polls: list[float] = []
    launch(plan, RunFolder(tmp_path), job="tiny_jobs:add_up", timeout_s=200, on_poll=lambda: polls.append(1))
    for worker, core in enumerate((CORES[0], CORES[-1])):
        notes = seen(tmp_path, worker)
        assert notes["total"] == 3.0
        assert (notes["cores"], notes["threads"], notes["omp"]) == ([core], 1, "1")
        assert (notes["interface"], notes["backend"], notes["store"]) == ("lo", "gloo", "127.0.0.1")
        log = (tmp_path / "workers" / str(worker) / "log.txt").read_text()
        assert sorted(log.splitlines()) == [f"err {worker}", f"out {worker}"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", 0))  # from the same address, a free port may be connected to itself
            assert probe.connect_ex(("127.0.0.1", notes["port"])) != 0
    assert capfd.readouterr() == ("", "")
    assert polls
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert not (tmp_path / "fault.json").exists()


def test_the_time_limit_ends_a_run(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the run was ended: it took longer than its time limit of 0\.5 s"):
        launch(plan, RunFolder(tmp_path), job="tiny_jobs:goes_on", timeout_s=0.5)


def test_what_the_watcher_of_a_run_raises_ends_it(plan: Plan, tmp_path: Path) -> None:
    def poll() -> None:
        raise KeyError("shown badly")

    with pytest.raises(KeyError, match="shown badly"):
        launch(plan, RunFolder(tmp_path), job="tiny_jobs:goes_on", timeout_s=200, on_poll=poll)


def test_a_worker_that_is_killed_while_it_reports_to_torch(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch then reads an empty file; the fault is still that of the worker which failed first."""
    monitor = LocalElasticAgent._monitor_workers

    def read_nothing(agent: Any, group: Any) -> Any:
        if agent._failed():
            raise EOFError("Ran out of input")
        return monitor(agent, group)

    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", read_nothing)
    with pytest.raises(RunError, match=r"worker 1 .* failed: ValueError: boom in the middle"):
        launch(plan, RunFolder(tmp_path), job="tiny_jobs:raises", timeout_s=200)


def test_an_earlier_failure_in_the_same_folder_is_forgotten(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "workers" / "0"
    folder.mkdir(parents=True)
    (folder / "error.json").write_text("{}")
    launch(plan, RunFolder(tmp_path), job="tiny_jobs:add_up", timeout_s=200)
    assert not (folder / "error.json").exists()


def test_the_store_listens_on_the_loopback_alone_and_closes() -> None:
    rendezvous = Loopback()
    info = rendezvous.next_rendezvous()
    port = info.bootstrap_store_info.master_port
    info.store.set("key", "value")
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {row[1] for row in rows if row[3] == "0A"}
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening
    del info
    rendezvous.shutdown()
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_the_agent_still_has_what_is_overridden() -> None:
    # `supervisor.py` depends on these; where torch moves them, this says so.
    source = inspect.getsource(LocalElasticAgent)
    assert "self._pcontext" in source
    assert list(inspect.signature(LocalElasticAgent._monitor_workers).parameters) == ["self", "worker_group"]
    assert callable(LocalElasticAgent._shutdown)
    assert "start_method=self._start_method" in source
    source = inspect.getsource(MultiprocessContext)
    assert "self._pc = mp.start_processes" in source
    assert "self.processes = processes" in inspect.getsource(ProcessContext)


def test_a_script_without_a_guard_starts_no_copy_of_itself(plan: Plan, tmp_path: Path) -> None:
    """multiprocessing would run the script again in each worker, which would start workers, and so on."""
    RunFolder.create(tmp_path / "runs", plan, environment={})
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from stagewright.engine.launch.launcher import launch\n"
        "from stagewright.runs.run_folder import RunFolder\n"
        'with open("runs.txt", "a") as file:\n'
        '    file.write("once\\n")\n'
        '(folder,) = (RunFolder(one) for one in Path("runs").iterdir())\n'
        'launch(folder.plan(), folder, job="tiny_jobs:add_up")\n'
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, check=True, timeout=200)
    assert (tmp_path / "runs.txt").read_text() == "once\n"
    (folder,) = (tmp_path / "runs").iterdir()
    assert seen(folder, 0)["total"] == 3.0


def test_a_failure_after_we_had_looked_is_told_too(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's agent looks right after us: what it finds must not be lost, nor the workers that it ends be blamed."""
    seen: list[bool] = []
    found, theirs = Supervisor._failed, LocalElasticAgent._monitor_workers

    def their_look(agent: Supervisor, worker_group: Any) -> Any:
        result = theirs(agent, worker_group)
        seen.append(result.is_failed())
        return result

    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", their_look)
    monkeypatch.setattr(Supervisor, "_failed", lambda agent: found(agent) if any(seen) else [])
    with pytest.raises(RunError, match=r"worker 1 .*boom in the middle"):
        launch(plan, RunFolder(tmp_path), job="tiny_jobs:raises", timeout_s=200)
    assert capfd.readouterr() == ("", "")
