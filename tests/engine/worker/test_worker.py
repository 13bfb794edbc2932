"""A worker finds its place, its device and its plan; torch comes after pinning."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.cluster.device import usable_cores
from stagewright.engine.worker.placement import RankPlacement, choose_device
from stagewright.errors import UsageError
from stagewright.machine import host_memory
from stagewright.spec.host_memory_check import check_host_memory
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.spec.plan_file import write_plan

CORES = sorted(usable_cores())
AGENT = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "198.18.0.1",
    "MASTER_PORT": "29500",
}


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in AGENT}
    kept["PYTHONPATH"] = str(Path(__file__).parents[1] / "support")
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, env={**kept, **environment}
    )


def one_worker(folder: Path) -> Path:
    path = folder / "plan.toml"
    write_plan(Plan(model=ModelSpec(name="mlp"), batch=4, devices=(f"cpu:{CORES[-1]}",)), path)
    return path


def test_place_of_a_lone_process() -> None:
    assert RankPlacement.from_environment({}) == RankPlacement(
        rank=0, local_rank=0, num_workers=1, num_machines=1, store=None, launcher=None
    )


def test_place_under_an_agent() -> None:
    place = RankPlacement.from_environment({**AGENT, "STAGEWRIGHT_LAUNCHER": "42"})
    assert place == RankPlacement(
        rank=3, local_rank=1, num_workers=4, num_machines=2, store=("198.18.0.1", 29500), launcher=42
    )
    with pytest.raises(
        UsageError, match="RANK is set, but a variable that belongs to it is missing or wrong \\('LOCAL_RANK'\\)"
    ):
        RankPlacement.from_environment({"RANK": "0"})


def test_device_is_the_plans_or_the_core_of_the_local_rank() -> None:
    model = ModelSpec(name="mlp")
    named = Plan(model=model, batch=4, mesh=Mesh(data=2), devices=("cpu", f"cpu:{CORES[-1]}"))
    assert choose_device(named, RankPlacement(rank=1, num_workers=2)).cores == (CORES[-1],)
    if list(Path("/dev").glob("nvidia[0-9]*")):
        return
    free = Plan(model=model, batch=4, mesh=Mesh(data=2))
    assert choose_device(free, RankPlacement(rank=7, local_rank=0)).cores == (CORES[0],)
    with pytest.raises(UsageError, match=f"this machine has {len(CORES)} cores and no GPU"):
        choose_device(free, RankPlacement(rank=1, local_rank=len(CORES)))


def test_a_model_that_workers_of_one_machine_cant_build_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(name: str) -> None:
        check_host_memory(ModelSpec(name=name), 2)

    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1_000_000)
    with pytest.raises(UsageError, match=r"each of 2 workers here builds digits-vit .*needed, 977 KiB available"):
        check("digits-vit")
    check("my_models:large")  # not known before it is built
    check("digits-vitt")  # told by whoever loads it
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2_000_000)
    check("digits-vit")
    # What other workers take while the size is found out is part of what is needed.
    left = [2_000_000]

    def built_bytes(name: str, **options: int | None) -> int:
        left.append(1_500_000)
        return 900_000

    monkeypatch.setattr("stagewright.zoo.size.built_bytes", built_bytes)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: left[-1])
    check("digits-vit")
    assert len(left) == 2


def test_torch_is_not_there_when_the_device_is_pinned(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from stagewright.engine.worker import worker\n"
        "def pin(device):\n"
        "    print(device, 'torch' in sys.modules, 'typer' in sys.modules, flush=True)\n"
        "    os._exit(0)\n"
        "worker.pin_process = pin\n"
        f"sys.argv = ['stagewright', 'worker', {str(one_worker(tmp_path))!r}]\n"
        "from stagewright.__main__ import main\n"
        "main()\n"
    )
    done = run("-c", code)
    assert (done.returncode, done.stdout) == (0, f"cpu:{CORES[-1]} False False\n"), done.stderr


def test_a_plan_for_one_worker_runs_alone(tmp_path: Path) -> None:
    plan, folder = one_worker(tmp_path), tmp_path / "run"
    done = run("-m", "stagewright", "worker", str(plan), "--run-folder", str(folder), "--job", "tiny_jobs:add_up")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out 0\n", "err 0\n")
    seen = json.loads((folder / "workers" / "0" / "seen.json").read_text())
    assert (seen["total"], seen["cores"], seen["threads"]) == (1.0, [CORES[-1]], 1)
    assert (folder / "plan.toml").read_text() == plan.read_text()


def test_wrong_input_is_one_sentence(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    write_plan(Plan(model=ModelSpec(name="mlp-mnist"), batch=4, mesh=Mesh(data=2)), plan)
    done = run("-m", "stagewright", "worker", str(plan))
    assert done.returncode == 2
    assert done.stderr.startswith("stagewright: ")
    assert f"{plan} needs 2 workers (data=2), but 1 were started" in done.stderr
    assert f"torchrun --nproc-per-node 2 -m stagewright worker {plan}" in done.stderr
    assert "Traceback" not in done.stderr
    lone = one_worker(tmp_path)
    for job, words in (("nowhere:job", "No module named 'nowhere'"), ("tiny_jobs", "write package.module:function")):
        done = run("-m", "stagewright", "worker", str(lone), "--run-folder", str(tmp_path / "run"), "--job", job)
        assert done.returncode == 2
        assert words in done.stderr


SIGTERM = """
import multiprocessing, os, signal, sys, time
from stagewright.engine.worker.process import call_before_sigterm

def save_events():
    with open(sys.argv[1], "w") as file:
        file.write("saved")

call_before_sigterm(save_events)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
child.terminate()
child.join(30)
print(child.exitcode, os.path.exists(sys.argv[1]), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_sigterm_ends_a_worker_after_its_events_are_saved(tmp_path: Path) -> None:
    """By the signal itself, which the launcher looks for; a child's SIGTERM is the child's."""
    done = run("-W", "ignore", "-c", SIGTERM, str(tmp_path / "saved"))
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "-15 False\n"), done.stderr
    assert (tmp_path / "saved").read_text() == "saved"
