"""Is the right one blamed? Seeded lab trials over {slow link, lossy link, late host, none}. Needs root.

    python benchmarks/fabric_blame.py [--trials 100] [--first 0] [--output FILE]

Each seed draws a network of 4 hosts, what is wrong with which of them and by how much, makes that lab, sends the
gradients of mlp-mnist and judges. Right means: the right kind and the right host.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from record import write_record
from stagewright.fabric.lab.network import LabNetwork
from stagewright.fabric.lab.session import open_lab
from stagewright.fabric.ranks.coordinator import Coordinator, RankLocation, Settings
from stagewright.fabric.results.diagnosis import diagnose
from stagewright.fabric.traffic.workload import from_sizes

KINDS = ("slow-link", "lossy-link", "late-host", "none")
HOSTS = 4
SIZES = [2600, 33024, 131584, 803840]


def draw(seed: int) -> dict[str, Any]:
    """What is wrong in the lab of a seed."""
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
    """Make the lab, run, diagnose."""
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
        places = [
            RankLocation(name=f"host {at}", host=network.address(at), namespace=lab.namespace(at)) for at in range(HOSTS)
        ]
        with Coordinator(replace(workload), places, Settings(steps=False)) as coordinator:
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
    found = []
    for seed in range(options.first, options.first + options.trials):
        one = trial(draw(seed), options.collectives)
        found.append(one)
        mark = "" if one["right"] else f"   WRONG: {one['found']} {one['found_host']}: {one['evidence']} {one['error']}"
        print(f"{seed:4d} {one['kind']:10s} host {one['host']}  {one['wall_s']:.1f} s{mark}", flush=True)
    right = sum(one["right"] for one in found)
    print(f"right: {right} of {len(found)}")
    for kind in KINDS:
        own = [one for one in found if one["kind"] == kind]
        print(f"  {kind:10s} {sum(one['right'] for one in own)} of {len(own)}")
    if options.output:
        write_record(options.output, {"networks": found})


if __name__ == "__main__":
    main()
