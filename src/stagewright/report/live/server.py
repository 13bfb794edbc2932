"""The server of the live page: one thread reads the run folder, one thread per viewer; nothing writes.

    run folder ─► RunTail (20 Hz) ─► snapshot ─┬─► viewer: the whole snapshot once, then differences
                                               └─► viewer
    GET /         the page                     GET /state    the current snapshot, as --json prints it
    GET /events   server-sent events; with ?at=SECONDS&speed=N (or auto), a replay for this viewer only

Plain ``http.server`` suffices for a few viewers on loopback. A slow or disconnected viewer delays no one else.
"""

from __future__ import annotations

import contextlib
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

from stagewright.display import printable
from stagewright.errors import StagewrightError, UsageError
from stagewright.report.live.access import Access
from stagewright.report.live.difference import difference
from stagewright.report.live.replay import Replay, read_replay
from stagewright.report.live.snapshot import snapshot
from stagewright.report.live.state import LiveState
from stagewright.report.live.tail import RunTail
from stagewright.report.render.html import color_variables, render_template, template_text
from stagewright.user_code import one_line

POLL_S = 0.05
"""Polling interval of the run folder, and minimum interval of events to a viewer."""

IDLE_S = 0.5
"""Polling interval of a run that has ended."""

PING_S = 5.0
"""How often an idle viewer is pinged, to notice when it has disconnected."""

AUTO_S = 20.0
"""Length of a replay with speed ``auto``."""

MAX_VIEWERS = 32
MAX_UNAUTHENTICATED = 64
"""Connections that have not shown the token yet."""

_COOKIE = "stagewright-token"
_SEND_TIMEOUT_S = 10.0


class Watcher:
    """The only reader of a run folder, on its own thread; any number of viewers share its snapshots."""

    def __init__(self, tail: RunTail) -> None:
        self.tail = tail
        self._updated = threading.Condition()
        self._snapshot: dict[str, Any] = {}
        self._version = 0
        self.closed = False
        self._replay: tuple[str, Replay] | None = None
        self._read()
        self._thread = threading.Thread(target=self._run, name="stagewright-tail", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop reading and wake all waiting viewers."""
        with self._updated:
            self.closed = True
            self._updated.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.tail.close()

    def current(self) -> tuple[int, dict[str, Any]]:
        """Return the current version and snapshot."""
        with self._updated:
            return self._version, self._snapshot

    def wait(self, version: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Wait for a newer version, at most for the timeout."""
        with self._updated:
            self._updated.wait_for(lambda: self.closed or self._version != version, timeout_s)
            return self._version, self._snapshot

    def replay(self) -> Replay:
        """Return a new replay of the run; its files are read only once."""
        folder = self.tail.folder
        if folder is None:
            raise UsageError("there is no run to replay yet")
        if self._replay is None or self._replay[0] != folder.name:
            self._replay = (folder.name, read_replay(folder))
        source = self._replay[1]
        return Replay(source.plan, source.moments, source.end)

    def _run(self) -> None:
        while not self.closed:
            has_ended = self._read()
            with self._updated:
                self._updated.wait_for(lambda: self.closed, IDLE_S if has_ended else POLL_S)

    def _read(self) -> bool:
        """Poll the folder; return whether the run has ended."""
        try:
            shown = {**snapshot(self.tail.poll(), time.time()), "replay": None}
        except Exception as error:  # the next poll may read a repaired file: the thread goes on
            damaged = LiveState(name=self.tail.path.name, damaged=f"the run can't be read: {one_line(error)}")
            shown = {**snapshot(damaged, time.time()), "replay": None}
        if shown != self._snapshot:
            with self._updated:
                self._snapshot, self._version = shown, self._version + 1
                self._updated.notify_all()
        return shown["status"] in ("done", "failed", "refused", "interrupted", "killed")


class LiveServer:
    """Serves one run until it is closed."""

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
        self.viewers = threading.BoundedSemaphore(MAX_VIEWERS)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(POLL_S,), daemon=True)

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        """The URL to open, with the token if there is one."""
        host = f"[{self.access.address}]" if ":" in self.access.address else self.access.address
        return f"http://{host}:{self.port}/" + (f"?token={self.access.token}" if self.access.token else "")

    def start(self) -> None:
        self.watcher.start()
        self._thread.start()

    def close(self) -> None:
        """Disconnect all viewers and free the port."""
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
    """A thread per connection; of those that have shown no token yet, the oldest makes room for a new one."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._lock = threading.Lock()
        self._unauthenticated: dict[Any, None] = {}  # in the order of their arrival
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._unauthenticated[request] = None
            oldest = next(iter(self._unauthenticated)) if len(self._unauthenticated) > MAX_UNAUTHENTICATED else None
            if oldest is not None:
                del self._unauthenticated[oldest]
                _disconnect(oldest)
        super().process_request(request, client_address)

    def admit(self, request: Any) -> None:
        """Note that a connection has shown the token, if there is one."""
        with self._lock:
            self._unauthenticated.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.admit(request)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        # As in http.server, but without a DNS lookup of this machine's name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore viewers that disconnect during a response."""


def _disconnect(connection: Any) -> None:
    """End a connection; the thread that reads from it ends, too."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Handles one request; the server sets ``live`` in a subclass."""

    live: LiveServer
    server: _Http
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "stagewright", ""
    timeout = 30

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        access = self.live.access
        is_allowed = access.accepts_host(self.headers.get("Host")) and access.accepts_token(
            query.get("token") or self._offered_token()
        )
        if is_allowed:
            self.server.admit(self.connection)
        if not access.accepts_host(self.headers.get("Host")):
            self._respond(HTTPStatus.FORBIDDEN, "this page is served to 127.0.0.1 and localhost only\n")
        elif not access.accepts_token(query.get("token") or self._offered_token()):
            self._respond(HTTPStatus.FORBIDDEN, "open the printed URL, including ?token=…\n")
        elif parts.path == "/" and "token" in query:
            # Move the token from the URL and the history into a cookie that scripts can't read; nothing that was sent
            # is repeated in a header.
            cookie = f"{_COOKIE}={access.token or ''}; HttpOnly; SameSite=Strict; Path=/"
            self._respond(HTTPStatus.SEE_OTHER, "", {"Location": "/", "Set-Cookie": cookie})
        elif parts.path == "/":
            nonce = secrets.token_urlsafe(16)
            policy = (
                f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
                "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            )
            page = _page_html(nonce, self.live.speed)
            self._respond(HTTPStatus.OK, page, {"Content-Security-Policy": policy}, "text/html")
        elif parts.path == "/state":
            shown = self.live.watcher.current()[1]
            self._respond(HTTPStatus.OK, json.dumps(shown) + "\n", kind="application/json")
        elif parts.path == "/events":
            self._send_events(query)
        else:
            self._respond(HTTPStatus.NOT_FOUND, "not found; available: /, /state, /events\n")

    def _offered_token(self) -> str | None:
        bearer = self.headers.get("Authorization", "")
        if bearer.startswith("Bearer "):
            return bearer.removeprefix("Bearer ")
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            return None
        return cookie.value if cookie is not None else None

    def _respond(
        self, status: HTTPStatus, text: str, headers: dict[str, str] | None = None, kind: str = "text/plain"
    ) -> None:
        content = text.encode()
        self._send_headers(status, kind, {"Content-Length": str(len(content)), **(headers or {})})
        self.wfile.write(content)

    def _send_headers(self, status: HTTPStatus, kind: str, headers: dict[str, str]) -> None:
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

    def _send_events(self, query: dict[str, str]) -> None:
        try:
            snapshots = self._replay_snapshots(query) if "at" in query else self._live_snapshots()
        except (StagewrightError, ValueError) as error:
            self._respond(HTTPStatus.BAD_REQUEST, f"{printable(str(error))}\n")
            return
        if not self.live.viewers.acquire(blocking=False):
            self._respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_VIEWERS} viewers are already connected\n")
            return
        self.close_connection = True
        self.connection.settimeout(_SEND_TIMEOUT_S)
        try:
            self._send_headers(HTTPStatus.OK, "text/event-stream", {"Connection": "close"})
            self.wfile.write(b"retry: 1000\n\n")
            sent: dict[str, Any] | None = None
            for shown in snapshots:
                change = shown if sent is None else difference(sent, shown)
                if change:
                    name = "state" if sent is None else "change"
                    self.wfile.write(f"event: {name}\ndata: {json.dumps(change, separators=(',', ':'))}\n\n".encode())
                    sent = shown
                else:
                    self.wfile.write(b": ping\n\n")
        except OSError:
            pass  # the viewer has disconnected
        finally:
            self.live.viewers.release()

    def _live_snapshots(self) -> Iterator[dict[str, Any]]:
        """Yield each new snapshot, and the current one again as a ping."""
        watcher = self.live.watcher
        version, shown = watcher.current()
        while not watcher.closed:
            yield shown
            version, shown = watcher.wait(version, PING_S)

    def _replay_snapshots(self, query: dict[str, str]) -> Iterator[dict[str, Any]]:
        """Yield snapshots of a replay from the requested time to its end."""
        replay = self.live.watcher.replay()
        requested = query.get("speed", "auto")
        at_s, speed = float(query["at"]), replay.length_s / AUTO_S if requested == "auto" else float(requested)
        if not (0 <= at_s < float("inf") and 0 <= speed <= 1e6):
            raise ValueError(f"can't replay from {at_s} s at speed {speed}; use at >= 0 and speed from 0 to 1000000")
        return _play(self.live.watcher, replay, at_s, speed)

    def log_message(self, format: str, *values: Any) -> None:
        """Suppress the log."""


def _page_html(nonce: str, speed: float | None) -> str:
    """Render the page; its script and style carry the nonce. With a speed it replays a finished run at once."""
    return render_template(
        "live.html",
        nonce=nonce,
        speed="" if speed is None else f"{speed:g}",
        light=color_variables(),
        dark=color_variables(dark=True),
        style=template_text("live.css"),
        script=template_text("live.js"),
    )


def _play(watcher: Watcher, replay: Replay, at_s: float, speed: float) -> Iterator[dict[str, Any]]:
    begun_s = time.monotonic()
    while not watcher.closed:
        now_s = min(replay.length_s, at_s + (time.monotonic() - begun_s) * speed)
        yield replay_dict(replay, now_s)
        if now_s >= replay.length_s or speed == 0:
            return
        time.sleep(POLL_S)


def replay_dict(replay: Replay, at_s: float) -> dict[str, Any]:
    """Return the snapshot of a replay at a time."""
    position = {"at_s": round(at_s, 3), "length_s": round(replay.length_s, 3)}
    return {**snapshot(replay.state_at(at_s), at_s), "elapsed_s": round(at_s, 1), "replay": position}
