"""``stagewright watch``: follow a run, or replay a finished one, in a browser or in the terminal."""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.options import Json, panel
from stagewright.cli.screen import LEAST_WIDTH, note, print_json, screen
from stagewright.errors import UsageError

if TYPE_CHECKING:
    from stagewright.report.live.server import Watcher

_page_option = panel("Page")
_ENDED = ("done", "failed", "refused", "interrupted", "killed")
_VIEW_S = 0.2  # between two frames in the terminal
_LINE_S = 5.0  # between two lines without a terminal


def watch(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run folder, the beginning of its name, or a folder of runs or of a study: follows the newest.",
        ),
    ] = Path("runs"),
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show it in the terminal only; opens no port, ends with the run.")
    ] = False,
    speed: Annotated[
        float | None, typer.Option(metavar="N", help="Replay a finished run at N times its speed.")
    ] = None,
    port: Annotated[int, _page_option(min=0, max=65535, help="Port; 0: any free one.")] = 0,
    address: Annotated[str, _page_option(help="Address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    token: Annotated[str | None, _page_option(metavar="auto", help="Create a token that viewers must present.")] = None,
    token_file: Annotated[
        Path | None, _page_option("--token-file", metavar="FILE", help="File with the secret; viewers must present it.")
    ] = None,
    json: Json = False,
) -> None:
    """Follow a run: current action of every worker, throughput, loss, bubble, memory, remaining time."""
    from stagewright.report.live.access import choose_access
    from stagewright.report.live.server import LiveServer, Watcher
    from stagewright.report.live.tail import RunTail
    from stagewright.runs.choose import choose_run
    from stagewright.runs.run_folder import list_runs

    if speed is not None and not 0 < speed <= 1e6:
        raise UsageError(f"--speed {speed:g} is not between 0 and 1000000; 1 is the original speed")
    if run.is_file():
        raise UsageError(f"{run} is a file; name a run folder, or the folder that contains the runs")
    if not run.exists() and (list_runs(run.parent) or list_runs(Path("runs"))):
        run = choose_run(run)  # raises an error with the nearest name
    access = choose_access(address, _read_token(token, token_file))
    watcher = Watcher(RunTail(run))
    if json:
        shown = watcher.current()[1]
        watcher.close()
        print_json({key: value for key, value in shown.items() if key != "replay"})
        return
    with _until_interrupted() as stop:
        if terminal:
            watcher.start()
            try:
                _show(watcher, stop, speed=speed, stay=False, study=run if (run / "study.json").is_file() else None)
            finally:
                watcher.close()
            return
        with LiveServer(watcher, access, port, speed=speed) as server:
            print(server.url, flush=True)
            note("open it in a browser; Ctrl-C ends the page, not the run")
            if sys.stdout.isatty():
                _show(watcher, stop, speed=None, stay=True)
            else:
                stop.wait()


def _read_token(token: str | None, file: Path | None) -> str | None:
    """Return the token of a file, or `auto`; a token on the command line would be visible to every user (ps)."""
    if token is not None and file is not None:
        raise UsageError("--token auto and --token-file are two ways to one token; give one of them")
    if token not in (None, "auto"):
        raise UsageError(
            "a token on the command line can be read by every user of this machine (ps); write --token auto, or put it "
            "in a file: --token-file FILE"
        )
    if file is None:
        return token
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"can't read the token from {file}: {getattr(error, 'strerror', None) or error}") from None


class _Stop:
    """A flag that a signal handler may set at any time; ``threading.Event`` deadlocks when its wait is interrupted."""

    def __init__(self) -> None:
        self._is_set = False
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put may interrupt its get

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._wakeups.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is set, or until the timeout."""
        if not self._is_set:
            with suppress(queue.Empty):
                self._wakeups.get(timeout=timeout_s)


@contextmanager
def _until_interrupted() -> Iterator[_Stop]:
    """Yield a flag that Ctrl-C and SIGTERM set: the usual end of watching, not an error."""
    stop = _Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(watcher: Watcher, stop: _Stop, *, speed: float | None, stay: bool, study: Path | None = None) -> None:
    """Draw the state until the run, its replay or the study that it belongs to has ended, or until Ctrl-C."""
    from rich.live import Live

    from stagewright.report.live.terminal import live_line, live_view

    console = screen()
    width = min(console.width, LEAST_WIDTH) - 2
    last_line_s = 0.0
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        for shown in _states(watcher, stop, speed):
            ended = shown["status"] in _ENDED and not (shown["replay"] and _is_unfinished(shown["replay"]))
            if live is not None:
                live.update(live_view(shown, width), refresh=True)
            elif ended:
                console.print(live_view(shown, width))
            elif time.monotonic() - last_line_s >= _LINE_S:
                last_line_s = time.monotonic()
                note(live_line(shown))
            if ended and not stay and not (study is not None and _is_studying(study)):
                return


def _states(watcher: Watcher, stop: _Stop, speed: float | None) -> Iterator[dict[str, Any]]:
    from stagewright.report.live.server import replay_dict

    if speed is not None and watcher.current()[1]["status"] in _ENDED:
        replay, begun_s = watcher.replay(), time.monotonic()
        while not stop.is_set():
            yield replay_dict(replay, min(replay.length_s, (time.monotonic() - begun_s) * speed))
            stop.wait(_VIEW_S)
        return
    while not stop.is_set():
        yield watcher.current()[1]
        stop.wait(_VIEW_S)


def _is_studying(folder: Path) -> bool:
    """Whether a study may still start runs."""
    from stagewright.files.json_values import read_object_or_empty

    return read_object_or_empty(folder / "study.json").get("status") == "running"


def _is_unfinished(replay: dict[str, float]) -> bool:
    return replay["at_s"] < replay["length_s"]
