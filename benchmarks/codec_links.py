"""Step time of a pipeline over links of 0.1, 1 and 10 Gb/s, with and without codecs. Needs root, `ip` and `tc`.

    python benchmarks/codec_links.py [--model deit-tiny] [--codecs none,bf16,hadamard4/block8,auto]

Two network namespaces on this machine act as two machines, with a virtual cable (veth) between them that is limited to
the rate at both ends (tbf). Each pair of a link and a codec is one run of `torchrun … -m stagewright worker`, verified
against the baseline under the same quantization before it is timed. Writes JSON and prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record import write_record

NAMES = [f"sw-{side}-{os.getpid()}" for side in "ab"]
PORTS = [f"sw{side}{os.getpid()}"[:15] for side in "ab"]
ADDRESSES = ["198.18.77.1", "198.18.77.2"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def machines(gigabits: float) -> Iterator[None]:
    """Create two namespaces with a slow cable between them; remove them afterwards, with their processes."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", PORTS[0], "netns", NAMES[0], "type", "veth", "peer", PORTS[1], "netns", NAMES[1])
        for name, port, address in zip(NAMES, PORTS, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", port)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", port, "up")
            burst = max(64, int(gigabits * 1e9 / 8 * 0.002 / 1024))  # two milliseconds of the rate
            limit = ["rate", f"{gigabits * 1000:.0f}mbit", "burst", f"{burst}kb", "latency", "100ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", port, "root", "tbf", *limit], check=True)
        yield
    finally:
        for name in NAMES:
            listing = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in listing.stdout.split():  # only processes that were started below
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run(plan: Any, folder: Path) -> dict[str, Any]:
    """Run a plan on both machines and return its results."""
    from stagewright.spec.plan_file import read_plan, write_plan

    folder.mkdir()
    write_plan(plan, folder / "requested.toml")
    started = []
    for rank, (name, port) in enumerate(zip(NAMES, PORTS, strict=True)):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1", "--max-restarts", "0"]
        command += ["--master-addr", ADDRESSES[0], "--master-port", "29519"]
        command += ["-m", "stagewright", "worker", str(folder / "requested.toml"), "--run-folder", str(folder / "run")]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": port}
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )
    exits = [(process.communicate(timeout=500)[1], process.returncode) for process in started]
    if any(code for _, code in exits):
        raise SystemExit("\n".join(text for text, _ in exits))
    workers = [json.loads((folder / "run" / "workers" / str(rank) / "result.json").read_text()) for rank in (0, 1)]
    steps = [max(times) for times in zip(*(worker["step_s"] for worker in workers), strict=True)]
    chosen = read_plan(folder / "run" / "plan.toml")
    return {
        "step_s": statistics.median(steps),
        "steps_s": steps,
        "equal": workers[0]["equality"]["equal"],
        "sent_bytes": [sum(worker["sent_bytes"].values()) for worker in workers],
        "codec": [chosen.codec, chosen.codec_backward],
    }


def main() -> None:
    from stagewright.engine.parallel.resolve import resolve_plan
    from stagewright.spec.plan import Mesh, ModelSpec, Plan

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deit-tiny")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--gigabits", default="0.1,1,10")
    parser.add_argument("--codecs", default="none,bf16,hadamard4/block8,auto")
    parser.add_argument("--output", type=Path, default=Path("codec_links.json"))
    options = parser.parse_args()
    base = Plan(
        model=ModelSpec(name=options.model),
        batch=options.batch,
        mesh=Mesh(pipeline=2),
        microbatches=options.microbatches,
        split="blocks",
        steps=options.steps,
        warmup=2,
        devices=tuple(f"cpu:{core}" for core in sorted(os.sched_getaffinity(0))[:2]),
    )
    base = resolve_plan(base)
    result: dict[str, Any] = {"model": options.model, "batch": options.batch, "cuts": list(base.cuts), "links": {}}
    with tempfile.TemporaryDirectory() as root:
        for gigabits in map(float, options.gigabits.split(",")):
            with machines(gigabits):
                for name in options.codecs.split(","):
                    forward, _, backward = name.partition("/")
                    plan = dataclasses.replace(base, codec=forward, codec_backward=backward or None)
                    measured = run(plan, Path(root) / f"{gigabits}-{name.replace('/', '-')}")
                    result["links"].setdefault(str(gigabits), {})[name] = measured
                    write_record(options.output, result)
                    print(f"{gigabits:5} Gb/s {name:20} {measured['step_s'] * 1e3:8.1f} ms per step", flush=True)
    print(f"\n{options.model}, batch {options.batch}, step in ms (MB sent in both directions)")
    for gigabits, codecs in result["links"].items():
        without_s = codecs["none"]["step_s"] if "none" in codecs else float("nan")
        for name, measured in codecs.items():
            step_s, sent = measured["step_s"], sum(measured["sent_bytes"]) / 1e6
            text = f"{step_s * 1e3:9.1f} ({sent:.2f})  {without_s / step_s:.2f}×  parity: {measured['equal']}"
            print(f"{gigabits:>5} Gb/s {name:18} {text} {measured['codec'] if name == 'auto' else ''}")


if __name__ == "__main__":
    main()
