"""The recipe on a real Slurm cluster: four nodes on this machine, a job that loses one of them, and its second try.

munged, slurmctld, slurmd -N n1 … n4 in a mount namespace whose /etc/hosts knows the nodes' names
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stagewright.engine.state.checkpoint import latest
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.spec.plan_file import write_plan

RECIPE = Path(__file__).parents[2] / "recipes" / "slurm" / "stagewright.sbatch"
NODES = ("n1", "n2", "n3", "n4")
TOOLS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter")
LIMIT_S = 600

_CONFIGURATION = """
ClusterName=stagewright
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=3
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_START = """
mount --bind {folder}/hosts /etc/hosts
munged --force --foreground --key-file={folder}/munge.key --socket={folder}/munge.socket \
    --pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/munge.seed &
until test -S {folder}/munge.socket; do sleep 0.2; done
slurmctld -D &
for node in n1 n2 n3 n4; do slurmd -D -N $node & done
wait
"""


def why_not() -> str:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no Slurm here: {', '.join(missing)} missing (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "a Slurm cluster on one machine needs root"


REASON = why_not()
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(REASON), reason=REASON)]


class Cluster:
    """Runs Slurm's commands where the nodes' names are known."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self._process = folder, process

    def run(self, *words: str | Path, check: bool = True) -> str:
        done = subprocess.run(
            ["nsenter", f"--mount=/proc/{self._process.pid}/ns/mnt", f"--wd={self.folder}", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(self.folder),
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def until(self, done: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < until_s, f"{what} did not happen; {self.run('squeue', check=False)}"
            time.sleep(0.5)

    def state(self, job: str) -> str:
        about = dict(word.partition("=")[::2] for word in self.run("scontrol", "show", "job", job).split())
        return f"{about['JobState']} {about['Restarts']}"


def environment(folder: Path) -> dict[str, str]:
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    source = str(Path(__file__).parents[2] / "src")
    settings = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": binaries, "PYTHONPATH": source}
    return {**os.environ, **settings, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as sockets:
        free = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(1)]
        port = free[0].getsockname()[1]
    first = 15000 + os.getpid() % 5000
    values = {"folder": tmp_path, "host": socket.gethostname(), "port": port, "first": first, "last": first + 3}
    (tmp_path / "slurm.conf").write_text(_CONFIGURATION.format(**values))
    (tmp_path / "munge.key").write_bytes(os.urandom(1024))
    (tmp_path / "munge.key").chmod(0o400)
    (tmp_path / "hosts").write_text(Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(NODES)}\n")
    (tmp_path / "state").mkdir()
    with (tmp_path / "daemons.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--pid",
                "--fork",
                "--mount-proc",
                "--kill-child",
                "bash",
                "-c",
                _START.format(folder=tmp_path),
            ],
            env=environment(tmp_path),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        made = Cluster(tmp_path, process)
        made.until(lambda: "4   idle" in made.run("sinfo", check=False), "a cluster of four idle nodes")
        yield made
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with it, every process of its namespace
        process.wait()


def test_a_job_loses_a_node_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    plan = Plan.of(
        "digits-vit", 64, "data=4", task="digits", epochs=6, checkpoint_every=5, devices=("cpu:0", "cpu:1") * 2
    )
    write_plan(plan, tmp_path / "plan.toml")
    job = cluster.run("sbatch", "--parsable", "--nodes", "4", RECIPE, "plan.toml").strip()
    run = RunFolder(tmp_path / "runs" / f"slurm-{job}")
    cluster.until(lambda: latest(run.path / "checkpoints") is not None, "a checkpoint")
    assert cluster.state(job) == "RUNNING 0"
    cluster.run("scontrol", "update", "nodename=n3", "state=down", "reason=test")
    cluster.until(lambda: cluster.state(job).endswith(" 1"), "the second try")
    saved = latest(run.path / "checkpoints")
    assert saved is not None
    cluster.run("scontrol", "update", "nodename=n3", "state=resume", check=False)  # it may be back already
    cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)
    cluster.until(lambda: cluster.state(job).split()[0] in ("COMPLETED", "FAILED"), "the end of the job")
    log = (tmp_path / f"stagewright-{job}.log").read_text()
    assert cluster.state(job) == "COMPLETED 1", log[-3000:]
    result = run.result()
    assert result is not None
    assert result.status == "done"
    assert result.history is not None
    assert len(result.history.epochs) == 6
    begun = [line["step"] for line in run.metrics(0) if line.get("kind") == "begin"]
    assert begun == [0, int(saved.name.removeprefix("step-"))]
    steps = [line["step"] for line in run.metrics(0) if line.get("kind") == "step"]
    assert set(steps) == set(range(1, steps[-1] + 1))  # nothing is lost but the steps since the checkpoint
    assert json.loads((run.path / "result.json").read_text())["steps"] == steps[-1]
