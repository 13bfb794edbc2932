"""Performance of the fabric engine, relative to the link's limit and to Gloo.

    python benchmarks/fabric_numbers.py rate      64 MiB ring all-reduce of 4 lab hosts at 1 Gbit, and the ideal (root)
    python benchmarks/fabric_numbers.py small     small messages on loopback, 4 ranks, sockets and Gloo
    python benchmarks/fabric_numbers.py many      10,000 trials × 4 layers: time to run and report
    python benchmarks/fabric_numbers.py kill      kill an agent during a run: time until the others stop

Each prints the ratio to its limit; --output FILE writes the results.
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
from stagewright.fabric.lab.namespaces import open_lab
from stagewright.fabric.lab.network import LabNetwork
from stagewright.fabric.ranks.coordinator import Coordinator, Measurements, RankLocation, Settings
from stagewright.fabric.traffic.workload import Workload, from_sizes

RANKS = 4
LAYERS = [2600, 33024, 131584, 803840]
LOCAL = RankLocation(name="local")


def run(workload: Workload, locations: list[RankLocation], settings: Settings) -> Measurements:
    with Coordinator(workload, locations, settings) as coordinator:
        return coordinator.run()


def rate() -> dict[str, Any]:
    """Compare with the ideal 2(n − 1)/n · S/B; with headers, 1448 bytes of payload make a frame of 1514."""
    size, bits = 64 * 2**20, 1e9
    network = LabNetwork.parse(hosts=RANKS, rate="1gbit")
    results: dict[str, Any] = {}
    ideal_s = 2 * (RANKS - 1) / RANKS * size / (bits / 8)
    with_headers_s = ideal_s * 1514 / 1448
    with open_lab(network) as lab:
        locations = [
            RankLocation(name=f"host {host}", host=network.address(host), namespace=lab.namespace(host))
            for host in range(RANKS)
        ]
        for engine in ("sockets", "gloo"):
            workload = from_sizes([size], RANKS, trials=10, warmup=2)
            measured = run(workload, locations, Settings(engine=engine, probe=False))
            median_s = float(np.median(measured.trials.durations(0)))
            results[engine] = {"median_s": median_s, "over_ideal": median_s / with_headers_s}
            is_right = measured.trials.num_wrong == 0
            print(
                f"{engine}: {median_s * 1e3:.0f} ms, {median_s / with_headers_s:.3f} × the ideal with headers "
                f"({with_headers_s * 1e3:.0f} ms; without {ideal_s * 1e3:.0f} ms), results correct: {is_right}",
                flush=True,
            )
    return {"ideal_s": ideal_s, "with_headers_s": with_headers_s, **results}


def small() -> dict[str, Any]:
    sizes = [8, 1024, 2600, 33024]
    results: dict[str, Any] = {}
    for engine, algorithm in (("sockets", "ring"), ("sockets", "halving-doubling"), ("gloo", "ring")):
        trials = 1000 if engine == "sockets" else 200
        measured = run(
            from_sizes(sizes, RANKS, algorithm=algorithm, trials=trials, warmup=20),
            [LOCAL] * RANKS,
            Settings(engine=engine, probe=False),
        )
        medians = [float(np.median(measured.trials.durations(layer))) for layer in range(len(sizes))]
        name = engine if engine == "gloo" else f"{engine}, {algorithm}"
        results[name] = dict(zip(map(str, sizes), medians, strict=True))
        text = ", ".join(f"{size} B {median * 1e3:.2f} ms" for size, median in zip(sizes, medians, strict=True))
        print(f"{name}: {text}", flush=True)
    return results


def many() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "stagewright", "fabric", "run", "--sizes", ",".join(map(str, LAYERS))]
        command += ["--ranks", str(RANKS), "--trials", "10000", "--root", folder, "--json", "--plot", f"{folder}/a.png"]
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
        wall_s = time.monotonic() - begin
        result = json.loads(done.stdout)
        size = sum(path.stat().st_size for path in Path(result["folder"]).iterdir())
    print(
        f"10,000 trials × {len(LAYERS)} layers: {wall_s:.0f} s in total ({wall_s / 180:.2f} × the limit of 3 min), "
        f"trials {result['wall_s']:.0f} s, verified {result['verified']}, run folder {size / 1e6:.1f} MB",
        flush=True,
    )
    return {"wall_s": wall_s, "trials_s": result["wall_s"], "verified": result["verified"], "folder_bytes": size}


@contextlib.contextmanager
def agents(number: int, token: Path) -> Iterator[list[tuple[subprocess.Popen[bytes], int]]]:
    processes = []
    try:
        for _ in range(number):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [sys.executable, "-m", "stagewright", "fabric", "agent", "--listen", f"127.0.0.1:{port}"]
            process = subprocess.Popen([*command, "--token-file", str(token)], stderr=subprocess.PIPE)
            assert process.stderr is not None
            process.stderr.readline()  # until it listens
            processes.append((process, port))
        yield processes
    finally:
        for process, _ in processes:
            process.kill()
            process.wait()


def kill() -> dict[str, Any]:
    results = {}
    for how in (signal.SIGKILL, signal.SIGSTOP):
        with tempfile.TemporaryDirectory() as folder:
            token = Path(folder) / "token"
            token.write_text(secrets.token_hex())
            with agents(RANKS, token) as started:
                locations = [
                    RankLocation(name=f"agent {index}", host="127.0.0.1", port=port)
                    for index, (_, port) in enumerate(started)
                ]
                killed: list[float] = []

                def send_signal(victim: int, how: signal.Signals, killed: list[float]) -> None:
                    killed.append(time.monotonic())
                    # The agent and its rank process: a host that is gone takes both.
                    for pid in [*_children(victim), victim]:
                        os.kill(pid, how)

                timer = threading.Timer(3.0, send_signal, (started[2][0].pid, how, killed))
                timer.start()
                settings = Settings(token=token.read_text().encode())
                measured = run(from_sizes([2600], RANKS, trials=10_000_000), locations, settings)
                stopped_s = time.monotonic() - killed[0]
                for pid in _children(started[2][0].pid):
                    os.kill(pid, signal.SIGKILL)
        results[how.name] = {"stopped_s": stopped_s, "kept": measured.trials.num_trials, "named": measured.error}
        print(f"{how.name}: all stopped after {stopped_s:.1f} s ({stopped_s / 10:.2f} × the limit of 10 s)", flush=True)
        print(f"   {measured.trials.num_trials} trials kept; {measured.error}", flush=True)
    return results


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


PARTS = {"rate": rate, "small": small, "many": many, "kill": kill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(PARTS), metavar="|".join(PARTS), help="default: all")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    unknown = [name for name in options.what if name not in PARTS]
    if unknown:
        parser.error(f"unknown measurement {unknown[0]!r}; known: {', '.join(PARTS)}")
    results = {name: PARTS[name]() for name in options.what}
    if options.output:
        write_record(options.output, results)


if __name__ == "__main__":
    main()
