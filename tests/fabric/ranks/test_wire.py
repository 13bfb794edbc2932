from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagewright.errors import RunError, UsageError
from stagewright.fabric.ranks import agent
from stagewright.fabric.ranks.connections import receive_exactly
from stagewright.fabric.ranks.coordinator import Coordinator, RankLocation, Settings
from stagewright.fabric.ranks.wire import (
    TO_COORDINATOR,
    TO_RANK,
    Channel,
    CoordinatorHandshake,
    authenticate_agent,
    check_token,
)
from stagewright.fabric.traffic.workload import from_sizes

TOKEN = "a token of at least 16"


def authenticate_coordinator(connection: socket.socket, token: bytes, limit_s: float = 60.0) -> Channel:
    """Authenticate with one coordinator, on the agent's end, within a time limit for the whole handshake."""
    handshake, until_s = CoordinatorHandshake(token), time.monotonic() + limit_s
    while handshake.key is None:
        answer = handshake.receive(receive_exactly(connection, handshake.num_missing, until_s))
        if answer:
            connection.sendall(answer)
    connection.settimeout(None)
    return Channel(connection, handshake.key, accepts=TO_RANK)


def meet(one: bytes, two: bytes) -> tuple[Any, Any]:
    """Both sides of a meeting, as channels or errors."""
    first, second = socket.socketpair()
    found: list[Any] = [None, None]

    def try_to(at: int, work: Callable[[], Channel]) -> None:
        try:
            found[at] = work()
        except Exception as error:
            found[at] = error
            (first, second)[at].close()

    other = threading.Thread(target=try_to, args=(1, lambda: authenticate_coordinator(second, two)))
    other.start()
    try_to(0, lambda: authenticate_agent(first, one))
    other.join(60)
    return found[0], found[1]


def test_messages_arrive_as_they_were_sent() -> None:
    coordinator, agent = meet(b"same", b"same")
    coordinator.send("run", {"steps": True})
    assert agent.receive() == ("run", {"steps": True}, b"")
    agent.send("trials", {"rows": 2}, b"\x00\x01")
    assert coordinator.receive() == ("trials", {"rows": 2}, b"\x00\x01")
    for one in (coordinator, agent):
        one.close()


def test_another_token_is_refused_on_both_sides() -> None:
    coordinator, agent = meet(b"one", b"two")
    assert isinstance(coordinator, UsageError)
    assert "another token" in str(coordinator)
    assert isinstance(agent, RunError)


def test_unknown_messages_are_rejected() -> None:
    coordinator, agent = meet(b"same", b"same")
    coordinator.send("execute", {"code": "1"})
    with pytest.raises(RunError, match="unknown message kind"):
        agent.receive()
    agent.send("prepare", {})
    with pytest.raises(RunError, match="unknown message kind"):
        coordinator.receive()
    for one in (coordinator, agent):
        one.close()


def test_a_changed_message_is_rejected() -> None:
    first, second = socket.socketpair()
    sender, receiver = Channel(first, b"key", accepts=TO_COORDINATOR), Channel(second, b"other", accepts=TO_RANK)
    sender.send("stop")
    with pytest.raises(RunError, match="wrong MAC"):
        receiver.receive()
    for one in (sender, receiver):
        one.close()


def test_a_message_that_is_too_long_is_refused() -> None:
    first, second = socket.socketpair()
    first.sendall(b"GET / HTTP/1.1\r\n\r\n")
    channel = Channel(second, None, accepts=TO_RANK)
    with pytest.raises(RunError, match="too long"):
        channel.receive()
    first.close()
    channel.close()


def test_short_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match="5 characters"):
        check_token("short")


def test_agents_run_a_workload(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    words = [sys.executable, "-m", "stagewright", "fabric", "agent", "--token-file", str(tmp_path / "token"), "--once"]
    ports, started = [], []
    try:
        for _ in range(2):
            process = subprocess.Popen([*words, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, encoding="utf-8")
            started.append(process)
            assert process.stderr is not None
            ports.append(int(process.stderr.readline().rpartition(":")[2]))
        with socket.create_connection(("127.0.0.1", ports[0])) as stranger:
            stranger.sendall(b"x" * 200)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b"", "nothing is answered"
        places = [RankLocation(name=f"127.0.0.1:{port}", host="127.0.0.1", port=port) for port in ports]
        with Coordinator(from_sizes([8, 5000], 2, trials=5), places, Settings(token=TOKEN.encode())) as coordinator:
            measured = coordinator.run()
        assert measured.error is None
        assert measured.trials.num_trials == 5
        assert measured.trials.num_wrong == 0
        assert [process.wait(60) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_strangers_do_not_hold_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two say nothing and one sends a byte at a time: all are turned away. Another waits beside a coordinator."""
    monkeypatch.setattr(agent, "MEET_S", 0.3)
    lines: list[str] = []
    met: list[tuple[Channel, str]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        address = listener.getsockname()
        strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        serving = threading.Thread(target=lambda: met.append(agent._meet(listener, TOKEN.encode(), lines.append)))
        serving.start()
        until_s = time.monotonic() + 60
        strangers[0].sendall(b"SWC1")
        while len(lines) < 3:
            assert time.monotonic() < until_s, lines
            with contextlib.suppress(OSError):
                strangers[0].sendall(b"x")  # a limit of each read would not be reached
            time.sleep(0.05)
        monkeypatch.setattr(agent, "MEET_S", 60.0)
        stack.enter_context(socket.create_connection(address)).sendall(b"SWC1")
        coordinator = stack.enter_context(socket.create_connection(address))
        authenticate_agent(coordinator, TOKEN.encode())
        serving.join(60)
        assert not serving.is_alive()
    ((channel, host),) = met
    channel.close()
    assert host == "127.0.0.1"
    assert lines[:3] == ["rejected 127.0.0.1: it did not show the token within 0 s"] * 3
    assert lines[3:] == ["rejected 127.0.0.1: another coordinator has connected"]
