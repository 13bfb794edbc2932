"""Slowdown of a core while other cores are busy: the machine's limit on any speed-up.

    python benchmarks/core_scaling.py --model deit-small --copies 1,2,4,6

The same forward (and backward) runs on 1, 2, … cores at once, in separate pinned processes without communication. The
figure is the time of a micro-batch relative to a single busy core; no parallel plan on this machine can do better.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from typing import Any

from record import write_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit-small")
    parser.add_argument("--copies", default="1,2", help="numbers of busy cores, comma-separated")
    parser.add_argument("--cores", default=None, help="which cores, in order; default: one per physical core")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--modes", default="inference,training")
    parser.add_argument("--output", default=None, help="JSON file")
    options = parser.parse_args()
    from stagewright.machine.machine import separate_cores

    cores = [int(core) for core in options.cores.split(",")] if options.cores else list(separate_cores())
    rows = []
    for mode in options.modes.split(","):
        alone = None
        for copies in map(int, options.copies.split(",")):
            if copies > len(cores):
                raise SystemExit(f"{copies} copies need {copies} cores, but there are {len(cores)}: {cores}")
            medians = measure(options, mode, cores[:copies])
            alone = alone or statistics.mean(medians)
            slowdown = statistics.mean(medians) / alone
            rows.append({"mode": mode, "copies": copies, "median_s": medians, "slowdown": slowdown})
            print(
                f"{mode}, {copies} at once on {cores[:copies]}: {slowdown:.3f} × the time of the first row "
                f"({min(medians) * 1e3:.1f} to {max(medians) * 1e3:.1f} ms)",
                flush=True,
            )
    if options.output:
        write_record(options.output, {"rows": rows})


def measure(options: argparse.Namespace, mode: str, cores: list[int]) -> list[float]:
    """Return the median time of a micro-batch on each core, with all cores busy."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(len(cores)), context.Queue()
    workers = [context.Process(target=work, args=(options, mode, core, barrier, results)) for core in cores]
    for worker in workers:
        worker.start()
    medians = [results.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join()
    return medians


def work(options: argparse.Namespace, mode: str, core: int, barrier: Any, results: Any) -> None:
    from stagewright.cluster.device import Device, pin_process

    pin_process(Device.parse(f"cpu:{core}"))
    import torch

    from stagewright.spec.plan import ModelSpec

    model = ModelSpec(name=options.model).load(batch=options.batch, dtype="float32")
    training = mode == "training"
    model.module.train(training)

    def run_microbatch() -> None:
        output = model.module(*model.args, **model.kwargs)
        if training:
            model.module.zero_grad()
            model.loss(output, model.target).backward()

    samples = []
    with torch.set_grad_enabled(training):
        for _ in range(2):
            run_microbatch()
        barrier.wait()
        end = time.perf_counter() + options.seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            run_microbatch()
            samples.append(time.perf_counter() - start)
    results.put(statistics.median(samples))


if __name__ == "__main__":
    main()
