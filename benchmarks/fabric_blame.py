"""Accuracy of the diagnosis: seeded lab networks with a slow link, a lossy link, a late host, or none. Needs root.

    python benchmarks/fabric_blame.py [--trials 100] [--first 0] [--output FILE]

Each seed draws a network of 4 hosts, a fault, its host and its degree, creates that lab, sends the gradients of
mlp-mnist and diagnoses. A diagnosis is right if both kind and host are.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from record import write_record
from stagewright.fabric.lab.namespaces import open_lab
from stagewright.fabric.lab.network import LabNetwork
from stagewright.fabric.ranks.coordinator import Coordinator, RankLocation, Settings
from stagewright.fabric.results.diagnosis import diagnose
from stagewright.fabric.traffic.workload import from_sizes

KINDS = ("slow-link", "lossy-link", "late-host", "none")
HOSTS = 4
SIZES = [2600, 33024, 131584, 803840]


def draw(seed: int) -> dict[str, Any]:
    """Draw the fault of a seed."""
    generator = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    return {
        "seed": seed,
        "kind": kind,
        "host": int(generator.integers(HOSTS)) if kind != "none" else None,
        "rate": str(generator.choice(["500mbit", "1gbit"])),
        "slow": str(generator.choice(["50mbit", "100mbit", "200mbit"])),
        "loss": str(generator.choice(["1%", "2%", "5%"])),
        "late_s": float(generator.choice([0.005, 0.010, 0.020])),
    }


def trial(case: dict[str, Any], num_trials: int) -> dict[str, Any]:
    """Create the lab, run, and diagnose."""
    kind, host = case["kind"], case["host"]
    network = LabNetwork.parse(
        hosts=HOSTS,
        rate=case["rate"],
        slow_links=[f"{host}:{case['slow']}"] if kind == "slow-link" else [],
        lossy_links=[f"{host}:{case['loss']}"] if kind == "lossy-link" else [],
    )
    workload = from_sizes(SIZES, HOSTS, trials=num_trials, seed=case["seed"], time_limit_s=20.0)
    if kind == "late-host":
        workload = workload.with_delays({host: case["late_s"]})
    begin = time.monotonic()
    with open_lab(network) as lab:
        locations = [
            RankLocation(name=f"host {host}", host=network.address(host), namespace=lab.namespace(host))
            for host in range(HOSTS)
        ]
        with Coordinator(replace(workload), locations, Settings(steps=False)) as coordinator:
            measured = coordinator.run()
    diagnosis = diagnose(measured.trials, measured.pairs, measured.links, same_host=False)
    return {
        **case,
        "found": diagnosis.kind,
        "found_host": diagnosis.rank,
        "right": (diagnosis.kind, diagnosis.rank) == (kind, host),
        "sentence": diagnosis.sentence,
        "evidence": diagnosis.evidence,
        "trials": measured.trials.num_trials,
        "error": measured.error,
        "wall_s": time.monotonic() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--collectives", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = []
    for seed in range(options.first, options.first + options.trials):
        result = trial(draw(seed), options.collectives)
        results.append(result)
        wrong = f"   WRONG: {result['found']} {result['found_host']}: {result['evidence']} {result['error']}"
        text = f"{seed:4d} {result['kind']:10s} host {result['host']}  {result['wall_s']:.1f} s"
        print(text if result["right"] else text + wrong, flush=True)
    print(f"right: {sum(result['right'] for result in results)} of {len(results)}")
    for kind in KINDS:
        of_kind = [result for result in results if result["kind"] == kind]
        print(f"  {kind:10s} {sum(result['right'] for result in of_kind)} of {len(of_kind)}")
    if options.output:
        write_record(options.output, {"networks": results})


if __name__ == "__main__":
    main()
