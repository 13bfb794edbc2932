"""``stagewright watch``: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from stagewright.cli.results.watch import _until_interrupted, watch
from stagewright.errors import StagewrightError
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(watch)
PROGRAM = Path(sys.executable).with_name("stagewright")


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def finished(tmp_path: Path) -> RunFolder:
    plan = Plan(model=ModelSpec(name="digits-vit"), batch=8, mesh=Mesh(pipeline=2), microbatches=2, steps=3)
    folder = RunFolder.create(tmp_path / "runs", plan, environment={})
    for rank in (0, 1):
        with folder.worker(rank) as worker:
            for number in range(3):
                worker.append_metrics(step=number, seconds=0.1, loss=1.0 - 0.1 * number, waited_s=0.02)
    folder.finish("done", {"loss": 0.8})
    return folder


def test_json_is_the_state_now(finished: RunFolder) -> None:
    result = run(finished.path, "--json")
    assert result.exit_code == 0, result.exception
    shown = json.loads(result.stdout)
    assert (shown["status"], shown["step"], shown["total"], shown["bubble"]) == ("done", 3, 3, 0.2)


def test_a_folder_of_runs_is_its_newest_and_an_empty_one_waits(finished: RunFolder, tmp_path: Path) -> None:
    assert json.loads(run(finished.path.parent, "--json").stdout)["name"] == finished.name
    assert json.loads(run(tmp_path / "later", "--json").stdout)["status"] == "waiting"


def test_the_terminal_ends_with_the_run(finished: RunFolder) -> None:
    result = run(finished.path, "--terminal")
    assert result.exit_code == 0, result.exception
    assert "finished" in result.stdout
    assert "step 3 of 3" in result.stdout
    assert result.stdout.endswith("\n")


def test_the_terminal_replays(finished: RunFolder) -> None:
    result = run(finished.path, "--terminal", "--speed", "1")
    assert result.exit_code == 0, result.exception
    assert "step 3 of 3" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--address", "0.0.0.0"], "0.0.0.0 can be reached from other machines"),
        (["--token", "a-secret-of-some-length"], "can be read by every user of this machine (ps); write --token auto"),
        (["--address", "0.0.0.0", "--token-file", "token"], "can't read the token from token: No such file"),
        (["--speed", "0"], "--speed 0 is not between"),
        (["--speed", "nan"], "--speed nan is not between"),
        (["--address", "203.0.113.7", "--token", "auto"], "can't listen on 203.0.113.7"),
    ],
)
def test_refusals(words: list[str], message: str, finished: RunFolder) -> None:
    result = run(finished.path, *words)
    assert isinstance(result.exception, StagewrightError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)


def test_a_wrong_name_is_refused_with_the_nearest(finished: RunFolder) -> None:
    result = run(finished.path.with_name(finished.name + "x"))
    assert f"did you mean '{finished.name}'" in str(result.exception)
    assert "is a file" in str(run(finished.path / "plan.toml").exception)


@pytest.mark.skipif(sys.platform != "linux", reason="wants a pseudo-terminal")
def test_on_a_terminal_the_page_s_address_and_the_view_are_there(finished: RunFolder) -> None:
    import pty

    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen([PROGRAM, "watch", finished.path], stdout=theirs, stderr=theirs, env=environment) as page:
        os.close(theirs)
        text = ""
        try:
            while "ended" not in text:
                text += os.read(ours, 65536).decode(errors="replace")
            page.send_signal(signal.SIGINT)
            assert page.wait(60) == 0
        finally:
            page.kill()
            os.close(ours)
    assert "http://127.0.0.1:" in text
    assert "Ctrl-C ends the page, not the run" in text
    assert "finished" in text


@pytest.mark.parametrize("line", range(1, 9))
def test_an_interruption_anywhere_in_the_wait_ends_it(line: int) -> None:
    """At each line of the wait, the last of them while it sleeps."""
    alarms = 0

    def alarm(*_: object) -> None:
        nonlocal alarms
        alarms += 1
        if line >= 0:
            interrupt()
        elif alarms > 1:
            raise TimeoutError

    def interrupt() -> None:
        nonlocal line
        line = -1
        signal.raise_signal(signal.SIGINT)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal line
        line -= event == "line" and frame.f_code.co_filename in (threading.__file__, watch.__code__.co_filename)
        if line == 0:
            interrupt()
        return trace

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        with _until_interrupted() as stop:
            signal.setitimer(signal.ITIMER_REAL, 0.2, 60)
            sys.settrace(trace)
            stop.wait()
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_interrupted_and_leaves_no_port(finished: RunFolder, number: signal.Signals) -> None:
    with subprocess.Popen([PROGRAM, "watch", finished.path], stdout=subprocess.PIPE, text=True) as page:
        try:
            assert page.stdout is not None
            port = int(page.stdout.readline().rstrip("/\n").rpartition(":")[2])
            viewer = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            viewer.request("GET", "/events")
            assert viewer.getresponse().readline() == b"retry: 1000\n"
            page.send_signal(number)
            assert page.wait(60) == 0
            viewer.close()
        finally:
            page.kill()
    with pytest.raises(OSError):
        # From the same address, a free port may be connected to itself.
        socket.create_connection(("127.0.0.1", port), timeout=60, source_address=("127.0.0.2", 0))
