"""CPU time of the live page during a busy run: 16 workers, each with 50 updates a second, one viewer.

    python benchmarks/live_page.py --json

A separate process writes a run folder as workers do: for each worker 50 lines of metrics and 200 current actions a
second. `stagewright watch` serves it, and a viewer receives every event. Measured is the CPU time of the server process
and, if a browser is installed, of a browser that shows the page. The limit is 20 % of one core.
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
    parser.add_argument("--updates", type=float, default=50.0, help="lines of metrics per second and worker")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--no-browser", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", default="", help="JSON file")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)  # internal: write the run folder
    options = parser.parse_args()
    if options.write is not None:
        write_run(RunFolder(options.write), options.workers, options.updates)
        return
    rows = [measure(options, browser=False)]
    program = None if options.no_browser else find_browser()
    if program is not None:
        rows.append(measure(options, browser=True, program=program))
    record = {"workers": options.workers, "updates_per_s": options.updates, "rows": rows}
    if options.output:
        write_record(options.output, record)
    if options.json:
        print(json.dumps(record, indent=2))
        return
    print(f"{options.workers} workers, each {options.updates:g} lines a second, for {options.seconds:g} s")
    for row in rows:
        line = f"{row['viewer']:22} server {row['server']:.1%} of a core (limit {row['limit']:.0%})"
        line += (
            f", {row['events_per_s']:.1f} events/s of {row['bytes_per_event']:.0f} bytes" if row["events_per_s"] else ""
        )
        line += f", the browser {row['browser']:.0%}" if row["browser"] is not None else ""
        print(f"{line}; {row['lines_per_s']:.0f} lines/s, lag {row['behind_s'] * 1e3:.0f} ms")


def measure(options: argparse.Namespace, *, browser: bool, program: str = "") -> dict[str, Any]:
    """Measure one server and one viewer while a run is written."""
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder.create(root, make_plan(options.workers), environment={})
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
            time.sleep(3)  # until the rate is steady
            before = (cpu_s([server.pid]), cpu_s(viewer.pids), viewer.counts(), time.monotonic())
            lines = count_lines(folder)
            time.sleep(options.seconds)
            took = time.monotonic() - before[3]
            used, shown = cpu_s([server.pid]) - before[0], cpu_s(viewer.pids) - before[1]
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


def make_plan(workers: int) -> Plan:
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
    """Write what workers would write, at their rate, from one process."""
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
    """A client that receives every event, as a browser would, and keeps the last step."""

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
    """Return the descendants of a process with this name."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            process_id, _, rest = text.partition(" (")
            title, _, rest = rest.rpartition(") ")
            parents[int(process_id)] = (int(rest.split()[1]), title)
    matching, generation = [], {pid}
    while generation:
        generation = {child for child, (parent, _) in parents.items() if parent in generation}
        matching += [child for child in generation if name in parents[child][1]]
    return matching


def cpu_s(pids: list[int]) -> float:
    """Return the CPU time of these processes in seconds."""
    total = 0
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


def last_step(folder: RunFolder) -> int:
    """Return the last step in the metrics file."""
    *_, line = folder.metrics(0)
    return int(line["step"])


def count_lines(folder: RunFolder) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.path.glob("workers/*/metrics.jsonl"))


if __name__ == "__main__":
    main()
