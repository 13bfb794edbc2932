"""Steps of plans that others measured, forecast from their profiles of layers and links.

    git clone https://github.com/eth-easl/sailor
    python benchmarks/profiled_plans.py --data sailor/sailor          the table
    python benchmarks/profiled_plans.py --data sailor/sailor --fit    fit the constants again, on half of the plans

Sailor publishes 36 measured plans with DeepSpeed on GH200 and on mixed GPUs (Titan RTX, RTX 2080, RTX 3090), the time
of each layer by device, micro-batch and tensor ranks, and the bandwidth inside and between hosts. The forecast follows
what its copy of DeepSpeed does (sailor/deepspeed in the clone):

pipeline      each replica executes DeepSpeed's instructions in order (`tables/deepspeed.py`)
messages      each tensor rank sends its part of an activation (`PartitionedTensor`); all parts share the host's NICs
arrival       `reconstruct_tensor`: a tensor of zeros in host memory is uploaded, then tensor ranks all-gather the parts
gradients     a ring all-reduce after the last backward, as `engine.py` waits for all ranks first
optimizer     as profiled

Three constants are fitted, on half of the plans (by a hash of their names): the rate of uploads on each cluster, and
how much slower than a single message the all-reduce on GH200 is, from the column `red_grads`, not from steps.

Two plans are left out, because their files contradict themselves: one lists 26 of 34 layers and states the time of a
gradient all-reduce as its step; another repeats all measurements of a plan with twice as many devices.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from record import write_record
from tables.deepspeed import Stage, pipeline_s

ITEM_BYTES = 4  # float32
ZONE = "us-central1-a"  # all plans name this one, whatever the cluster
LENGTH = 2048
BUFFER_BYTES = 4 << 20  # NCCL_BUFFSIZE's default: smaller messages do not wait for their receive
# Folder of the plans, name of the model in the profiles, width.
MODELS = (("clariden/OPT-350", "OPT-350", 1024), ("clariden/GPT-NEO", "GPT-Neo-2.7", 2560), ("mit", "OPT-350", 1024))
CONTRADICTORY = ("clariden/GPT-NEO/N4/plan_config_N4_D4.json", "mit/N3/plan_config_N3_D1.json")
# States the step of another plan as its all-reduce.
WRONG_ALLREDUCE = ("clariden/OPT-350/N4/plan_config_N4_D4.json",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What profiles do not hold; fitted on half of the plans (`--fit`)."""

    gh200_upload: float = 12.9e9
    """Bytes per second at which a process zeroes host memory and uploads it to a GH200."""
    mixed_upload: float = 0.35e9
    """The same on the hosts with mixed GPUs, whose eight processes share the memory and PCIe."""
    gh200_allreduce: float = 2.4
    """Time of a gradient all-reduce on GH200 over that of a ring at the rate of single messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """Published profiles of layers and links."""

    layers: dict[str, Any]
    """Model, device, micro-batch, tensor ranks, layer: seconds of forward, backward and optimizer."""
    parameters: dict[str, Any]
    """Model, tensor ranks, layer: parameters."""
    links: dict[str, Any]
    """Device, senders, zone, device, receivers: coefficients, and bytes per second of all senders together."""
    intra: dict[str, Any]
    """Device, devices: coefficients, and bytes per second of half of them that send to the other half."""

    def link_rate(self, sender: str, receiver: str, ranks: int) -> float:
        """Return the bytes per second of all senders together."""
        if {sender, receiver} == {"Titan-RTX", "RTX-2080"}:
            # Entries for 1 and 8 senders repeat those of another pair of hosts to the last digit; 2 and 4 are measured.
            sender, receiver, ranks = "Titan-RTX", "RTX-2080", 4
        return float(self.links[sender][str(ranks)][ZONE][receiver][str(ranks)][1])

    def gather_s(self, device: str, ranks: int, num_bytes: float) -> float:
        """Return an all-gather over the tensor ranks of a host, as a ring."""
        if ranks == 1:
            return 0.0
        return float(num_bytes * (ranks - 1) / ranks / (self.intra[device][str(ranks)][1] / (ranks / 2)))

    def layer_s(self, plan: MeasuredPlan, device: str, layer: int, part: int) -> float:
        """Return the time of forward (0), backward (1) or the optimizer (2).

        A layer takes no longer than with a larger micro-batch; where its profile says so, that is noise.
        """
        profiled = self.layers[plan.model][device]
        tables = [table.get(str(plan.tensor)) for size, table in profiled.items() if int(size) >= plan.microbatch]
        return float(min(table[str(layer)][part] for table in tables if table is not None))


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
    allreduce_s: float | None = None
    """Measured time of the gradient all-reduce."""

    @property
    def fitted(self) -> bool:
        """Whether constants were fitted on this plan."""
        return zlib.crc32(self.name.encode()) % 2 == 0

    @property
    def on_gh200(self) -> bool:
        return self.devices[0][0] == "GH-96"


def read_profiles(folder: Path) -> Profiles:
    def load(path: str) -> Any:
        return json.loads((folder / path).read_text(encoding="utf-8"))

    return Profiles(
        layers=load("Planner/simulations/profiles_tmp.json"),
        parameters=load("Planner/llm_info.json"),
        links=load("providers/multizone_bandwidths_het.json")[ZONE],
        intra=load("providers/intra_node_bandwidths.json"),
    )


def read_plans(folder: Path) -> Iterator[MeasuredPlan]:
    plans = folder / "Planner/simulations/validation"
    for subfolder, model, width in MODELS:
        for path in sorted((plans / subfolder).rglob("*.json")):
            row = json.loads(path.read_text(encoding="utf-8"))
            name = str(path.relative_to(plans))
            (pipeline,) = row["pipeline_list"]
            yield MeasuredPlan(
                name=name,
                model=model,
                width=width,
                microbatch=row["mbs"],
                microbatches=math.ceil(row["gbs"] / (row["mbs"] * pipeline["dp"][0])),
                tensor=pipeline["tmp_per_stage"][0][0][1],
                layers=tuple(tuple(stage) for stage in pipeline["layers_per_stage"]),
                devices=tuple(tuple(group[0][0][0] for group in stage) for stage in pipeline["tmp_per_stage"]),
                step_s=row["real"],
                allreduce_s=None if name in WRONG_ALLREDUCE else row["red_grads"],
            )


def forecast_s(plan: MeasuredPlan, profiles: Profiles, constants: Constants) -> float:
    """Return the step time of a plan."""
    replicas = range(len(plan.devices[0]))
    slower = constants.gh200_allreduce if plan.on_gh200 else 1.0
    return max(_replica_s(plan, profiles, constants, replica) for replica in replicas) + slower * ring_s(plan, profiles)


def _replica_s(plan: MeasuredPlan, profiles: Profiles, constants: Constants, replica: int) -> float:
    """Return the time of one replica's pipeline, with its optimizer."""
    size = plan.microbatch * LENGTH * plan.width * ITEM_BYTES
    upload = constants.gh200_upload if plan.on_gh200 else constants.mixed_upload
    devices = [stage[replica] for stage in plan.devices]
    last = len(devices) - 1
    stages, updates = [], []
    for index, (device, layers) in enumerate(zip(devices, plan.layers, strict=True)):
        forward, backward, update = (
            sum(profiles.layer_s(plan, device, layer, part) for layer in layers) for part in range(3)
        )
        arrival = size / upload + profiles.gather_s(device, plan.tensor, size)
        rate = profiles.link_rate(device, devices[index + 1], plan.tensor) if index < last else math.inf
        updates.append(update / len(layers))  # each layer states the optimizer of a whole rank
        stages.append(
            Stage(
                forward_s=forward + (arrival if index > 0 else 0.0),
                backward_s=backward + (arrival if index < last else 0.0),
                message_s=size / rate,
            )
        )
    return pipeline_s(stages, plan.microbatches, buffered=size / plan.tensor <= BUFFER_BYTES) + max(updates)


def ring_s(plan: MeasuredPlan, profiles: Profiles) -> float:
    """Return the ring all-reduce of the largest stage's gradients, over its slowest link."""
    return max(_stage_ring_s(plan, profiles, stage) for stage in range(len(plan.layers)))


def _stage_ring_s(plan: MeasuredPlan, profiles: Profiles, stage: int) -> float:
    devices = plan.devices[stage]
    count = len(devices)
    if count == 1:
        return 0.0
    pairs = zip(devices, (*devices[1:], devices[0]), strict=True)
    rate = min(profiles.link_rate(sender, receiver, plan.tensor) for sender, receiver in pairs)
    table = profiles.parameters[plan.model]["1"]
    size = sum(table[str(layer)]["params_floats"] for layer in plan.layers[stage]) * ITEM_BYTES
    return float(2 * (count - 1) / count * size / rate)


def errors(plans: Iterable[MeasuredPlan], profiles: Profiles, constants: Constants) -> list[float]:
    return [forecast_s(plan, profiles, constants) / plan.step_s - 1 for plan in plans]


def fit(plans: Sequence[MeasuredPlan], profiles: Profiles) -> Constants:
    """Return the constants with the lowest mean error of half of the plans."""
    halves = [plan for plan in plans if plan.fitted]
    gh200 = [plan for plan in halves if plan.on_gh200]
    mixed = [plan for plan in halves if not plan.on_gh200]
    rings = [(ring_s(plan, profiles), plan.allreduce_s) for plan in gh200 if plan.allreduce_s is not None]
    slower = sum(ring * real for ring, real in rings) / sum(ring * ring for ring, _ in rings)
    found = Constants(gh200_upload=math.inf, mixed_upload=math.inf, gh200_allreduce=round(slower, 1))

    def size(name: str, rate: float, members: Sequence[MeasuredPlan]) -> float:
        tried = replace(found, **{name: rate})
        return statistics.mean(abs(error) for error in errors(members, profiles, tried))

    for name, members in (("gh200_upload", gh200), ("mixed_upload", mixed)):
        rates = [round(1.1**power * 1e8, -7) for power in range(70)]
        found = replace(found, **{name: min(rates, key=lambda rate: size(name, rate, members))})
    return found


def summary(name: str, sizes: Sequence[float]) -> str:
    return (
        f"{name}: {len(sizes)} plans, mean error {100 * statistics.mean(map(abs, sizes)):.1f} %, median "
        f"{100 * statistics.median(map(abs, sizes)):.1f} %, worst {100 * max(sizes, key=abs):+.0f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder `sailor` of a clone of eth-easl/sailor")
    parser.add_argument("--fit", action="store_true", help="fit the constants again, on half of the plans")
    parser.add_argument(
        "--earlier", type=Path, help="that folder at commit 37ded10, with earlier measurements of OPT's plans on GH200"
    )
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    profiles = read_profiles(options.data)
    plans = [plan for plan in read_plans(options.data) if plan.name not in CONTRADICTORY]
    constants = fit(plans, profiles) if options.fit else Constants()
    print(constants)
    rows = []
    for plan in plans:
        seconds = forecast_s(plan, profiles, constants)
        rows.append({"plan": plan.name, "measured_s": plan.step_s, "forecast_s": seconds, "fitted": plan.fitted})
        error = 100 * (seconds / plan.step_s - 1)
        print(f"{plan.name:48} {plan.step_s:9.3f} {seconds:9.3f} s {error:+6.1f} % {'fitted' * plan.fitted}")
    for name, members in (
        ("all", plans),
        ("fitted", [plan for plan in plans if plan.fitted]),
        ("others", [plan for plan in plans if not plan.fitted]),
    ):
        print(summary(name, errors(members, profiles, constants)))
    if options.earlier is not None:
        compare_measurements(plans, list(read_plans(options.earlier)), profiles, constants)
    if options.output is not None:
        write_record(options.output, {"rows": rows})


def compare_measurements(
    plans: Sequence[MeasuredPlan], earlier: Sequence[MeasuredPlan], profiles: Profiles, constants: Constants
) -> None:
    """Print how far two measurements of the same plans are apart, and the error against their mean."""
    before = {plan.name: plan.step_s for plan in earlier if plan.on_gh200 and plan.model == "OPT-350"}
    twice = [plan for plan in plans if plan.name in before]
    print(summary("earlier measurement", [before[plan.name] / plan.step_s - 1 for plan in twice]))
    means = [replace(plan, step_s=(plan.step_s + before.get(plan.name, plan.step_s)) / 2) for plan in plans]
    print(summary("all, mean of both measurements", errors(means, profiles, constants)))


if __name__ == "__main__":
    main()
