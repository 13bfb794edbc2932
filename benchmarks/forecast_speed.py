"""Speed of forecasts: one very long pipeline, many short ones, and a search for a model with analytic costs.

    python benchmarks/forecast_speed.py --json

Each figure is the median of several repeats after a first call, with its limit; the first call, which fills caches, is
reported too. Processor time is that of this process and does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from record import write_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", default="", help="JSON file")
    options = parser.parse_args()
    rows = [
        {"what": "1F1B, 1,024 stages × 4,096 micro-batches", "limit_s": 2.0, "call": long_pipeline()},
        {"what": "1,000 candidates of 8 stages × 64 micro-batches", "limit_s": 0.2, "call": many_candidates()},
        {"what": "search for 96 layers × 12288 on 4,096 GPUs", "limit_s": 10.0, "call": large_search()},
        {"what": "200 analytic forecasts of 175 billion parameters", "limit_s": 1.0, "call": many_forecasts()},
    ]
    results = []
    for row in rows:
        results.append({"what": row["what"], **measure(row["call"], options.repeats), "limit_s": row["limit_s"]})
    if options.output:
        write_record(options.output, {"rows": results})
    if options.json:
        print(json.dumps({"rows": results}, indent=2))
        return
    for result in results:
        print(
            f"{result['what']:50} {result['seconds']:8.3f} s, first {result['first_s']:.3f} s (processor "
            f"{result['processor_s']:.3f} and {result['first_processor_s']:.3f} s), limit {result['limit_s']:g} s"
        )


def measure(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return wall and processor time of the first call, and the medians of the others."""
    times_s = []
    for _ in range(repeats + 1):
        start, start_processor = time.perf_counter(), time.process_time()
        call()
        times_s.append((time.perf_counter() - start, time.process_time() - start_processor))
    (first_s, first_processor_s), *others = times_s
    seconds, processor_s = (statistics.median(values) for values in zip(*others, strict=True))
    return {"seconds": seconds, "processor_s": processor_s, "first_s": first_s, "first_processor_s": first_processor_s}


def long_pipeline() -> Callable[[], Any]:
    from stagewright.simulator.wavefront import simulate_wavefront

    generator = np.random.default_rng(0)
    stages, chunks = 1024, 4096
    times, links = generator.random((2, stages)), generator.random((2, stages - 1))
    return lambda: simulate_wavefront("1f1b", chunks, times[0], times[1], links[0], links[1])


def many_candidates() -> Callable[[], Any]:
    from stagewright.simulator.wavefront import simulate_wavefront

    generator = np.random.default_rng(0)
    times, links = generator.random((2, 8, 1000)), generator.random((2, 7, 1000))
    return lambda: simulate_wavefront("1f1b", 64, times[0], times[1], links[0], links[1])


def large_search() -> Callable[[], Any]:
    import stagewright as sw

    return lambda: sw.plan(
        "gpt3-175b", cluster="512x8xa100", batch=2048, precision="bf16", innermost="tensor", analytic=True
    )


def many_forecasts() -> Callable[[], Any]:
    import stagewright as sw

    def call() -> None:
        for count in range(200):
            text = f"dp={1 + count % 4},tp=8,pp=8,m={8 + count},sp"
            sw.forecast(text, model="gpt3-175b", cluster="32x8xa100", analytic=True)

    return call


if __name__ == "__main__":
    main()
