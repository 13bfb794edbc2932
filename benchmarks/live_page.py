"""What the live page costs while a run is busy: 16 workers, each with 50 updates a second, one viewer.

    python benchmarks/live_page.py --json

A process of its own writes a run folder as workers do: of each worker a line of metrics 50 × a second, and what it does
now 200 ×. `stagewright watch` serves it, and a viewer takes every event. Counted is the processor time of the server's
process; where a browser is installed, also that of a browser which shows the page. The limit is 20 % of one core.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from record import write_record
from stagewright.engine.worker.faults import Activity
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan

LIMIT = 0.20
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--updates", type=float, default=50.0, help="lines of metrics a second and worker")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--no-browser", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", default="", help="JSON file")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)  # this process writes the folder
    options = parser.parse_args()
    if options.write is not None:
        write_run(RunFolder(options.write), options.workers, options.updates)
        return
    rows = [measure(options, browser=False)]
    program = None if options.no_browser else find_browser()
    if program is not None:
        rows.append(measure(options, browser=True, program=program))
    found = {"workers": options.workers, "updates_per_s": options.updates, "rows": rows}
    if options.output:
        write_record(options.output, found)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{options.workers} workers, each {options.updates:g} lines a second, for {options.seconds:g} s")
    for row in rows:
        line = f"{row['viewer']:22} server {row['server']:.1%} of a core (limit {row['limit']:.0%})"
        line += (
            f", {row['events_per_s']:.1f} events/s of {row['bytes_per_event']:.0f} bytes" if row["events_per_s"] else ""
        )
        line += f", the browser itself {row['browser']:.0%}" if row["browser"] is not None else ""
        print(f"{line}; of {row['lines_per_s']:.0f} lines/s it was {row['behind_s'] * 1e3:.0f} ms behind")


def measure(options: argparse.Namespace, *, browser: bool, program: str = "") -> dict[str, Any]:
    """One server and one viewer, while a run is written."""
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder.create(root, a_plan(options.workers), environment={})
        words = ["--workers", str(options.workers), "--updates", str(options.updates)]
        writer = subprocess.Popen([sys.executable, __file__, "--write", folder.path, *words])
        server = subprocess.Popen(
            [sys.executable, "-m", "stagewright", "watch", folder.path],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        viewer = Browser(url, program) if browser else Viewer(url)
        try:
            time.sleep(3)  # until everything goes on evenly
            before = (processor_s([server.pid]), processor_s(viewer.pids), viewer.counts(), time.monotonic())
            lines = count_lines(folder)
            time.sleep(options.seconds)
            took = time.monotonic() - before[3]
            used, shown = processor_s([server.pid]) - before[0], processor_s(viewer.pids) - before[1]
            events, size = (after - first for after, first in zip(viewer.counts(), before[2], strict=True))
            lines = count_lines(folder) - lines
            behind_s = max(0, last_step(folder) - viewer.step()) / options.updates
        finally:
            viewer.close()
            server.send_signal(signal.SIGINT)
            server.wait(10)
            writer.kill()
            writer.wait()
    return {
        "viewer": "a browser" if browser else "one viewer",
        "server": used / took,
        "browser": shown / took if browser else None,
        "limit": LIMIT,
        "seconds": took,
        "events_per_s": events / took,
        "bytes_per_event": size / events if events else 0.0,
        "lines_per_s": lines / took,
        "behind_s": behind_s,
    }


def a_plan(workers: int) -> Plan:
    return Plan(
        model=ModelSpec(name="digits-vit"),
        batch=64,
        mesh=Mesh(data=max(1, workers // 8), pipeline=min(8, workers)),
        microbatches=16,
        devices=tuple(f"cpu:{rank}" for rank in range(workers)),
        task="digits",
        epochs=1000,
    )


def write_run(folder: RunFolder, num_workers: int, updates: float) -> None:
    """What workers write, from one process: lines and records, on time."""
    workers = [folder.worker(rank) for rank in range(num_workers)]
    records = [Activity() for _ in workers]
    for worker, record in zip(workers, records, strict=True):
        record.open(worker.path / "activity.txt")
        worker.append_metrics(kind="begin", step=0, total=1_000_000, batches=1000)
    actions = ("forward", "receive activation", "backward", "receive gradient")
    begun, tick, per_line = time.monotonic(), 0, 4
    while True:
        step, part = divmod(tick, per_line)
        for rank, (worker, record) in enumerate(zip(workers, records, strict=True)):
            record.begin(
                actions[(tick + rank) % 4], step=step, stage=rank % 8, microbatch=tick % 16, shapes="(4, 65, 64)"
            )
            if part == 0:
                worker.append_metrics(
                    kind="step",
                    step=step + 1,
                    epoch=1 + step // 1000,
                    loss=2.3 / (1 + step * 1e-3),
                    samples=64,
                    seconds=1 / updates,
                    waited_s=0.2 / updates,
                    memory_bytes=(200 + (step + rank) % 50) * 2**20,
                )
        tick += 1
        time.sleep(max(0.0, begun + tick / (updates * per_line) - time.monotonic()))


class Viewer:
    """Takes every event, as a browser would, and keeps the last step that it has seen."""

    def __init__(self, url: str) -> None:
        address = url.removeprefix("http://").rstrip("/")
        self._connection = http.client.HTTPConnection(address, timeout=30)
        self._connection.request("GET", "/events")
        self._answer = self._connection.getresponse()
        self._events = self._bytes = 0
        self._step = 0
        self.pids: list[int] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def counts(self) -> tuple[int, int]:
        return self._events, self._bytes

    def step(self) -> int:
        return self._step

    def close(self) -> None:
        self._connection.close()

    def _read(self) -> None:
        try:
            for line in self._answer:
                if line.startswith(b"data: "):
                    self._events += 1
                    self._bytes += len(line)
                    self._step = json.loads(line[6:]).get("step", self._step)
        except (OSError, ValueError, AttributeError):
            pass  # closed


class Browser:
    """Debian's chromium with the page open."""

    def __init__(self, url: str, program: str) -> None:
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        self._browser = self._playwright.chromium.launch(executable_path=program, args=arguments)
        self._page = self._browser.new_page(viewport={"width": 1280, "height": 900})
        self._page.goto(url)
        self._page.get_by_text("running").first.wait_for()
        self.pids = children_of(os.getpid(), "chrom")

    def counts(self) -> tuple[int, int]:
        return 0, 0

    def step(self) -> int:
        return int(self._page.locator("#step").inner_text().split()[0])

    def close(self) -> None:
        self._browser.close()
        self._playwright.stop()


def find_browser() -> str | None:
    import shutil

    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        return None
    return next((path for path in map(shutil.which, BROWSERS) if path is not None), None)


def children_of(pid: int, name: str) -> list[int]:
    """Every process below this one with such a name."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            own, _, rest = text.partition(" (")
            title, _, rest = rest.rpartition(") ")
            parents[int(own)] = (int(rest.split()[1]), title)
    found, edge = [], {pid}
    while edge:
        edge = {one for one, (parent, _) in parents.items() if parent in edge}
        found += [one for one in edge if name in parents[one][1]]
    return found


def processor_s(pids: list[int]) -> float:
    """Seconds of processor time that these processes have used."""
    total = 0
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


def last_step(folder: RunFolder) -> int:
    """The step that is in the file now."""
    *_, line = folder.metrics(0)
    return int(line["step"])


def count_lines(folder: RunFolder) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.path.glob("workers/*/metrics.jsonl"))


if __name__ == "__main__":
    main()
