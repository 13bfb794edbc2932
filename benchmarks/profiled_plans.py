"""Steps of plans that others measured, forecast from their profiles of layers and links.

    git clone https://github.com/eth-easl/sailor
    python benchmarks/profiled_plans.py --data sailor/sailor

Sailor publishes 36 measured plans with DeepSpeed on GH200 and on mixed GPUs (Titan RTX, RTX 2080, RTX 3090), the time
of each layer by device, micro-batch and tensor ranks, and the bandwidth between hosts. The forecast puts them together
as the analytic one does its kernels: each replica is a pipeline of its own,

    T = Σ tᵢ + (m − 1) · max tᵢ + gradient all-reduce + optimizer

with messages between neighbors in tᵢ. All tensor ranks of a host send at once, at the measured rate of so many senders.
`--messages divided`: each tensor rank sends its part of an activation (DeepSpeed's default); `whole`: all of it;
`mixed`: whole on the GH200 and divided on the others, which was chosen with these times in view.

Two plans are left out, because their files contradict themselves: one lists 26 of 34 layers and states the time of a
gradient all-reduce as its step; another repeats all measurements of a plan with twice as many devices.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from record import write_record
from stagewright.analytic.pipeline import RankTime

ITEM_BYTES = 4  # float32
ZONE = "us-central1-a"  # all plans name this one, whatever the cluster
LENGTH = 2048
# Folder of the plans, name of the model in the profiles, width.
MODELS = (("clariden/OPT-350", "OPT-350", 1024), ("clariden/GPT-NEO", "GPT-Neo-2.7", 2560), ("mit", "OPT-350", 1024))
CONTRADICTORY = ("clariden/GPT-NEO/N4/plan_config_N4_D4.json", "mit/N3/plan_config_N3_D1.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """Published profiles of layers and links."""

    layers: dict[str, Any]
    """Model, device, micro-batch, tensor ranks, layer: seconds of forward, backward and optimizer."""
    parameters: dict[str, Any]
    """Model, tensor ranks, layer: parameters."""
    links: dict[str, Any]
    """Device, senders, zone, device, receivers: coefficients, and bytes per second of all senders together."""

    def link_rate(self, sender: str, receiver: str, ranks: int) -> float:
        return float(self.links[sender][str(ranks)][ZONE][receiver][str(ranks)][1])


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """One plan and its measured step."""

    name: str
    model: str
    width: int
    microbatch: int
    microbatches: int
    tensor: int
    layers: tuple[tuple[int, ...], ...]
    """Layers of each stage."""
    devices: tuple[tuple[str, ...], ...]
    """Device of each stage and replica."""
    step_s: float


def read_profiles(folder: Path) -> Profiles:
    def load(path: str) -> Any:
        return json.loads((folder / path).read_text(encoding="utf-8"))

    return Profiles(
        layers=load("Planner/simulations/profiles_tmp.json"),
        parameters=load("Planner/llm_info.json"),
        links=load("providers/multizone_bandwidths_het.json")[ZONE],
    )


def read_plans(folder: Path) -> Iterator[MeasuredPlan]:
    plans = folder / "Planner/simulations/validation"
    for subfolder, model, width in MODELS:
        for path in sorted((plans / subfolder).rglob("*.json")):
            row = json.loads(path.read_text(encoding="utf-8"))
            (pipeline,) = row["pipeline_list"]
            yield MeasuredPlan(
                name=str(path.relative_to(plans)),
                model=model,
                width=width,
                microbatch=row["mbs"],
                microbatches=math.ceil(row["gbs"] / (row["mbs"] * pipeline["dp"][0])),
                tensor=pipeline["tmp_per_stage"][0][0][1],
                layers=tuple(tuple(stage) for stage in pipeline["layers_per_stage"]),
                devices=tuple(tuple(group[0][0][0] for group in stage) for stage in pipeline["tmp_per_stage"]),
                step_s=row["real"],
            )


def forecast_s(plan: MeasuredPlan, profiles: Profiles, *, divided: bool) -> float:
    """Return the step time of a plan."""
    replicas = len(plan.devices[0])
    pipelines = [_replica_s(plan, profiles, replica, divided=divided) for replica in range(replicas)]
    return max(pipelines) + max(_gradient_s(plan, profiles, stage) for stage in range(len(plan.layers)))


def _replica_s(plan: MeasuredPlan, profiles: Profiles, replica: int, *, divided: bool) -> float:
    """Return the time of one replica's pipeline, with its optimizer."""
    sent_bytes = plan.microbatch * LENGTH * plan.width * ITEM_BYTES * (1 if divided else plan.tensor)
    devices = [stage[replica] for stage in plan.devices]
    hops = [
        2 * sent_bytes / profiles.link_rate(devices[stage], devices[stage + 1], plan.tensor)
        for stage in range(len(devices) - 1)
    ]
    times, updates = [], []
    for stage, (device, layers) in enumerate(zip(devices, plan.layers, strict=True)):
        table = profiles.layers[plan.model][device][str(plan.microbatch)][str(plan.tensor)]
        forward, backward, update = (sum(table[str(layer)][part] for layer in layers) for part in range(3))
        updates.append(update / len(layers))  # each layer states the optimizer of a whole rank
        times.append(
            RankTime(
                forward_s=forward,
                backward_s=backward,
                compute_s=forward + backward,
                recompute_s=0.0,
                weight_s=0.0,
                collective_s=0.0,
                host_wait_s=0.0,
                message_s=max(hops[max(0, stage - 1) : stage + 1], default=0.0),
                hop_s=hops[stage] if stage < len(hops) else 0.0,
            )
        )
    slowest = max(time.total_s for time in times)
    return sum(time.fill_s for time in times) + (plan.microbatches - 1) * slowest + max(updates)


def _gradient_s(plan: MeasuredPlan, profiles: Profiles, stage: int) -> float:
    """Return the ring all-reduce of a stage's gradients, over its slowest link."""
    devices = plan.devices[stage]
    count = len(devices)
    if count == 1:
        return 0.0
    pairs = zip(devices, (*devices[1:], devices[0]), strict=True)
    rate = min(profiles.link_rate(sender, receiver, plan.tensor) for sender, receiver in pairs)
    table = profiles.parameters[plan.model]["1"]
    size = sum(table[str(layer)]["params_floats"] for layer in plan.layers[stage]) * ITEM_BYTES
    return float(2 * (count - 1) / count * size / rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder `sailor` of a clone of eth-easl/sailor")
    parser.add_argument("--messages", choices=("mixed", "divided", "whole"), default="mixed")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    profiles = read_profiles(options.data)
    rows = []
    for plan in read_plans(options.data):
        divided = plan.name.startswith("mit") if options.messages == "mixed" else options.messages == "divided"
        seconds = forecast_s(plan, profiles, divided=divided)
        used = plan.name not in CONTRADICTORY
        rows.append({"plan": plan.name, "measured_s": plan.step_s, "forecast_s": seconds, "used": used})
        error = f"{100 * (seconds / plan.step_s - 1):+6.1f} %" if used else "left out"
        print(f"{plan.name:48} {plan.step_s:9.3f} {seconds:9.3f} s {error}")
    errors = [row["forecast_s"] / row["measured_s"] - 1 for row in rows if row["used"]]
    sizes = [abs(error) for error in errors]
    print(
        f"{len(errors)} plans: mean error {100 * statistics.mean(sizes):.1f} %, median "
        f"{100 * statistics.median(sizes):.1f} %, worst {100 * max(errors, key=abs):+.0f} %"
    )
    if options.output is not None:
        write_record(options.output, {"messages": options.messages, "rows": rows})


if __name__ == "__main__":
    main()
