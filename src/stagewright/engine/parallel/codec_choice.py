"""`codec = "auto"`: on the first batch, measure which codec pays off on each link.

    every worker: one micro-batch through the whole model ─► the activations and gradients at its cuts
    each link:    sender and receiver exchange the crossing tensors ─► bytes per second
    the sender:   error and time of each candidate ─► the cheapest one, or none ─► broadcast to all workers

A link is not compressed if no candidate with an acceptable error is faster than sending the tensors unchanged. Every
worker has the whole model at this point, before it frees the stages of other workers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from stagewright.codecs.cost import MAX_ERROR, CodecCost, cheapest
from stagewright.codecs.measure import measure_codec
from stagewright.codecs.name import AUTO
from stagewright.engine.batch.crossing_tensors import collect_crossing_tensors
from stagewright.engine.batch.splitter import BatchSplitter
from stagewright.engine.parallel.model import cut_indices
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.cpu_offload import offloaded
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch, Model

CANDIDATES = ("bf16", "block8", "block6", "block4", "hadamard8", "hadamard4")
ROUND_TRIPS = 4  # over a link; the first is not counted


def choose_codecs(plan: Plan, model: Model, graph: UnitGraph, context: WorkerContext, batch: Batch) -> Plan:
    """Replace every ``auto`` codec of a plan; every worker must call this, and all get the same plan."""
    cuts, workers = range(plan.num_stages - 1), plan.stage_workers
    names = {backward: [plan.codec_of(cut, backward=backward) for cut in cuts] for backward in (False, True)}
    if not any(AUTO in direction_names for direction_names in names.values()):
        return plan
    activity.begin("choose codecs")
    tensors = _collect_tensors(plan, model, graph, context, batch)
    for backward in (False, True):
        for cut in cuts:
            if names[backward][cut] != AUTO:
                continue
            sender, receiver = workers[cut + backward], workers[cut + (not backward)]
            codec = "none"
            has_peer = context.tensor == 0 or not context.mesh.tensor_degrees  # the first ones have each other
            if sender != receiver and context.pipeline in (sender, receiver) and has_peer:
                num_bytes = sum(tensor.nbytes for tensor in tensors[backward][cut])
                rate = _measure_link_rate(context, sender, receiver, max(1, num_bytes))
                if context.pipeline == sender and num_bytes:
                    codec = _choose_codec(tensors[backward][cut], rate, MAX_ERROR[backward])
            names[backward][cut] = _broadcast_name(codec, context.mesh.rank(0, 0, sender), context)
    return replace(plan, codec=tuple(names[False]), codec_backward=tuple(names[True]))


def _collect_tensors(
    plan: Plan, model: Model, graph: UnitGraph, context: WorkerContext, batch: Batch
) -> dict[bool, list[list[torch.Tensor]]]:
    """Collect the compressible tensors of one micro-batch at each cut, forward (key False) and backward (True)."""
    first = BatchSplitter(plan, model, graph).split(batch, context.torch_device, 0)[0]
    microbatch = Batch(args=first.args, kwargs=first.kwargs, target=first.target)
    loss = model.loss if plan.training else None
    with offloaded(model.module, context.torch_device):
        return collect_crossing_tensors(graph, cut_indices(graph, plan.cuts), microbatch, loss)


def _choose_codec(tensors: Sequence[torch.Tensor], rate: float, max_error: float) -> str:
    """Choose the cheapest codec for all tensors of a crossing."""
    costs = [CodecCost.combine([measure_codec(name, tensor, repeats=3) for tensor in tensors]) for name in CANDIDATES]
    cost = cheapest(costs, rate, max_error)
    return "none" if cost is None else cost.codec


def _measure_link_rate(context: WorkerContext, sender: int, receiver: int, num_bytes: int) -> float:
    """Measure bytes per second between two workers of this pipeline, including latency, for transfers of one size."""
    peer = context.pipeline_ranks[receiver if context.pipeline == sender else sender]
    group = context.link_groups[False, True]
    data = torch.zeros(num_bytes, dtype=torch.uint8, device=context.torch_device)
    times = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        if context.pipeline == sender:
            dist.send(data, dst=peer, group=group)
            dist.recv(data, src=peer, group=group)
        else:
            dist.recv(data, src=peer, group=group)
            dist.send(data, dst=peer, group=group)
        if data.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 2)
    return num_bytes / statistics.median(times[1:])


def _broadcast_name(name: str, source: int, context: WorkerContext) -> str:
    """Broadcast one worker's choice."""
    names = ("none", *CANDIDATES)
    index = torch.tensor([names.index(name)], device=context.torch_device)
    if context.mesh.num_workers > 1:
        dist.broadcast(index, src=source)
    return names[int(index)]
