"""The page's server: a thread that reads the run folder, a thread for each viewer, nothing that writes.

    run folder ─► RunTail (20 × a second) ─► state ─┬─► viewer: everything once, then what has changed
                                                    └─► viewer
    GET /         the page                          GET /state    the state now, as --json prints it
    GET /events   server-sent events; with ?at=SECONDS&speed=N (or auto) a replay of this viewer's own

Plain ``http.server``: a few viewers on loopback need no more. A viewer that is slow or leaves holds up nobody.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from stagewright.errors import StagewrightError, UsageError
from stagewright.report.live.access import Access
from stagewright.report.live.difference import difference
from stagewright.report.live.page import page_html
from stagewright.report.live.replay import Replay, read_replay
from stagewright.report.live.state import LiveState
from stagewright.report.live.tail import RunTail

__all__ = ["LiveServer", "Watcher", "replay_dict"]

POLL_S = 0.05
"""Between two looks at the run folder, and at least between two events to a viewer."""

IDLE_S = 0.5
"""Between two looks at a run that has ended."""

PING_S = 5.0
"""A viewer that has left is noticed after so long."""

AUTO_S = 20.0
"""How long a replay takes whose speed is left to us."""

MOST_VIEWERS = 32
_COOKIE = "stagewright-token"
_SEND_S = 10.0  # a viewer that takes nothing for so long is let go


class Watcher:
    """The one reader of a run folder, on a thread of its own; what it knows is for any number of viewers."""

    def __init__(self, tail: RunTail) -> None:
        self.tail = tail
        self._news = threading.Condition()
        self._shown: dict[str, Any] = {}
        self._number = 0
        self._closed = False
        self._replays: tuple[str, Replay] | None = None
        self._read()
        self._thread = threading.Thread(target=self._run, name="stagewright-tail", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading; whoever waits for news is woken."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.tail.close()

    @property
    def closed(self) -> bool:
        """Whether there will be no more news."""
        return self._closed

    def now(self) -> tuple[int, dict[str, Any]]:
        """The state as it is shown, and its number."""
        with self._news:
            return self._number, self._shown

    def wait(self, number: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """A state newer than that number, or the same after a while."""
        with self._news:
            self._news.wait_for(lambda: self._closed or self._number != number, timeout_s)
            return self._number, self._shown

    def replay(self) -> Replay:
        """A replay of the run that is shown, from its beginning; the files are read once."""
        folder = self.tail.folder
        if folder is None:
            raise UsageError("there is no run yet")
        kept = self._replays
        if kept is None or kept[0] != folder.name:
            kept = self._replays = (folder.name, read_replay(folder))
        return Replay(kept[1].known, kept[1].story, kept[1].end)

    def _run(self) -> None:
        while not self._closed:
            ended = self._read()
            with self._news:
                self._news.wait_for(lambda: self._closed, IDLE_S if ended else POLL_S)

    def _read(self) -> bool:
        """Look at the folder; whether the run has ended."""
        state = self.tail.poll()
        now_s = time.time()
        shown = {**state.to_dict(now_s), "replay": None}
        if shown != self._shown:
            with self._news:
                self._shown, self._number = shown, self._number + 1
                self._news.notify_all()
        return shown["status"] in ("done", "failed", "refused", "interrupted", "killed")


class LiveServer:
    """Serves one run until it is closed; the port is free again then."""

    def __init__(self, watcher: Watcher, access: Access, port: int = 0, *, speed: float | None = None) -> None:
        self.watcher, self.access, self.speed = watcher, access, speed
        handler = type("_RunHandler", (_Handler,), {"live": self})
        try:
            self._http = _Http((access.address, port), handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"can't listen on {access.address} port {port}: {reason}; choose another --port, or 0 for any"
            ) from None
        self.viewers = threading.BoundedSemaphore(MOST_VIEWERS)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(POLL_S,), daemon=True)

    @property
    def port(self) -> int:
        """The port that was given."""
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        """What to open; with the token, if there is one."""
        host = f"[{self.access.address}]" if ":" in self.access.address else self.access.address
        return f"http://{host}:{self.port}/" + (f"?token={self.access.token}" if self.access.token else "")

    def start(self) -> None:
        """Begin to answer."""
        self.watcher.start()
        self._thread.start()

    def close(self) -> None:
        """Let every viewer go and give the port back."""
        self.watcher.close()
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    def __enter__(self) -> LiveServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # As http.server's, without asking the network for this machine's full name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A viewer that leaves in the middle of an answer is no error."""


class _Handler(BaseHTTPRequestHandler):
    """One request; ``live`` is set by the server that made this class."""

    live: LiveServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "stagewright", ""
    timeout = 30

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        access = self.live.access
        if not access.answers_to(self.headers.get("Host")):
            self._answer(HTTPStatus.FORBIDDEN, "this page answers to 127.0.0.1 and localhost only\n")
        elif not access.knows(query.get("token") or self._offered()):
            self._answer(HTTPStatus.FORBIDDEN, "open the address with its ?token=… as it was printed\n")
        elif parts.path == "/" and "token" in query:
            # The token goes into a cookie that scripts can't read, and out of the address and the history.
            cookie = f"{_COOKIE}={query['token']}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(HTTPStatus.SEE_OTHER, "", {"Location": "/", "Set-Cookie": cookie})
        elif parts.path == "/":
            nonce = secrets.token_urlsafe(16)
            policy = (
                f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
                "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            )
            self._answer(
                HTTPStatus.OK, page_html(nonce, self.live.speed), {"Content-Security-Policy": policy}, "text/html"
            )
        elif parts.path == "/state":
            shown = self.live.watcher.now()[1]
            self._answer(HTTPStatus.OK, json.dumps(shown) + "\n", kind="application/json")
        elif parts.path == "/events":
            self._events(query)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "there is /, /state and /events\n")

    def _offered(self) -> str | None:
        bearer = self.headers.get("Authorization", "")
        if bearer.startswith("Bearer "):
            return bearer.removeprefix("Bearer ")
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            return None
        return found.value if found is not None else None

    def _answer(
        self, status: HTTPStatus, text: str, headers: dict[str, str] | None = None, kind: str = "text/plain"
    ) -> None:
        content = text.encode()
        self._head(status, kind, {"Content-Length": str(len(content)), **(headers or {})})
        self.wfile.write(content)

    def _head(self, status: HTTPStatus, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        fixed = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in {**fixed, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _events(self, query: dict[str, str]) -> None:
        try:
            states = self._replayed(query) if "at" in query else self._followed()
        except (StagewrightError, ValueError) as error:
            self._answer(HTTPStatus.BAD_REQUEST, f"{error}\n")
            return
        if not self.live.viewers.acquire(blocking=False):
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_VIEWERS} viewers are watching already\n")
            return
        self.close_connection = True
        self.connection.settimeout(_SEND_S)
        try:
            self._head(HTTPStatus.OK, "text/event-stream", {"Connection": "close"})
            self.wfile.write(b"retry: 1000\n\n")
            sent: dict[str, Any] | None = None
            for shown in states:
                change = shown if sent is None else difference(sent, shown)
                if change:
                    name = "state" if sent is None else "change"
                    self.wfile.write(f"event: {name}\ndata: {json.dumps(change, separators=(',', ':'))}\n\n".encode())
                    sent = shown
                else:
                    self.wfile.write(b": still here\n\n")
        except OSError:
            pass  # the viewer has left
        finally:
            self.live.viewers.release()

    def _followed(self) -> Iterator[dict[str, Any]]:
        """The run as it goes on: each state that is new, and an old one now and then."""
        watcher = self.live.watcher
        number, shown = watcher.now()
        while not watcher.closed:
            yield shown
            number, shown = watcher.wait(number, PING_S)

    def _replayed(self, query: dict[str, str]) -> Iterator[dict[str, Any]]:
        """The run as it was, from a time on; ends with its last moment."""
        replay = self.live.watcher.replay()
        wanted = query.get("speed", "auto")
        at_s, speed = float(query["at"]), replay.length_s / AUTO_S if wanted == "auto" else float(wanted)
        if not (0 <= at_s < float("inf") and 0 <= speed <= 1e6):
            raise ValueError(f"can't replay from {at_s} s at speed {speed}; use at >= 0 and speed from 0 to 1000000")
        return _play(self.live.watcher, replay, at_s, speed)

    def log_message(self, format: str, *values: Any) -> None:
        """Nobody reads a log of this."""


def _play(watcher: Watcher, replay: Replay, at_s: float, speed: float) -> Iterator[dict[str, Any]]:
    begun_s = time.monotonic()
    while not watcher.closed:
        now_s = min(replay.length_s, at_s + (time.monotonic() - begun_s) * speed)
        yield replay_dict(replay, now_s)
        if now_s >= replay.length_s or speed == 0:
            return
        time.sleep(POLL_S)


def replay_dict(replay: Replay, at_s: float) -> dict[str, Any]:
    """The state of a replay as it is shown."""
    state: LiveState = replay.at(at_s)
    position = {"at_s": round(at_s, 3), "length_s": round(replay.length_s, 3)}
    return {**state.to_dict(at_s), "elapsed_s": round(at_s, 1), "replay": position}
