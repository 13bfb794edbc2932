"""How good the fabric engine is: beside the link's own limit, beside Gloo, and in a hurry.

    python benchmarks/fabric_numbers.py rate      64 MiB ring all-reduce of 4 lab hosts at 1 Gbit, of the ideal (root)
    python benchmarks/fabric_numbers.py small     small messages on loopback, 4 ranks, sockets beside Gloo
    python benchmarks/fabric_numbers.py many      10,000 trials × 4 layers: time to run and to report
    python benchmarks/fabric_numbers.py kill      an agent is killed in mid-run: how soon the others have stopped

Each prints the ratio to its limit and, with --output FILE, writes what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from record import write_record
from stagewright.fabric.lab.network import LabNetwork
from stagewright.fabric.lab.session import open_lab
from stagewright.fabric.ranks.coordinator import Coordinator, Measurements, RankLocation, Settings
from stagewright.fabric.traffic.workload import Workload, from_sizes

RANKS = 4
LAYERS = [2600, 33024, 131584, 803840]
LOCAL = RankLocation(name="local")


def run(workload: Workload, places: list[RankLocation], settings: Settings) -> Measurements:
    with Coordinator(workload, places, settings) as coordinator:
        return coordinator.run()


def rate() -> dict[str, Any]:
    """Ideal: 2(n − 1)/n · S/B; with headers, each 1448 bytes of payload are a frame of 1514."""
    size, bits = 64 * 2**20, 1e9
    network = LabNetwork.parse(hosts=RANKS, rate="1gbit")
    found: dict[str, Any] = {}
    ideal_s = 2 * (RANKS - 1) / RANKS * size / (bits / 8)
    with_headers_s = ideal_s * 1514 / 1448
    with open_lab(network) as lab:
        places = [
            RankLocation(name=f"host {at}", host=network.address(at), namespace=lab.namespace(at)) for at in range(RANKS)
        ]
        for engine in ("sockets", "gloo"):
            workload = from_sizes([size], RANKS, trials=10, warmup=2)
            measured = run(workload, places, Settings(engine=engine, probe=False))
            median_s = float(np.median(measured.trials.durations(0)))
            found[engine] = {"median_s": median_s, "over_ideal": median_s / with_headers_s}
            right = measured.trials.num_wrong == 0
            print(
                f"{engine}: {median_s * 1e3:.0f} ms, {median_s / with_headers_s:.3f} × the ideal with headers "
                f"({with_headers_s * 1e3:.0f} ms; without {ideal_s * 1e3:.0f} ms), sums right: {right}",
                flush=True,
            )
    return {"ideal_s": ideal_s, "with_headers_s": with_headers_s, **found}


def small() -> dict[str, Any]:
    sizes = [8, 1024, 2600, 33024]
    found: dict[str, Any] = {}
    for engine, algorithm in (("sockets", "ring"), ("sockets", "halving-doubling"), ("gloo", "ring")):
        trials = 1000 if engine == "sockets" else 200
        measured = run(
            from_sizes(sizes, RANKS, algorithm=algorithm, trials=trials, warmup=20),
            [LOCAL] * RANKS,
            Settings(engine=engine, probe=False),
        )
        medians = [float(np.median(measured.trials.durations(at))) for at in range(len(sizes))]
        name = engine if engine == "gloo" else f"{engine}, {algorithm}"
        found[name] = dict(zip(map(str, sizes), medians, strict=True))
        told = ", ".join(f"{size} B {median * 1e3:.2f} ms" for size, median in zip(sizes, medians, strict=True))
        print(f"{name}: {told}", flush=True)
    return found


def many() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "stagewright", "fabric", "run", "--sizes", ",".join(map(str, LAYERS))]
        words += ["--ranks", str(RANKS), "--trials", "10000", "--root", folder, "--json", "--plot", f"{folder}/a.png"]
        begin = time.monotonic()
        done = subprocess.run(words, capture_output=True, encoding="utf-8", check=True)
        wall_s = time.monotonic() - begin
        result = json.loads(done.stdout)
        size = sum(one.stat().st_size for one in Path(result["folder"]).iterdir())
    print(
        f"10,000 trials × {len(LAYERS)} layers: {wall_s:.0f} s in all ({wall_s / 180:.2f} × the 3 min allowed), trials "
        f"{result['wall_s']:.0f} s, verified {result['verified']}, run folder {size / 1e6:.1f} MB",
        flush=True,
    )
    return {"wall_s": wall_s, "trials_s": result["wall_s"], "verified": result["verified"], "folder_bytes": size}


@contextlib.contextmanager
def agents(number: int, token: Path) -> Iterator[list[tuple[subprocess.Popen[bytes], int]]]:
    found = []
    try:
        for _ in range(number):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            words = [sys.executable, "-m", "stagewright", "fabric", "agent", "--listen", f"127.0.0.1:{port}"]
            process = subprocess.Popen([*words, "--token-file", str(token)], stderr=subprocess.PIPE)
            assert process.stderr is not None
            process.stderr.readline()  # it listens
            found.append((process, port))
        yield found
    finally:
        for process, _ in found:
            process.kill()
            process.wait()


def kill() -> dict[str, Any]:
    found = {}
    for how in (signal.SIGKILL, signal.SIGSTOP):
        with tempfile.TemporaryDirectory() as folder:
            token = Path(folder) / "token"
            token.write_text(secrets.token_hex())
            with agents(RANKS, token) as started:
                places = [
                    RankLocation(name=f"agent {at}", host="127.0.0.1", port=port) for at, (_, port) in enumerate(started)
                ]
                killed: list[float] = []

                def strike(victim: int, how: signal.Signals, killed: list[float]) -> None:
                    killed.append(time.monotonic())
                    # The agent and the rank that it serves with: a host that is gone takes both.
                    for number in [*_children(victim), victim]:
                        os.kill(number, how)

                timer = threading.Timer(3.0, strike, (started[2][0].pid, how, killed))
                timer.start()
                settings = Settings(token=token.read_text().encode())
                measured = run(from_sizes([2600], RANKS, trials=10_000_000), places, settings)
                stopped_s = time.monotonic() - killed[0]
                for number in _children(started[2][0].pid):
                    os.kill(number, signal.SIGKILL)
        found[how.name] = {"stopped_s": stopped_s, "kept": measured.trials.num_trials, "named": measured.error}
        print(f"{how.name}: all stopped after {stopped_s:.1f} s ({stopped_s / 10:.2f} × the 10 s allowed)", flush=True)
        print(f"   {measured.trials.num_trials} trials kept; {measured.error}", flush=True)
    return found


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


PARTS = {"rate": rate, "small": small, "many": many, "kill": kill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(PARTS), metavar="|".join(PARTS), help="all, if none is named")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    wrong = [one for one in options.what if one not in PARTS]
    if wrong:
        parser.error(f"{wrong[0]!r} is none of {', '.join(PARTS)}")
    found = {one: PARTS[one]() for one in options.what}
    if options.output:
        write_record(options.output, found)


if __name__ == "__main__":
    main()
