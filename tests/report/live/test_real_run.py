"""A real run, watched from its first moment until a worker is killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster.device import usable_cores
from stagewright.engine.worker.process import ProcessMark

CORES = sorted(usable_cores())
PROGRAM = Path(sys.executable).with_name("stagewright")
_LIMIT_S = 240
_KINDS = {(rank, kind) for rank in (0, 1) for kind in ("forward", "backward", "wait")}


@dataclass
class Watched:
    """What a viewer was shown."""

    states: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None

    def of(self, status: str) -> list[dict[str, Any]]:
        return [state for state in self.states if state["status"] == status]

    def kinds(self) -> set[tuple[int, str]]:
        """What each worker was seen to do."""
        return {(one["rank"], one["kind"]) for state in self.of("running") for one in state["workers"]}


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The page is there before the run; worker 1 is killed after a few steps."""
    root = tmp_path_factory.mktemp("watched") / "runs"
    found = Watched()
    words = ["--strategy", "pipeline=2", "--cut", "vit.layers.1", "--epochs", "200", "--root", str(root)]
    page = subprocess.Popen(
        [PROGRAM, "watch", root], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ}
    )
    assert page.stdout is not None
    port = int(page.stdout.readline().rstrip("/\n").rpartition(":")[2])
    begun = time.monotonic()
    found.states.append(asked(port))
    run = subprocess.Popen(
        [PROGRAM, "train", "digits-vit", "digits", "--devices", f"cpu:{CORES[0]};cpu:{CORES[-1]}", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        killed = False
        while time.monotonic() - begun < _LIMIT_S:
            state = asked(port)
            if state != found.states[-1]:
                found.states.append(state)
            if state["status"] == "running" and state["step"] >= 20 and not killed and found.kinds() >= _KINDS:
                (folder,) = root.iterdir()
                mark = ProcessMark.read(folder / "workers" / "1" / "process.json")
                assert mark is not None
                os.kill(mark.pid, signal.SIGKILL)
                killed = True
            if state["status"] == "failed" and run.poll() is not None:
                break
            time.sleep(0.02)
        found.exit_code = run.wait(120)
        while "SIGKILL" not in str(state["error"]) and time.monotonic() - begun < _LIMIT_S:  # until the result is read
            time.sleep(0.1)
            state = asked(port)
        found.states.append(state)
        yield found
    finally:
        page.send_signal(signal.SIGINT)
        assert page.wait(60) == 0
        page.stdout.close()
        if run.poll() is None:
            run.kill()
            run.wait()


def asked(port: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/state")
    state: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return state


@pytest.mark.slow
def test_it_waits_starts_runs_and_breaks(watched: Watched) -> None:
    order = list(dict.fromkeys(state["status"] for state in watched.states))
    assert order == ["waiting", "starting", "running", "failed"]
    starting = {one["action"] for state in watched.of("starting") for one in state["workers"]}
    assert {"capture", "build stages"} & starting


@pytest.mark.slow
def test_what_the_workers_do_is_seen(watched: Watched) -> None:
    assert watched.kinds() >= _KINDS
    doing = [one for state in watched.of("running") for one in state["workers"] if one["kind"] == "forward"]
    assert {one["stage"] for one in doing} == {0, 1}
    assert {one["microbatch"] for one in doing} <= {0, 1, 2, 3}


@pytest.mark.slow
def test_the_numbers_are_those_of_the_run(watched: Watched) -> None:
    last = watched.of("running")[-1]
    assert (last["total"], last["mesh"], last["schedule"], last["task"]) == (4600, "pipeline=2", "1f1b", "digits")
    steps = [state["step"] for state in watched.of("running")]
    assert steps == sorted(steps)
    assert last["samples_per_s"] > 10
    assert 0 < last["bubble"] < 1
    assert last["memory_bytes"] > 50 * 2**20
    assert last["remaining_s"] > 0
    assert last["loss"] < 5
    assert [point[0] for point in last["curve"]][:3] == [1, 2, 3]


@pytest.mark.slow
def test_the_worker_that_was_killed_is_blamed(watched: Watched) -> None:
    last = watched.states[-1]
    assert watched.exit_code == 1
    assert last["status"] == "failed"
    assert last["error"]["worker"] == 1
    assert "was killed: SIGKILL" in last["error"]["text"]
    assert last["workers"][1]["condition"] == "broken"
