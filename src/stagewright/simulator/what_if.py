"""What-if: the same plan with one cost removed, and the breakdown of its lost speed-up.

    serial / n ─► imbalance ─► bubble ─► repeated work ─► split backward ─► recomputation ─► transfer
               ─► collectives ─► contention ─► overhead ─► step
                                                        (pipeline only: micro-batching overhead, not repeated work)

Each arrow adds one cost and simulates again. A loss is the difference, so the losses add up exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagewright.cluster.cluster import FREE, Cluster, Link, Links
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.simulate import optimizer_s, step_seconds
from stagewright.simulator.topology import Topology

LOSSES: dict[str, str] = {
    "imbalance": "the bottleneck stage's worker computes longer than the mean of all workers",
    "bubble": "pipeline warm-up and drain: workers wait for the first micro-batch and are idle after the last",
    "repeated work": "work that every worker repeats: the optimizer step, layers that are not split; and the lower "
    "efficiency of smaller batches",
    "micro-batching overhead": "time of micro-batches beyond their share of the whole batch on one device; negative if "
    "they are faster",
    "split backward": "a backward split into input and weight gradients takes longer than an unsplit one",
    "recomputation": "activation checkpointing: forward is recomputed in backward",
    "transfer": "exposed P2P sends and receives between stages",
    "collectives": "exposed collectives of the data and tensor axes",
    "contention": "devices that compute at once slow each other down: shared memory bandwidth and caches",
    "overhead": "the engine's own work between actions: executor, gradient accumulation",
    "unexplained": "measured, but not in the forecast",
}
LOSSES["smaller pieces"] = LOSSES["micro-batching overhead"]  # its name in results of earlier versions


def explain_loss(name: str) -> str:
    """Explain a part that is a loss, not a gain."""
    return LOSSES[name].partition("; negative if")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupLoss:
    """One reason why a step is longer than serial / n."""

    name: str
    """A key of LOSSES."""
    seconds: float
    """Time it adds to the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupBreakdown:
    """Why the speed-up is below the number of devices."""

    num_devices: int
    serial_s: float
    """Step time of the same batch on one device."""
    step_s: float
    parts: tuple[SpeedupLoss, ...]
    """The losses between serial_s / n and step_s; they add up exactly."""

    @property
    def ideal_s(self) -> float:
        """serial_s over the number of devices."""
        return self.serial_s / self.num_devices

    @property
    def speedup(self) -> float:
        return self.serial_s / self.step_s

    def lost_speedup(self) -> list[tuple[str, float]]:
        """Return the speed-up that each loss costs, starting from n."""
        elapsed_s, lost = self.ideal_s, []
        for loss in self.parts:
            lost.append((loss.name, self.serial_s / elapsed_s - self.serial_s / (elapsed_s + loss.seconds)))
            elapsed_s += loss.seconds
        return lost


def explain_speedup(
    costs: PlanCosts, measured_s: float | None = None, serial_s: float | None = None
) -> SpeedupBreakdown:
    """Break down the difference between serial / n and the forecast, or the measured step."""
    num_devices = costs.plan.mesh.num_workers
    serial = costs.serial_s if serial_s is None else serial_s
    repeats = 1 if costs.plan.training else costs.plan.steps
    compute_only = without_communication(_without_overheads(costs, recompute=False))
    busy = _compute_by_worker(compute_only, sum(costs.shares) * repeats)
    degrees = costs.plan.mesh.degrees
    over_workers = sum(seconds * degree for seconds, degree in zip(busy, degrees, strict=True)) / sum(degrees)
    mean, bottleneck = over_workers / repeats, max(busy) / repeats
    with_bubble = step_seconds(compute_only)
    with_split = step_seconds(replace(compute_only, model_overheads=_without_statistics(costs)))
    recomputing = replace(_without_overheads(costs, recompute=True), model_overheads=costs.model_overheads)
    with_recompute = step_seconds(without_communication(recomputing))
    with_transfer = step_seconds(_without_collectives(recomputing))
    with_collectives, step = step_seconds(recomputing), step_seconds(costs)
    contended = _without_overheads(costs, recompute=True, contention=costs.contention)
    with_contention = step_seconds(replace(contended, model_overheads=costs.model_overheads))
    # Gradient accumulation counts as engine overhead: the unsplit batch on one device has none.
    losses = [
        ("imbalance", bottleneck - mean),
        ("bubble", with_bubble - bottleneck),
        (_name_of_extra_compute(costs), mean - serial / num_devices),
        ("split backward", with_split - with_bubble),
        ("recomputation", with_recompute - with_split),
        ("transfer", with_transfer - with_recompute),
        ("collectives", with_collectives - with_transfer),
        ("contention", with_contention - with_collectives),
        ("overhead", step - with_contention),
    ]
    if measured_s is not None:
        losses.append(("unexplained", measured_s - step))
        step = measured_s
    return SpeedupBreakdown(
        num_devices=num_devices,
        serial_s=serial,
        step_s=step,
        parts=tuple(SpeedupLoss(name=name, seconds=seconds) for name, seconds in losses),
    )


def with_measured_overhead(breakdown: SpeedupBreakdown, overhead_s: float) -> SpeedupBreakdown:
    """Replace the modeled engine overhead by the one that the run's trace shows; the rest stays unexplained."""
    seconds = {loss.name: loss.seconds for loss in breakdown.parts}
    if "unexplained" not in seconds:
        return breakdown
    seconds["unexplained"] += seconds["overhead"] - overhead_s
    seconds["overhead"] = overhead_s
    return replace(breakdown, parts=tuple(SpeedupLoss(name=name, seconds=lost) for name, lost in seconds.items()))


def _name_of_extra_compute(costs: PlanCosts) -> str:
    """Return the name of the compute beyond that of one device: pipeline stages repeat no work."""
    mesh = costs.plan.mesh
    return "micro-batching overhead" if mesh.data == mesh.tensor == 1 else "repeated work"


def _compute_by_worker(costs: PlanCosts, num_microbatches: float) -> list[float]:
    """Return the compute time of each worker in a step."""
    last = len(costs.stages) - 1
    seconds = [optimizer_s(costs, worker) for worker in range(costs.plan.mesh.pipeline)]
    for index, stage in enumerate(costs.stages):
        loss = costs.model_overheads.loss_forward_s + costs.model_overheads.loss_backward_s if index == last else 0.0
        seconds[stage.worker] += num_microbatches * (stage.compute_s + loss)
    return seconds


def _without_overheads(costs: PlanCosts, *, recompute: bool, contention: float = 1.0) -> PlanCosts:
    """Remove engine overheads, contention unless it is given, and, unless `recompute`, recomputation."""
    ratio = contention / costs.contention
    stages = tuple(
        replace(
            stage,
            forward_s=stage.forward_s * ratio,
            backward_input_s=stage.backward_input_s * ratio,
            backward_weight_s=stage.backward_weight_s * ratio,
            accumulate_s=0.0,
        )
        for stage in costs.stages
    )
    plan = costs.plan if recompute else replace(costs.plan, recompute="none")
    # Compute lost to a collective is a cost of that collective, not of the engine.
    engine = EngineOverheads(
        collective_share=costs.engine_overheads.collective_share,
        collective_pace=costs.engine_overheads.collective_pace,
        message_s=costs.engine_overheads.message_s if recompute else 0.0,
        message_s_per_byte=costs.engine_overheads.message_s_per_byte if recompute else 0.0,
    )
    unsplit = replace(costs.model_overheads, split_input=1.0, split_weight=1.0)
    return replace(
        costs, stages=stages, plan=plan, model_overheads=unsplit, engine_overheads=engine, contention=contention
    )


def without_communication(costs: PlanCosts) -> PlanCosts:
    """Remove the cost of links, collectives and codecs."""
    stages = tuple(
        replace(stage, tensor_forward_s=0.0, tensor_backward_s=0.0, gather_s=0.0, scatter_s=0.0, sent_bytes=0)
        for stage in costs.stages
    )
    return replace(
        costs,
        stages=stages,
        topology=_with_free_links(costs.topology),
        engine_overheads=replace(costs.engine_overheads, message_s=0.0, message_s_per_byte=0.0),
        model_overheads=_without_statistics(costs),
        tied_bytes=0,
    )


def _without_collectives(costs: PlanCosts) -> PlanCosts:
    """Remove the cost of collectives."""
    stages = tuple(
        replace(stage, tensor_forward_s=0.0, tensor_backward_s=0.0, gather_s=0.0, scatter_s=0.0)
        for stage in costs.stages
    )
    # Between hosts, collectives and P2P share a link: keep the link and make only collectives free.
    topology = replace(costs.topology, free_collectives=True)
    return replace(costs, stages=stages, topology=topology, model_overheads=_without_statistics(costs), tied_bytes=0)


def _without_statistics(costs: PlanCosts) -> ModelOverheads:
    """Remove the average of batch norm's statistics, whose compute is part of a collective."""
    return replace(costs.model_overheads, statistics_s=0.0, statistics_bytes=0)


def _with_free_links(topology: Topology) -> Topology:
    links = Links(intra_host=FREE, inter_host=FREE, collective=FREE, host=topology.cluster.links.host)
    return replace(topology, cluster=Cluster(devices=topology.cluster.devices, links=links))


def with_links(cluster: Cluster, bandwidth_bytes_per_s: float | None, latency_s: float | None) -> Cluster:
    """Return the cluster with another bandwidth or latency on every link."""

    def changed(link: Link) -> Link:
        bandwidth = link.bandwidth_bytes_per_s if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s
        return Link(bandwidth_bytes_per_s=bandwidth, latency_s=link.latency_s if latency_s is None else latency_s)

    links = cluster.links
    return Cluster(
        devices=cluster.devices,
        links=Links(
            intra_host=changed(links.intra_host),
            inter_host=None if links.inter_host is None else changed(links.inter_host),
            collective=None if links.collective is None else changed(links.collective),
            host=links.host,
        ),
    )


def with_perfect_balance(costs: PlanCosts) -> PlanCosts:
    """Give every stage the mean of all, and distribute the loss and the optimizer step evenly."""
    count, loss = len(costs.stages), costs.model_overheads
    if count == 1:
        return costs
    names = ("forward_s", "backward_input_s", "backward_weight_s", "tensor_forward_s", "tensor_backward_s")
    means = {name: sum(getattr(stage, name) for stage in costs.stages) / count for name in (*names, "accumulate_s")}
    means["forward_s"] += loss.loss_forward_s * costs.contention / count
    means["backward_weight_s"] += loss.loss_backward_s * costs.contention / count
    return replace(
        costs,
        stages=tuple(replace(stage, **means) for stage in costs.stages),
        model_overheads=replace(loss, loss_forward_s=0.0, loss_backward_s=0.0),
        balanced_optimizer=True,
    )
