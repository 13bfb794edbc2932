"""`codec = "auto"`: on the first batch, what pays on each link, measured where it will run.

    every worker: one micro-batch through the whole model ─► the activations and gradients at its cuts
    each link:    sender and receiver send the crossing there and back ─► bytes a second
    the sender:   error and time of each candidate ─► the best one, or none ─► told to all workers

A link is left alone where no candidate with an allowed error is quicker than sending the tensors as they are. Every
worker has the whole model at this point, before it keeps its stages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from stagewright.codecs.choose import MOST_ERROR, Cost, best
from stagewright.codecs.measure import measure_codec
from stagewright.codecs.name import AUTO
from stagewright.engine.batch.splitter import Dealer
from stagewright.engine.parallel.replica import cut_indices
from stagewright.engine.pipeline.crossing_tensors import tensors_at
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.cpu_offload import visiting
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch, Model

__all__ = ["CANDIDATES", "crossing_tensors", "with_chosen_codecs"]

CANDIDATES = ("bf16", "block8", "block6", "block4", "hadamard8", "hadamard4")
ROUNDS = 4  # of sending there and back; the first is not counted


def with_chosen_codecs(plan: Plan, model: Model, graph: UnitGraph, context: WorkerContext, batch: Batch) -> Plan:
    """The plan with a codec's name wherever it says auto; every worker must call this, and all get the same."""
    cuts, workers = range(plan.num_stages - 1), plan.stage_workers
    names = {way: [plan.codec_of(cut, backward=way) for cut in cuts] for way in (False, True)}
    if not any(AUTO in listed for listed in names.values()):
        return plan
    activity.begin("choose codecs")
    tensors = crossing_tensors(plan, model, graph, context, batch)
    for way in (False, True):
        for cut in cuts:
            if names[way][cut] != AUTO:
                continue
            sender, receiver = (workers[cut + 1], workers[cut]) if way else (workers[cut], workers[cut + 1])
            chosen = "none"
            if sender != receiver and context.pipeline in (sender, receiver):
                size = sum(one.numel() * one.element_size() for one in tensors[way][cut])
                rate = _link_rate(context, sender, receiver, max(1, size))
                if context.pipeline == sender and size:
                    chosen = _choose(tensors[way][cut], rate, MOST_ERROR[way])
            names[way][cut] = _told(chosen, context.mesh.rank(0, 0, sender), context)
    return replace(plan, codec=tuple(names[False]), codec_backward=tuple(names[True]))


def crossing_tensors(
    plan: Plan, model: Model, graph: UnitGraph, context: WorkerContext, batch: Batch
) -> dict[bool, list[list[torch.Tensor]]]:
    """For both directions and each cut, the activations that codecs take, or their gradients, of one micro-batch."""
    part = Dealer(plan, model, graph).parts(batch, context.torch_device, 0)[0]
    one = Batch(args=part.args, kwargs=part.kwargs, target=part.target)
    with visiting(model.module, context.torch_device):
        return tensors_at(graph, cut_indices(graph, plan.cuts), one, model.loss if plan.training else None)


def _choose(tensors: Sequence[torch.Tensor], rate: float, most_error: float) -> str:
    """The best codec for all tensors of a crossing together."""
    costs = [Cost.together([measure_codec(name, one, repeats=3) for one in tensors]) for name in CANDIDATES]
    found = best(costs, rate, most_error)
    return "none" if found is None else found.codec


def _link_rate(context: WorkerContext, sender: int, receiver: int, size: int) -> float:
    """Bytes a second from one worker of this pipeline to another, latency included, for a message of that size."""
    peer = context.pipeline_ranks[receiver if context.pipeline == sender else sender]
    group = context.link_groups[False, True]
    data = torch.zeros(size, dtype=torch.uint8, device=context.torch_device)
    times = []
    for _ in range(ROUNDS):
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
    return size / statistics.median(times[1:])


def _told(name: str, source: int, context: WorkerContext) -> str:
    """One worker's choice, known to all."""
    names = ("none", *CANDIDATES)
    chosen = torch.tensor([names.index(name)], device=context.torch_device)
    if context.mesh.num_workers > 1:
        dist.broadcast(chosen, src=source)
    return names[int(chosen)]
