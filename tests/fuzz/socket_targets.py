"""Targets that read bytes and requests from a socket: messages of ranks, and the live page."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz.targets import Read, Target
from made_runs import make_training
from stagewright.fabric.ranks.wire import TO_COORDINATOR, TO_RANK, Channel, CoordinatorHandshake
from stagewright.report.live import server as live_server
from stagewright.report.live.access import choose_access
from stagewright.report.live.tail import RunTail


def wire(folder: Path) -> Target:
    def frames(key: bytes | None) -> tuple[bytes, bool, Read]:
        first, second = socket.socketpair()
        with first, second:
            sender = Channel(first, key, accepts=TO_RANK)
            sender.send("listening", {"host": "127.0.0.1", "port": 7651, "cores": [0, 1]})
            sender.send("trials", {"rows": 3}, b"\1" * 96)
            sender.send("done", {"links": []})
            content = second.recv(2**16)

        def read(variant: bytes) -> None:
            left, right = socket.socketpair()
            with left, right:
                left.sendall(variant[: 2**16])
                left.close()
                receiver = Channel(right, key, accepts=TO_COORDINATOR)
                for _ in range(4):
                    receiver.receive()

        return content, False, read

    token = b"0123456789abcdef"

    def shake(variant: bytes) -> None:
        handshake = CoordinatorHandshake(token)
        for at in range(0, max(1, len(variant)), 7):
            handshake.receive(variant[at : at + 7])

    return Target("wire", [frames(None), frames(b"key"), (b"SWC1" + b"n" * 64, False, shake)])


@contextlib.contextmanager
def live_page(folder: Path) -> Iterator[Target]:
    run = make_training(folder, "pipeline=2")
    access = choose_access("127.0.0.1", "auto")
    unexpected: list[BaseException] = []

    def handle_error(self: Any, request: Any, address: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            unexpected.append(error)

    original = live_server._Http.handle_error
    live_server._Http.handle_error = handle_error  # type: ignore[method-assign]
    watcher = live_server.Watcher(RunTail(run.path))
    with live_server.LiveServer(watcher, access) as server:

        def ask(variant: bytes) -> None:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=3)
            with connection, contextlib.suppress(OSError):
                connection.sendall(variant)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(1024)
                # Without a version in the request, the answer has no head.
                assert b"Traceback" not in answer
            if unexpected:
                raise unexpected.pop()

        head = f"Host: localhost\r\nAuthorization: Bearer {access.token}\r\nCookie: a=b; stagewright-token=x\r\n\r\n"
        paths = ("/", "/state", f"/?token={access.token}", "/events?at=0&speed=1000000", "/nothing", "/events?at=x")
        yield Target("live page", [(f"GET {path} HTTP/1.1\r\n{head}".encode(), False, ask) for path in paths])
        assert threading.active_count() < 200
    live_server._Http.handle_error = original  # type: ignore[method-assign]
