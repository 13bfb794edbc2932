"""The page's server, asked as a browser asks."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stagewright.errors import UsageError
from stagewright.report.live import server as server_module
from stagewright.report.live.access import Access, choose_access
from stagewright.report.live.difference import apply
from stagewright.report.live.server import LiveServer, Watcher
from stagewright.report.live.tail import RunTail


@contextmanager
def served(path: Any, access: Access | None = None) -> Iterator[LiveServer]:
    with LiveServer(Watcher(RunTail(path)), access or choose_access("127.0.0.1", None)) as server:
        yield server


def ask(server: LiveServer, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    connection.close()
    return found


class Stream:
    """One viewer: takes events and applies them."""

    def __init__(self, server: LiveServer, path: str = "/events") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._connection.request("GET", path)
        self.answer = self._connection.getresponse()
        self.names: list[str] = []
        self.state: dict[str, Any] = {}

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Take events until the state is as wanted."""
        for raw in self.answer:
            line = raw.decode().rstrip("\n")
            if line.startswith("event: "):
                self.names.append(line.removeprefix("event: "))
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                self.state = data if self.names[-1] == "state" else apply(self.state, data)
                if wanted(self.state):
                    return self.state
        raise AssertionError(f"the stream ended at {self.state}")

    def close(self) -> None:
        self._connection.close()


def test_the_page_and_its_rules(make_run: Callable[..., Any]) -> None:
    with served(make_run().path) as server:
        status, headers, text = ask(server, "/")
        assert status == 200
        nonce = headers["content-security-policy"].partition("nonce-")[2].partition("'")[0]
        assert text.count(f'nonce="{nonce}"') == 2
        assert "{{" not in text
        assert "https://" not in text
        assert headers["cache-control"] == "no-store"
        assert ask(server, "/")[1]["content-security-policy"] != headers["content-security-policy"]
        assert ask(server, "/nothing")[0] == 404
        assert json.loads(ask(server, "/state")[2])["status"] == "starting"


def test_other_sites_can_t_ask_through_a_name_of_their_own(make_run: Callable[..., Any]) -> None:
    with served(make_run().path) as server:
        assert ask(server, "/state", Host="evil.example")[0] == 403


def test_a_token_opens_the_page_and_becomes_a_cookie(make_run: Callable[..., Any]) -> None:
    access = choose_access("127.0.0.1", "auto")
    with served(make_run().path, access) as server:
        for path in ("/", "/state", "/events", "/?token=wrong"):
            assert ask(server, path)[0] == 403
        assert ask(server, "/state", Cookie="stagewright-token=wrong")[0] == 403
        assert server.url.endswith(f"/?token={access.token}")
        status, headers, text = ask(server, f"/?token={access.token}")
        assert (status, headers["location"], text) == (303, "/", "")
        assert "HttpOnly" in headers["set-cookie"]
        assert "SameSite=Strict" in headers["set-cookie"]
        cookie = headers["set-cookie"].partition(";")[0]
        assert ask(server, "/", Cookie=cookie)[0] == 200
        assert ask(server, "/state", Cookie=cookie)[0] == 200
        assert ask(server, "/state", Authorization=f"Bearer {access.token}")[0] == 200


def test_several_viewers_see_everything_once_and_then_what_changes(make_run: Callable[..., Any]) -> None:
    run = make_run()
    with served(run.path) as server:
        viewers = [Stream(server), Stream(server)]
        for viewer in viewers:
            viewer.until(lambda state: state["status"] == "starting")
        run.begin("forward", step=0, stage=0, microbatch=2)
        for number in (1, 2, 3):
            run.step(number)
        for viewer in viewers:
            state = viewer.until(lambda state: state["step"] == 3 and state["workers"][0]["microbatch"] == 2)
            assert [point[0] for point in state["curve"]] == [1, 2, 3]
            assert viewer.names.count("state") == 1
        viewers[0].close()  # one leaves, the other goes on
        run.folder.finish("done")
        viewers[1].until(lambda state: state["status"] == "done")
        viewers[1].close()


def test_a_finished_run_is_replayed_to_each_viewer_at_its_own_speed(make_run: Callable[..., Any]) -> None:
    run = make_run()
    for number in range(1, 5):
        run.step(number)
    run.folder.finish("done")
    with served(run.path) as server:
        fast, late = Stream(server, "/events?at=0&speed=10"), Stream(server, "/events?at=1.6&speed=0")
        assert late.until(lambda state: True)["step"] == 3
        states = []
        fast.until(lambda state: states.append(state["step"]) or state["status"] == "done")  # type: ignore[func-returns-value]
        assert states[0] in (None, 1)
        assert states[-1] == 4
        assert fast.state["replay"] == {"at_s": 2.0, "length_s": 2.0}
        assert fast.answer.read() == b"\n", "it ends with the run"
        for wrong in ("at=x", "at=-1", "at=0&speed=-1", "at=nan", "at=0&speed=inf"):
            assert ask(server, f"/events?{wrong}")[0] == 400
        for one in (fast, late):
            one.close()


def test_too_many_viewers_are_told_so(make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_VIEWERS", 1)
    with served(make_run().path) as server:
        first = Stream(server)
        first.until(lambda state: True)
        assert ask(server, "/events")[0] == 503
        assert ask(server, "/state")[0] == 200
        first.close()


def test_connections_without_a_token_are_few_and_keep_nobody_out(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_UNAUTHENTICATED", 2)
    before = threading.active_count()
    with served(make_run().path, choose_access("127.0.0.1", "auto")) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(5)]
        assert [one.recv(1) for one in idle[:3]] == [b""] * 3, "the oldest were disconnected"
        assert ask(server, f"/state?token={server.access.token}")[0] in (200, 303)
        assert threading.active_count() <= before + 2 + 4  # the server, the reader, two strangers, one being served
        for one in idle:
            one.close()


def test_closing_frees_the_port_and_ends_every_stream(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PING_S", 600.0)  # nothing but the end wakes a stream
    before = threading.active_count()
    with served(make_run().path) as server:
        port = server.port
        viewer = Stream(server)
        viewer.until(lambda state: True)
    viewer.answer.read()  # ends
    viewer.close()
    with socket.create_server(("127.0.0.1", port)):
        pass
    until = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.02)
    assert threading.active_count() <= before


def test_a_taken_port_is_an_error_with_a_way_out(make_run: Callable[..., Any]) -> None:
    watcher = Watcher(RunTail(make_run().path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"can't listen on 127.0.0.1 port {port}: .*another --port"):
            LiveServer(watcher, choose_access("127.0.0.1", None), port)
    watcher.close()


def test_nothing_of_it_imports_torch() -> None:
    program = (
        "import sys, stagewright.report.live.server, stagewright.report.live.terminal, stagewright.cli.results.watch\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'pyarrow')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_nothing_that_was_sent_is_repeated_in_a_header(make_run: Callable[..., Any]) -> None:
    with served(make_run().path) as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /?token=a%0d%0aX-Injected:1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 303")
    assert b"X-Injected" not in answer


def test_unauthenticated_connections_make_room_for_a_viewer(make_run: Callable[..., Any]) -> None:
    with served(make_run().path, choose_access("127.0.0.1", "auto")) as server:
        before = threading.active_count()
        strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        assert ask(server, "/state", Authorization=f"Bearer {server.access.token}")[0] == 200
        assert threading.active_count() - before <= server_module.MAX_UNAUTHENTICATED + 1
        assert ask(server, "/state", Authorization=f"Bearer {server.access.token}")[0] == 200
        for stranger in strangers:
            stranger.close()


def test_a_damaged_file_does_not_end_the_reader(make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    with served(run.path) as server:
        poll = server.watcher.tail.poll
        monkeypatch.setattr(server.watcher.tail, "poll", lambda: 1 / 0)
        stream = Stream(server)
        shown = stream.until(lambda state: state["status"] == "failed")
        assert "ZeroDivisionError" in shown["error"]["text"]
        monkeypatch.setattr(server.watcher.tail, "poll", poll)
        stream.until(lambda state: state["status"] == "starting")
        stream.close()
