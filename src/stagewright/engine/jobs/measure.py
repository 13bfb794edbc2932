"""What every worker of a measured run does: prove the plan equal to serial, time it, write down what was seen.

    load, capture ─► worker 0: serial reference ─► this worker's part ─► a step, compared, twice ─► one, memory counted
        ─► warm-up ─► timed steps ─► workers/N/result.json, metrics.jsonl, events.parquet, memory.parquet, clock.json

The launcher merges the workers' results (``merge_results``).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from stagewright.engine.batch.batch_norm import refuse_synchronised, tracked_norms
from stagewright.engine.batch.splitter import Dealer
from stagewright.engine.parallel.codec_choice import with_chosen_codecs
from stagewright.engine.parallel.replica import Replica, capture_for, cut_indices
from stagewright.engine.parallel.resolve import agreed_cuts
from stagewright.engine.parity.comparison import (
    TOLERANCES,
    Equality,
    Reference,
    compare_with,
    full_precision,
    make_reference,
    statistics_of,
    sways_of,
)
from stagewright.engine.parity.optimizer_step import compare_updates
from stagewright.engine.parity.relative_error import same
from stagewright.engine.parity.whole_batch import WholeBatch, try_whole_batch
from stagewright.engine.pipeline.executor import StepOutcome
from stagewright.engine.pipeline.link_codec import fake_links
from stagewright.engine.worker.clock import write_clock
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.memory import held_bytes
from stagewright.engine.worker.recorder import recorder
from stagewright.files.atomic import save_text
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.cpu_offload import visiting
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.bubble_bound import bubble_bound
from stagewright.spec.plan import Mesh, OptimizerSpec, Plan
from stagewright.zoo.model import Batch, Model

__all__ = ["load_model", "make_optimizer", "merge_results", "prove", "run_job", "serial_reference", "whole_batch"]

ROUNDING = {"float32": 2**-21, "bfloat16": 2**-9}  # of the largest value: what a unit's own rounding moves it
NUDGE = 0.1  # of the tolerance: what another order of additions moves at most; seen: 0.07


def run_job(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """Prove and measure a plan; this worker's part."""
    write_clock(context, run_folder.worker(context.rank))
    activity.begin("load model")
    model = load_model(plan, context)
    refuse_synchronised(model.module, plan.mesh.num_workers)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    activity.begin("capture")
    graph = capture_for(plan, model)
    if not plan.cuts and plan.num_stages > 1:
        activity.begin("split")
        plan = dataclasses.replace(plan, cuts=agreed_cuts(plan, model, graph, context))
        if context.rank == 0:
            run_folder.write_plan(plan)
    chosen = with_chosen_codecs(plan, model, graph, context, batch)
    if chosen is not plan:
        plan = chosen
        if context.rank == 0:
            run_folder.write_plan(plan)
    reference, about_loss = None, {}
    if context.rank == 0:
        reference = serial_reference(plan, model, graph, context)
        whole = whole_batch(plan, model, graph, context, reference)
        about_loss = {
            "loss_source": reference.loss_source,
            "whole_batch": None if whole is None else whole.to_dict(),
        }
    activity.begin("build stages")
    replica = Replica(plan, model, context, graph)
    with replica.memory.refusals():
        equality = prove(replica, batch, reference)
    del reference
    # What was built stays: the collector need not look through it again and again while steps are timed.
    gc.collect()
    gc.freeze()
    result: dict[str, Any] = {"worker": context.rank, "equality": equality.to_dict(), **about_loss}
    with run_folder.worker(context.rank) as folder, replica.memory.refusals():
        measure = _measure_training if plan.training else _measure_inference
        result |= measure(replica, batch, folder)
        folder.write_events(recorder.rows())
        folder.write_memory(replica.memory.rows)
        save_text(json.dumps(result, indent=2) + "\n", folder.path / "result.json")


def load_model(plan: Plan, context: WorkerContext) -> Model:
    """The plan's model with a batch of its size, in the mode that is run, on this worker's device."""
    model = plan.model.load(batch=plan.batch, dtype=plan.dtype)
    model.module.train(plan.training)
    return model.to(context.torch_device, plan.memory_bytes)


def make_optimizer(spec: OptimizerSpec, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The plan's optimiser for this worker's parameters."""
    rate, decay = spec.learning_rate, spec.weight_decay
    if spec.name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=spec.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=rate, weight_decay=decay)


def serial_reference(plan: Plan, model: Model, graph: UnitGraph, context: WorkerContext) -> Reference:
    """What one step of the plain model gives on this worker's device, alone, over the plan's micro-batches."""
    activity.begin("serial reference")
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    links, cuts = fake_links(plan), cut_indices(graph, plan.cuts)
    make = functools.partial(
        make_reference,
        graph,
        Dealer(plan, model, graph).parts(batch, context.torch_device),
        model.loss,
        training=plan.training,
        seed=plan.seed,
        device=context.torch_device,
        deferred=plan.batch_norm == "deferred",
        plain_attention=plan.mesh.tensor > 1,
    )
    with visiting(model.module, context.torch_device), full_precision():
        found = make(cuts=cuts, links=links)
        moved = _moved(plan, model, graph, links, cuts)
        if moved is not None:
            found.sways = sways_of(make(**moved), found)
    return found


def _moved(
    plan: Plan, model: Model, graph: UnitGraph, links: Sequence[tuple[str, str]], cuts: Sequence[int]
) -> dict[str, Any] | None:
    """Where serial is moved, and by how much, to see what rounding makes of it; None where that is nothing."""
    coded = plan.mesh.tensor > 1 and any(codec != "none" for link in links for codec in link)
    lost = plan.mesh.tensor > 1 and plan.dtype != "float32"
    normed = plan.training and plan.mesh.num_workers > 1 and bool(tracked_norms(model.module))
    nudge = NUDGE * TOLERANCES[plan.dtype] if coded and not lost else ROUNDING[plan.dtype]
    if lost or normed:
        by_cut, every = dict(zip(cuts, links, strict=True)), range(len(graph.calls) - 1)
        return {"cuts": every, "links": [by_cut.get(cut, ("none", "none")) for cut in every], "nudge": nudge}
    return {"cuts": cuts, "links": links, "nudge": nudge} if coded else None


def whole_batch(
    plan: Plan, model: Model, graph: UnitGraph, context: WorkerContext, reference: Reference
) -> WholeBatch | None:
    """The loss of the batch in one piece beside that of the plan's pieces; None where it is whole, or can't be told.

    A stand-in for a loss is not looked at: it knows nothing of samples.
    """
    place = context.torch_device
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    parts = Dealer(plan, model, graph).parts(batch, place)
    if len(parts) == 1 or reference.loss_source == "stand-in":
        return None
    activity.begin("loss of the whole batch")
    undivided = dataclasses.replace(plan, mesh=Mesh(), microbatches=1)
    (whole,) = Dealer(undivided, model, graph).parts(batch, place)
    coded = any(codec != "none" for link in fake_links(plan) for codec in link)
    with visiting(model.module, place), full_precision():
        return try_whole_batch(
            model.module,
            parts,
            whole,
            model.loss,
            known=None if coded else reference.loss,
            dtype=plan.dtype,
            device=place,
            memory_bytes=plan.memory_bytes,
        )


def prove(replica: Replica, batch: Batch, reference: Reference | None) -> Equality:
    """The same step some times, each compared with serial, the last with its optimiser, too; all is put back.

    What a step leaves behind (graphs, receives) could spoil the next; of replicas the third is the first with torch's
    own buckets. Inference is timed as a stream, so that one is compared, too.
    """
    plan, context = replica.plan, replica.context
    before = {name: value.clone() for name, value in replica.buffers().items()}

    def put_back() -> None:
        with torch.no_grad():
            for name, value in replica.buffers().items():
                value.copy_(before[name])
        replica.zero_gradients()
        replica.step_number = 0
        if replica.codecs is not None:
            replica.codecs.forget()

    def step() -> StepOutcome:
        with full_precision():
            return replica.train_step(batch, keep_outputs=True) if plan.training else replica.infer(batch)

    replica.step_number = 0
    if context.torch_device.type == "cuda" and plan.mesh.pipeline > 1:
        step()  # the first goes through the host: what is proven is what is run after it
        put_back()
    found = []
    # Of what changes in a forward, only statistics are replicas' common ones; of the rest, replica 0's count.
    common = statistics_of(replica.model.module) if context.data else None

    def compared(loss: float, outputs: Sequence[Any]) -> Equality:
        activity.begin("compare with serial")
        buffers = replica.buffers()
        return compare_with(
            reference,
            loss=loss,
            gradients=replica.full_gradients() if plan.training else {},
            buffers=buffers if common is None else {name: buffers[name] for name in buffers if name in common},
            outputs=_placed(replica, outputs),
            tolerance=TOLERANCES[plan.dtype],
            device=context.torch_device,
            trained=replica.trained() if plan.training else (),
        )

    has_buckets = plan.training and plan.mesh.data > 1 and plan.num_stages == 1 and not plan.shard
    for last in (False, False, True) if has_buckets else (False, True):
        outcome = step()
        loss = replica.total_loss(outcome)
        found.append(compared(loss, outcome.outputs))
        if last and plan.training:
            found[-1] = _with_updates(found[-1], replica, reference)
        remembers = not plan.training and any(
            not bool(same(value, before[name]).all()) for name, value in replica.buffers().items()
        )
        put_back()
    if not plan.training:
        # A second round of a model that remembers the first would be another one.
        rounds = 1 if _anywhere(remembers, context.torch_device) else 2
        with full_precision():
            results = [_on_host(one) for one in replica.stream(batch, rounds) if one is not None]
        size = len(results) // rounds
        for at in range(rounds):
            found.append(compared(loss, results[at * size : (at + 1) * size]))
        put_back()
    worst = max(found, key=lambda one: (not one.equal, one.loss, one.outputs, one.gradients, one.buffers))
    return dataclasses.replace(worst, updates=max(one.updates for one in found))


def _with_updates(found: Equality, replica: Replica, reference: Reference | None) -> Equality:
    """What a step was found to be, with what the optimiser makes of it."""
    activity.begin("compare the optimizer's step")
    updates, name = compare_updates(replica, functools.partial(make_optimizer, replica.plan.optimizer), reference)
    if updates <= found.tolerance:
        return dataclasses.replace(found, updates=updates)
    return dataclasses.replace(found, updates=updates, equal=False, worst=name if found.equal else found.worst)


def _anywhere(what: bool, device: torch.device) -> bool:
    """Whether it is so on any worker."""
    found = torch.tensor([float(what)], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def _on_host(result: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda one: one.cpu(), result)


def _placed(replica: Replica, outputs: Sequence[Any]) -> dict[int, list[torch.Tensor]]:
    """Results by their place among the micro-batches of all replicas."""
    place, batch = replica.context.torch_device, _example(replica)
    start = sum(len(replica.dealer.parts(batch, place, one)) for one in range(replica.context.data))
    return {
        start + at: [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for at, result in enumerate(outputs)
    }


def _example(replica: Replica) -> Batch:
    model = replica.model
    return Batch(args=model.args, kwargs=model.kwargs, target=model.target)


def _measure_training(replica: Replica, batch: Batch, folder: Any) -> dict[str, Any]:
    """Steps with an optimiser: one with memory counted, some to warm up, then those that are timed."""
    plan = replica.plan
    parameters = [one for one in replica.module.parameters() if one.requires_grad]
    optimizer = make_optimizer(plan.optimizer, parameters) if parameters else None

    def step(number: int) -> tuple[float, StepOutcome, float]:
        start = time.perf_counter()
        with recorder.step(number):
            replica.zero_gradients()
            replica.memory.update()
            outcome = replica.train_step(batch)
            replica.change_parameters(optimizer)
            loss = replica.total_loss(outcome)
        return time.perf_counter() - start, outcome, loss

    replica.memory.reset_peak()
    with replica.tracked():
        step(-2)
        if optimizer is not None:
            replica.memory.follow_optimizer(optimizer)
        replica.memory.begin_rows()
        step(-1)
    for number in range(plan.warmup):
        step(number)
    recorder.open(replica.context.torch_device)
    seconds, sent = [], {}
    _together(replica)
    for number in range(plan.steps):
        _forget_traffic(replica)
        took, outcome, loss = step(number)
        seconds.append(took)
        sent = outcome.sent_bytes
        folder.append_metrics(
            step=number,
            seconds=took,
            loss=loss,
            waited_s=outcome.waited_s,
            memory_bytes=held_bytes(replica.context.torch_device),
        )
    recorder.close()
    return {
        "step_s": seconds,
        "sent_bytes": {str(edge): count for edge, count in sent.items()},
        "collective_bytes": _collective_bytes(replica),
        "memory": replica.memory.report().to_dict(),
    }


def _measure_inference(replica: Replica, batch: Batch, folder: Any) -> dict[str, Any]:
    """A stream of batches that fills the pipeline once, some times over."""
    plan = replica.plan
    replica.memory.reset_peak()
    with replica.memory.tracking():
        replica.memory.begin_rows("loaded")
        with replica.memory.passing():
            for _ in replica.stream(batch, 2):  # a result is held while the next is computed
                pass
    for _ in replica.stream(batch, max(1, plan.warmup)):
        pass
    recorder.open(replica.context.torch_device)
    seconds, repeats = [], 3
    for number in range(repeats):
        _together(replica)
        start = time.perf_counter()
        with recorder.step(number, note=f"{plan.steps} batches"):
            for _ in replica.stream(batch, plan.steps):
                pass
            begun = recorder.now()
            _together(replica)
            recorder.add("collective", begun, note="together")
        seconds.append((time.perf_counter() - start) / plan.steps)
        held = held_bytes(replica.context.torch_device)
        folder.append_metrics(step=number, seconds=seconds[-1], batches=plan.steps, total=repeats, memory_bytes=held)
    recorder.close()
    memory = replica.memory.report().to_dict()  # of the stream, without the loss
    _forget_traffic(replica)
    sent = replica.infer(batch).sent_bytes
    return {
        "step_s": seconds,
        "sent_bytes": {str(edge): count for edge, count in sent.items()},
        "collective_bytes": _collective_bytes(replica),
        "memory": memory,
    }


def _forget_traffic(replica: Replica) -> None:
    """Count the bytes of the coming step alone."""
    for axis in (replica.tensor_axis, replica.data_axis):
        if axis is not None:
            axis.traffic.reset()


def _collective_bytes(replica: Replica) -> dict[str, int]:
    """Bytes that this worker gave to the collectives of each axis, and of tied weights, in the last step."""
    axes = {"tensor": replica.tensor_axis, "data": replica.data_axis}
    found = {name: int(axis.traffic.payload_bytes) for name, axis in axes.items() if axis is not None}
    for name, num_bytes in replica.summed_bytes.items():
        if num_bytes:
            found[name] = found.get(name, 0) + num_bytes
    return found


def _together(replica: Replica) -> None:
    """Start at the same time."""
    if replica.context.torch_device.type == "cuda":
        torch.cuda.synchronize()
    if replica.plan.mesh.num_workers > 1:
        dist.barrier()


def merge_results(plan: Plan, run_folder: RunFolder) -> dict[str, Any]:
    """One result of a run, from what its workers wrote."""
    workers = [
        json.loads((run_folder.worker(rank).path / "result.json").read_text()) for rank in range(plan.mesh.num_workers)
    ]
    steps = [max(times) for times in zip(*(one["step_s"] for one in workers), strict=True)]
    median = statistics.median(steps)
    rates = sorted(plan.batch / one for one in steps)
    quarters = statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else [rates[0]] * 3
    links: dict[str, int] = {}
    for one in workers[: plan.mesh.pipeline]:
        for edge, count in one["sent_bytes"].items():
            links[edge] = links.get(edge, 0) + count
    return {
        "strategy": plan.mesh.strategy,
        "shard": plan.shard,
        "workers": plan.mesh.num_workers,
        "batch": plan.batch,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule if plan.mesh.pipeline > 1 else None,
        "stages": plan.num_stages,
        "cuts": list(plan.cuts),
        "training": plan.training,
        "samples_per_s": plan.batch / median,
        "samples_per_s_spread": quarters[2] - quarters[0],
        "latency_s": median,
        "equal": workers[0]["equality"]["equal"],
        "equality": workers[0]["equality"],
        "loss_source": workers[0]["loss_source"],
        "whole_batch": workers[0]["whole_batch"],
        "peak_memory_bytes": [one["memory"]["peak_memory_bytes"] for one in workers],
        "process_peak_bytes": [one["memory"]["process_peak_bytes"] for one in workers],
        "memory": [one["memory"]["peak"] for one in workers],
        "link_bytes": links,
        "collective_bytes": [one["collective_bytes"] for one in workers],
        "bound": bubble_bound(plan),
        "run": str(run_folder.path),
    }
