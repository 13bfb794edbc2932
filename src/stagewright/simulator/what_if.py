"""What if: the same plan with one thing changed, and the parts of its distance to the ideal.

    serial / n ─► imbalance ─► bubble ─► repeated work ─► split backward ─► recomputation ─► transfer
               ─► collectives ─► overhead ─► step        (of a pipeline alone: smaller pieces, not repeated work)

Each arrow switches one thing on and forecasts again; a part is the difference, so that parts add up exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stagewright.cluster.cluster import FREE, Cluster, Link, Links
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.simulate import optimizer_s, step_seconds
from stagewright.simulator.topology import Topology

__all__ = ["LOSSES", "SpeedupLoss", "SpeedupBreakdown", "explain_speedup", "with_perfect_balance", "with_links", "without_communication"]

LOSSES: dict[str, str] = {
    "imbalance": "the busiest worker has more to compute than the mean of all",
    "bubble": "fill and drain: workers wait for the first micro-batch, and have no more after the last",
    "repeated work": "what every worker does and one alone would do once: the optimiser's step, layers that are not "
    "shared; and what smaller shares take longer for each sample",
    "smaller pieces": "what micro-batches take beyond their share of the whole batch on one device; less than nothing "
    "where small pieces are quicker",
    "split backward": "a backward in two halves, which takes longer than in one piece",
    "recomputation": "running forward again in the backward pass",
    "transfer": "messages between stages that computing does not hide",
    "collectives": "sums and gathers over data and tensor peers that computing does not hide",
    "overhead": "the executor's own work, adding up gradients, cores that slow each other down",
    "unexplained": "measured, but not forecast",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupLoss:
    """One reason why a step is longer than serial / n."""

    name: str
    """Its name, one of LOSSES."""
    seconds: float
    """The time that it adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupBreakdown:
    """Why the speed-up is not n."""

    num_devices: int
    """Devices."""
    serial_s: float
    """The same batch on one device."""
    step_s: float
    """A step."""
    parts: tuple[SpeedupLoss, ...]
    """What lies between serial_s / n and step_s; they add up exactly."""

    @property
    def ideal_s(self) -> float:
        """Serial over the number of devices."""
        return self.serial_s / self.num_devices

    @property
    def speedup(self) -> float:
        """Serial over the step."""
        return self.serial_s / self.step_s

    def lost_speedup(self) -> list[tuple[str, float]]:
        """The speed-up that each part takes, from n down, in order."""
        at, found = self.ideal_s, []
        for part in self.parts:
            found.append((part.name, self.serial_s / at - self.serial_s / (at + part.seconds)))
            at += part.seconds
        return found


def explain_speedup(costs: PlanCosts, measured_s: float | None = None, serial_s: float | None = None) -> SpeedupBreakdown:
    """Split the distance between serial / n and the forecast (or what was measured) into parts."""
    num_devices = costs.plan.mesh.num_workers
    serial = costs.serial_s if serial_s is None else serial_s
    silent = without_communication(_bare(costs, recompute=False))
    chunks = sum(costs.shares) * (1 if costs.plan.training else costs.plan.steps)
    busy = _busy(silent, chunks)
    repeats = 1 if costs.plan.training else costs.plan.steps
    mean, most = sum(busy) / len(busy) / repeats, max(busy) / repeats
    path = step_seconds(silent)
    ideal = serial / num_devices
    halved = step_seconds(replace(silent, model_overheads=_without_statistics(costs)))
    rebuilt = replace(_bare(costs, recompute=True), model_overheads=costs.model_overheads)
    silent_s, linked_s = step_seconds(without_communication(rebuilt)), step_seconds(_links_only(rebuilt))
    rebuilt_s, step = step_seconds(rebuilt), step_seconds(costs)
    # Adding up gradients belongs to the engine's overhead: serial in one piece has none.
    steps = [
        ("imbalance", most - mean),
        ("bubble", path - most),
        (_repeated(costs), mean - ideal),
        ("split backward", halved - path),
        ("recomputation", silent_s - halved),
        ("transfer", linked_s - silent_s),
        ("collectives", rebuilt_s - linked_s),
        ("overhead", step - rebuilt_s),
    ]
    if measured_s is not None:
        steps.append(("unexplained", measured_s - step))
        step = measured_s
    return SpeedupBreakdown(
        num_devices=num_devices,
        serial_s=serial,
        step_s=step,
        parts=tuple(SpeedupLoss(name=name, seconds=seconds) for name, seconds in steps),
    )


def _repeated(costs: PlanCosts) -> str:
    """What it is called that workers compute more, in all, than one alone: stages of a pipeline repeat nothing."""
    mesh = costs.plan.mesh
    return "smaller pieces" if mesh.data == mesh.tensor == 1 else "repeated work"


def _busy(costs: PlanCosts, chunks: float) -> list[float]:
    """What each worker computes in a step."""
    last = len(costs.stages) - 1
    found = [optimizer_s(costs, worker) for worker in range(costs.plan.mesh.pipeline)]
    for index, stage in enumerate(costs.stages):
        loss = costs.model_overheads.loss_forward_s + costs.model_overheads.loss_backward_s if index == last else 0.0
        found[stage.worker] += chunks * (stage.compute_s + loss)
    return found


def _bare(costs: PlanCosts, *, recompute: bool) -> PlanCosts:
    """Without the engine's own costs and crowding; without recomputation where that is not wanted."""
    stages = tuple(
        replace(
            stage,
            forward_s=stage.forward_s / costs.crowded,
            backward_input_s=stage.backward_input_s / costs.crowded,
            backward_weight_s=stage.backward_weight_s / costs.crowded,
            accumulate_s=0.0,
        )
        for stage in costs.stages
    )
    plan = costs.plan if recompute else replace(costs.plan, recompute="none")
    # What a collective takes from computing is a cost of that collective, not of the engine.
    terms = EngineOverheads(
        collective_share=costs.engine_overheads.collective_share,
        collective_pace=costs.engine_overheads.collective_pace,
        message_s=costs.engine_overheads.message_s if recompute else 0.0,
        message_s_per_byte=costs.engine_overheads.message_s_per_byte if recompute else 0.0,
    )
    halves = replace(costs.model_overheads, split_input=1.0, split_weight=1.0)
    return replace(costs, stages=stages, plan=plan, model_overheads=halves, engine_overheads=terms, crowded=1.0)


def without_communication(costs: PlanCosts) -> PlanCosts:
    """The same with free links, free collectives and no codec work."""
    stages = tuple(
        replace(stage, tensor_forward_s=0.0, tensor_backward_s=0.0, gather_s=0.0, sends_bytes=0)
        for stage in costs.stages
    )
    quiet = replace(costs.engine_overheads, message_s=0.0, message_s_per_byte=0.0)
    return replace(
        costs,
        stages=stages,
        topology=_free_links(costs.topology),
        engine_overheads=quiet,
        model_overheads=_without_statistics(costs),
        tied_bytes=0,
    )


def _links_only(costs: PlanCosts) -> PlanCosts:
    """The same with free collectives."""
    stages = tuple(replace(stage, tensor_forward_s=0.0, tensor_backward_s=0.0, gather_s=0.0) for stage in costs.stages)
    # Between hosts a collective takes the same link as a message: the link stays, collectives cost nothing.
    topology = replace(costs.topology, free_collectives=True)
    return replace(costs, stages=stages, topology=topology, model_overheads=_without_statistics(costs), tied_bytes=0)


def _without_statistics(costs: PlanCosts) -> ModelOverheads:
    """What a device works for a collective is a cost of that collective."""
    return replace(costs.model_overheads, statistics_s=0.0, statistics_bytes=0)


def _free_links(topology: Topology) -> Topology:
    links = Links(intra_host=FREE, inter_host=FREE, collective=FREE)
    return replace(topology, cluster=Cluster(devices=topology.cluster.devices, links=links))


def with_links(cluster: Cluster, bandwidth_bytes_per_s: float | None, latency_s: float | None) -> Cluster:
    """The cluster with another bandwidth or latency on every link."""

    def changed(link: Link | None) -> Link | None:
        if link is None:
            return None
        return Link(
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s
            if bandwidth_bytes_per_s is None
            else bandwidth_bytes_per_s,
            latency_s=link.latency_s if latency_s is None else latency_s,
        )

    inside = changed(cluster.links.intra_host)
    assert inside is not None
    links = Links(
        intra_host=inside, inter_host=changed(cluster.links.inter_host), collective=changed(cluster.links.collective)
    )
    return Cluster(devices=cluster.devices, links=links)


def free_links(cluster: Cluster) -> Cluster:
    """The cluster with links that cost nothing."""
    return with_links(cluster, math.inf, 0.0)


def with_perfect_balance(costs: PlanCosts) -> PlanCosts:
    """The same with every stage taking the mean of all, the loss and the optimiser's step shared by all."""
    count, loss = len(costs.stages), costs.model_overheads
    if count == 1:
        return costs
    names = ("forward_s", "backward_input_s", "backward_weight_s", "tensor_forward_s", "tensor_backward_s")
    means = {name: sum(getattr(stage, name) for stage in costs.stages) / count for name in (*names, "accumulate_s")}
    means["forward_s"] += loss.loss_forward_s * costs.crowded / count
    means["backward_weight_s"] += loss.loss_backward_s * costs.crowded / count
    return replace(
        costs,
        stages=tuple(replace(stage, **means) for stage in costs.stages),
        model_overheads=replace(loss, loss_forward_s=0.0, loss_backward_s=0.0),
        even_optimizer=True,
    )
