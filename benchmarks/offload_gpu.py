"""Keep, recompute or offload activations: peak memory and step time of each policy, and of the solver's mix.

    python benchmarks/offload_gpu.py --output docs/measured/offload_h200.json     one GPU, about a minute
    python benchmarks/offload_gpu.py --tiny                                       on a CPU: no rate of a link, no gain

A Llama of 16 layers of width 1024, sequences of 1024 tokens in bfloat16, AdamW. Uniform policies treat every block
alike: `keep`, `recompute`, `attention`, `offload`. A limit lies between the peaks of `recompute` and `keep` (`--share`
of the way); the solver mixes policies by block to fit. Its throughput is compared with that of the fastest uniform
policy whose measured peak is within the limit. Each policy passes the parity check first. Exits with code 3 if one does
not, if the mix exceeds its limit, or if it is less than 1.15 times as fast.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.distributed as dist

from record import write_record
from stagewright.cluster.cluster import Cluster, DeviceGroup, Link, Links
from stagewright.cluster.device import Device
from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parallel.optimizer import make_optimizer
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.engine.worker.context import BACKENDS, make_context
from stagewright.machine.host_link import measure_host_link
from stagewright.planner.costs.measure import ModelCosts, measure_model
from stagewright.planner.forecast import prepare_plan
from stagewright.planner.search.by_unit import recompute_units
from stagewright.planner.search.candidates import CandidateBuilder
from stagewright.quantity import format_bytes
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.spec.activation_checkpointing import describe_offload, describe_recompute
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.zoo.model import Batch, Model

NEEDED_RATIO = 1.15
MAX_SOLUTIONS = 3
"""Mixes that are solved for a limit, each with what the one before exceeded it by."""
SIZES = {"layers": 16, "width": 1024, "length": 1024, "vocabulary": 8192}
TINY = {"layers": 4, "width": 64, "length": 32, "vocabulary": 100}


def llama() -> Model:
    """Build the model."""
    return make_llama(**SIZES)


def tiny_llama() -> Model:
    """Build the model of `--tiny`."""
    return make_llama(**TINY)


def make_llama(layers: int, width: int, length: int, vocabulary: int) -> Model:
    """Build a Llama that computes its loss, with sequences of random tokens."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64 or 1,
        num_key_value_heads=width // 64 or 1,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
    )

    def example(count: int) -> Batch:
        ids = torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))
        return Batch(kwargs={"input_ids": ids, "labels": ids})

    return Model(
        name="llama",
        module=transformers.LlamaForCausalLM(config),
        args=(),
        kwargs=example(2).kwargs,
        loss=lambda output, target: output["loss"],
        batch_size=2,
        make_example=example,
    )


@dataclass(frozen=True, slots=True)
class OneSize:
    """A cost source that knows one micro-batch size."""

    costs: ModelCosts

    def model(self, size: int, tensor: int) -> ModelCosts:
        return self.costs


def main() -> int:
    """Measure all policies and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--share", type=float, nargs="+", default=[0.75, 0.5], help="where limits lie")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        print("skipped: activations are offloaded from a GPU, and torch finds none here; --tiny runs on a CPU")
        return 0
    name = "cpu" if options.tiny else "cuda:0"
    device = Device.parse(name)
    dist.init_process_group(BACKENDS[device.kind], store=dist.HashStore(), rank=0, world_size=1)
    base = Plan(
        model=ModelSpec(name=f"offload_gpu:{'tiny_llama' if options.tiny else 'llama'}"),
        batch=2 if options.tiny else options.batch,
        precision="float32" if options.tiny else "bf16",
        devices=(name,),
        steps=options.steps,
        warmup=2,
    )
    link = measure_host_link(device.torch_device()) or Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    print(f"copies to and from the host: {link.bandwidth_bytes_per_s / 1e9:.1f} GB/s", flush=True)
    cluster = Cluster(devices=(DeviceGroup(kind=device.kind, count=1),), links=Links(host=link))
    costs = timed("profile", lambda: measure_model(base, size=base.batch, repeats=3, cache=False))
    uniform = {
        "keep": base,
        "recompute": replace(base, recompute=tuple(unit.name for unit in costs.profile.units if unit.block)),
        "attention": replace(base, recompute="attention"),
        "offload": replace(base, offload=tuple(unit.name for unit in costs.profile.units if unit.block)),
    }
    rows = {policy: measure(policy, plan, costs, cluster) for policy, plan in uniform.items()}
    mixes = [measure_mix(share, base, rows, costs, cluster) for share in options.share]
    equal = all(row["equal"] for row in (*rows.values(), *mixes))
    if options.output is not None:
        record = {"host_bytes_per_s": link.bandwidth_bytes_per_s, "batch": base.batch, **SIZES}
        write_record(options.output, {**record, "policies": rows, "mixes": mixes})
        print(f"wrote {options.output}")
    dist.destroy_process_group()
    if options.tiny:
        return 0 if equal else 3
    fits = all(mix["peak_bytes"] <= mix["limit_bytes"] for mix in mixes)
    return 0 if equal and fits and max(mix["ratio"] for mix in mixes) >= NEEDED_RATIO else 3


def measure_mix(
    share: float, base: Plan, rows: dict[str, dict[str, Any]], costs: ModelCosts, cluster: Cluster
) -> dict[str, Any]:
    """Solve and measure the mix under a limit, and compare it with the best uniform policy that is within it."""
    low, high = rows["recompute"]["peak_bytes"], rows["keep"]["peak_bytes"]
    limit = int(low + share * (high - low))
    builder = CandidateBuilder(OneSize(costs), cluster, EngineOverheads(), "pipeline", 1.0)  # type: ignore[arg-type]
    # A forecast of the peak is not exact: it is corrected by peaks that are known.
    keep = prepare_plan(base, costs, cluster).forecast().peak_memory_bytes
    allowed = limit - (high - keep)
    for _ in range(MAX_SOLUTIONS):
        found = timed("solve", lambda: recompute_units(builder, replace(base, memory_bytes=allowed)))  # noqa: B023
        if found is None:
            raise SystemExit(f"nothing fits in {format_bytes(limit)}; use a larger --share")
        row = measure(f"mix at {share:g}", replace(found.plan, memory_bytes=None), costs, cluster)
        if row["peak_bytes"] <= limit:
            break
        allowed -= row["peak_bytes"] - limit
    fitting = {name: entry["step_s"] for name, entry in rows.items() if entry["peak_bytes"] <= limit}
    best = min(fitting, key=lambda name: fitting[name])
    ratio = fitting[best] / row["step_s"]
    print(
        f"limit {format_bytes(limit)}: the mix is {ratio:.2f} x as fast as {best}, "
        f"and has a peak of {format_bytes(row['peak_bytes'])}",
        flush=True,
    )
    return {**row, "limit_bytes": limit, "best_uniform": best, "ratio": ratio}


def measure(policy: str, plan: Plan, costs: ModelCosts, cluster: Cluster) -> dict[str, Any]:
    """Measure a plan, and free its memory."""
    row = run_policy(policy, plan, costs, cluster)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def run_policy(policy: str, plan: Plan, costs: ModelCosts, cluster: Cluster) -> dict[str, Any]:
    """Check the parity of a plan, then time its steps and read the peak of memory."""
    forecast = prepare_plan(plan, costs, cluster).forecast()
    context = make_context(Mesh(), 0, Device.parse(plan.devices[0]))
    device = context.torch_device
    model = load_model(plan, context)
    graph = capture_for(plan, model)
    baseline = baseline_of(plan, model, graph, context)
    runner = StepRunner(plan, model, context, graph)
    batch = Batch(args=model.args, kwargs=model.kwargs)
    report = check_parity(runner, batch, baseline)
    del baseline
    gc.collect()
    optimizer = make_optimizer(plan.optimizer, list(runner.part.optimizer_parameters().values()))
    runner.memory.follow_optimizer(optimizer)

    def step() -> float:
        start = time.perf_counter()
        runner.part.zero_gradients()
        runner.memory.update()
        runner.train_step(batch)
        runner.optimizer_step(optimizer)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(plan.warmup):
        step()
    runner.memory.reset_peak()
    seconds = [step() for _ in range(plan.steps)]
    if device.type == "cpu":  # tensors are counted there, which takes time
        with runner.memory.tracking():
            step()
    peak_bytes = runner.memory.report().peak_memory_bytes
    row = {
        "policy": policy,
        "recompute": describe_recompute(plan),
        "offload": describe_offload(plan),
        "step_s": statistics.median(seconds),
        "peak_bytes": peak_bytes,
        "forecast_step_s": forecast.step_s,
        "forecast_peak_bytes": forecast.peak_memory_bytes,
        "equal": report.equal,
        "error": report.max_error,
        "tolerance": report.tolerance,
    }
    print(
        f"{policy:12} step {row['step_s'] * 1e3:7.1f} ms (forecast {forecast.step_s * 1e3:.1f}), "
        f"peak {format_bytes(peak_bytes)} (forecast {format_bytes(forecast.peak_memory_bytes)}), "
        f"recompute {row['recompute']}, offload {row['offload']}, "
        f"{'equal' if report.equal else f'DIFFERENT: {report.worst}'} ({report.max_error:.1e})",
        flush=True,
    )
    return row


def timed(what: str, work: Callable[[], Any]) -> Any:
    """Run some work, and print how long it takes."""
    start = time.perf_counter()
    result = work()
    print(f"{what}: {time.perf_counter() - start:.1f} s", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
