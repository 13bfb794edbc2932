"""Costs of a plan: everything its forecast needs to know.

    profile ─► stage_costs (units to stages) ─► action_times ─► node_times of an action graph
    P2P        latency + bytes · ratio / bandwidth

A profile describes one micro-batch. Micro-batches of other sizes cost in proportion to their samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stagewright.errors import UsageError
from stagewright.profiler.profile import Profile, amount_of
from stagewright.simulator.action_graph import BACKWARD, ActionGraph, Floats
from stagewright.simulator.collective import all_gather_s
from stagewright.simulator.costs.action_times import ActionTimes, action_times
from stagewright.simulator.costs.expert_traffic import ExpertTraffic
from stagewright.simulator.costs.fsdp import copy_s, exposed_reduce_scatter_s
from stagewright.simulator.costs.link_codec import NO_CODEC, LinkCodec
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.costs.recomputation import saves_inputs
from stagewright.simulator.costs.shared_parameters import SharedParameter, shared_between_stages
from stagewright.simulator.costs.stage_costs import StageCostBuilder, StageCosts, pass_scales
from stagewright.simulator.costs.tensor_traffic import TensorTraffic
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeCosts:
    """The costs of a model's units as one of a number of tensor parallel workers computes them."""

    degree: int
    profile: Profile
    tensor: Sequence[TensorTraffic] | None = None
    """Tensor collectives of its units; None without tensor parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCosts:
    """Costs of a plan on a cluster."""

    plan: Plan
    topology: Topology
    stages: tuple[StageCosts, ...]
    shares: tuple[float, ...]
    """Samples of each micro-batch over those of the profiled one, of the largest replica."""
    model_overheads: ModelOverheads
    engine_overheads: EngineOverheads
    codecs: tuple[LinkCodec, ...]
    """The codec after each stage except the last."""
    gradients: tuple[tuple[int, float], ...]
    """Parameter bytes and backward time of each unit, which order the gradients. A parameter shared with an earlier
    unit of the stage counts there: its gradient is complete when all uses have run backward."""
    tied_bytes: int
    """Parameters that two pipeline workers hold."""
    shared_parameters: tuple[SharedParameter, ...] = ()
    """Parameters that two stages of one worker hold."""
    batch_input_bytes: int = 0
    """Inputs of the whole batch if the first unit saves them: micro-batches are views of one tensor."""
    unsaved_batch_bytes: int = 0
    """The same, where the first unit does not save them: a GPU holds them beside the activations."""
    output_bytes: int = 0
    """The model's outputs for one micro-batch of the profiled size."""
    serial_s: float
    """Time of the whole batch on one device."""
    contention: float
    """Factor on compute time because other devices of the host are busy."""
    balanced_optimizer: bool = False
    """What-if: every worker's optimizer step takes the mean of all."""

    def node_times(self, graph: ActionGraph) -> tuple[Floats, Floats]:
        """Return, for every node, the device's work (of a P2P node: its whole time) and the tensor all-reduces."""
        times = self.action_times()
        shares = np.array(self.shares)[graph.microbatch % len(self.shares)]
        exempt = (self.plan.recompute == "except-last") & (graph.microbatch == graph.num_microbatches - 1)
        row = (self.recomputed[graph.stage] & ~exempt).astype(np.int64), graph.stage, graph.kind
        accumulates = (graph.microbatch > 0) | self.copies_gradients
        compute = times.compute_s[row] * shares + times.fixed_s[row]
        compute += np.where(accumulates, times.accumulate_s[row], 0.0)
        collective = times.tensor_s[row] * shares
        p2p = graph.is_p2p
        edge = graph.stage[p2p] - (graph.kind[p2p] == BACKWARD)
        latency_s, transfer_s = self.p2p_times()
        copies = np.array([stage.copies for stage in self.stages])[edge, (graph.kind[p2p] == BACKWARD).astype(np.int64)]
        compute[p2p] = latency_s[edge] + shares[p2p] * transfer_s[edge] * copies
        collective[p2p] = 0.0
        return compute, collective

    def action_times(self) -> ActionTimes:
        """Compute the times of every stage's actions."""
        return action_times(
            self.stages, self.codecs, self.recomputed, self.model_overheads, self.engine_overheads, self.contention
        )

    def p2p_times(self) -> tuple[Floats, Floats]:
        """Return each edge's latency, and its transfer time for one micro-batch of the profiled size."""
        latency, transfer = [], []
        for stage, behind, codec in zip(self.stages, self.stages[1:], self.codecs, strict=False):
            link = self.topology.link(stage.worker, behind.worker)
            latency.append(link.latency_s)
            transfer.append(stage.sent_bytes * codec.ratio / link.bandwidth_bytes_per_s)
        return np.array(latency), np.array(transfer)

    @property
    def recomputed(self) -> npt.NDArray[np.bool_]:
        """Whether each stage uses activation checkpointing, of all its units or some."""
        return np.array([self.recomputes(index) for index in range(len(self.stages))])

    @property
    def copies_gradients(self) -> bool:
        """Whether the first micro-batch's gradients are also copied, into the buckets of DistributedDataParallel."""
        plan = self.plan
        return plan.training and plan.mesh.data > 1 and plan.mesh.pipeline == 1 and not plan.shard and not plan.zero

    def statistics_share(self, worker: int) -> float:
        """Return the fraction of batch norm's running statistics on a pipeline worker, by buffer bytes."""
        own = sum(stage.buffer_bytes for stage in self.stages if stage.worker == worker)
        return own / max(1, sum(stage.buffer_bytes for stage in self.stages))

    def recomputes(self, stage: int) -> bool:
        """Whether a stage uses activation checkpointing, of all its units or some."""
        is_by_unit = bool(self.stages[stage].recomputation.units)
        return self.plan.training and (is_by_unit or self.plan.recomputes(stage))

    @property
    def recomputed_shares(self) -> tuple[float, ...]:
        """The shares of the micro-batches that a checkpointed stage recomputes."""
        return self.shares[:-1] if self.plan.recompute == "except-last" else self.shares

    def tensor_bytes(self, worker: int) -> tuple[int, int]:
        """Return the bytes of a worker's tensor all-reduces in a step, and of its all-gathers and reduce-scatters."""
        reduced, gathered = 0.0, 0.0
        for index, stage in enumerate(self.stages):
            if stage.worker != worker:
                continue
            forward, backward = sum(stage.tensor_forward_bytes), sum(stage.tensor_backward_bytes)
            reduced += sum(self.shares) * (forward + sum(stage.tensor_loss_bytes))
            reduced += sum(self.shares) * backward if self.plan.training else 0
            gathered += sum(self.shares) * (sum(stage.tensor_gathered_bytes) + sum(stage.sequence.forward_bytes))
            if self.recomputes(index):
                again = stage.recomputation
                reduced += sum(self.recomputed_shares) * sum(again.forward_bytes)
                gathered += sum(self.recomputed_shares) * sum((*again.gathered_bytes, *again.sequence.forward_bytes))
            if self.plan.training:
                gathered += sum(self.shares) * sum(stage.sequence.backward_bytes)
                reduced += stage.sequence.partial_bytes
        return int(reduced), int(gathered)

    def expert_row_bytes(self, worker: int) -> int:
        """Return the bytes of the rows in a worker's all-to-alls in a step, before its own share is taken off."""
        total = 0.0
        for index, stage in enumerate(self.stages):
            if stage.worker == worker:
                passes = sum(self.shares) * (2 if self.plan.training else 1)
                passes += (
                    sum(self.recomputed_shares) * stage.recomputation.expert_share if self.recomputes(index) else 0
                )
                total += 2 * passes * stage.expert_row_bytes
        return int(total)

    @property
    def num_reduce_scatters(self) -> int:
        """How often a step reduce-scatters each gradient over FSDP or ZeRO replicas."""
        return len(self.shares) if self.plan.scatters_every_microbatch else 1

    def held_parameter_bytes(self, worker: int) -> int:
        """Return the bytes of a worker's parameters; one that two of its stages hold counts once."""
        own = [index for index, stage in enumerate(self.stages) if stage.worker == worker]
        repeated = sum(parameter.num_bytes for parameter in self.shared_parameters if parameter.later in own)
        return sum(self.stages[index].parameter_bytes for index in own) - repeated

    def reduce_scatter_s(self, worker: int) -> float:
        """Return the time that the reduce-scatters of FSDP or ZeRO add after a worker's compute."""
        if self.plan.shard and self.plan.scatters_every_microbatch:
            return 0.0  # each is part of a backward
        stages = [stage for stage in self.stages if stage.worker == worker]
        sizes = [self.gradients[unit][0] for stage in stages for unit in range(stage.first, stage.last + 1)]
        return self.num_reduce_scatters * exposed_reduce_scatter_s(
            sizes, self.plan, self.topology, self.model_overheads, self.engine_overheads, self.contention
        )

    def replicated_gradient_bytes(self, worker: int) -> int:
        """Return the bytes of gradients that HSDP all-reduces over the replicas with the same shards, in a step."""
        plan = self.plan
        if not plan.training or plan.num_shards in (1, plan.mesh.data):
            return 0
        return -(-self.held_parameter_bytes(worker) // plan.num_shards)

    def parameter_gather_s(self, worker: int) -> float:
        """Return the time of a worker's all-gather of its parameters once per step: ZeRO's after the optimizer step,
        FSDP's before the next, which takes as long."""
        if not self.plan.zero and not self.plan.gathers_once:
            return 0.0
        num_bytes = self.held_parameter_bytes(worker)
        seconds = all_gather_s(self.topology.shard_group(self.plan.num_shards), num_bytes)
        return seconds + copy_s(num_bytes, self.plan, self.model_overheads) * self.contention if seconds else 0.0


def plan_costs(
    plan: Plan,
    profile: Profile,
    topology: Topology,
    *,
    cuts: Sequence[int],
    sizes: Sequence[int],
    tensor: Sequence[TensorTraffic] | None = None,
    experts: Sequence[ExpertTraffic] | None = None,
    model_overheads: ModelOverheads | None = None,
    engine_overheads: EngineOverheads | None = None,
    codecs: Sequence[LinkCodec] | None = None,
    whole: Profile | None = None,
    serial_s: float | None = None,
    other_degrees: Sequence[DegreeCosts] = (),
) -> PlanCosts:
    """Compute the costs of a plan with known cuts; `sizes` are the samples of each micro-batch of one replica.

    ``whole``: the profile with unsplit layers, if `profile` is that of one tensor parallel worker. ``serial_s``: the
    time of the whole batch on one device; None: derived from the profile. ``other_degrees``: the units at other tensor
    degrees than the largest, for stages that have them.
    """
    model_overheads, engine_overheads = model_overheads or ModelOverheads(), engine_overheads or EngineOverheads()
    _check_profile(plan, profile, cuts)
    units, workers, degrees = profile.units, plan.stage_workers, plan.mesh.degrees
    bounds = list(zip((0, *(cut + 1 for cut in cuts)), (*cuts, len(units) - 1), strict=True))
    no_traffic = [TensorTraffic()] * len(units)
    divided = experts or [ExpertTraffic()] * len(units)
    largest = DegreeCosts(degree=plan.mesh.size("tensor"), profile=profile, tensor=tensor)
    by_degree = {costs.degree: costs for costs in (*other_degrees, largest)}
    builders = {
        degree: StageCostBuilder(
            plan,
            by_degree[degree].profile,
            topology,
            by_degree[degree].tensor or no_traffic,
            model_overheads,
            engine_overheads,
            len(sizes),
            divided,
            degree,
        )
        for degree in dict.fromkeys(degrees)
    }
    builder, last_costs = builders[largest.degree], by_degree[degrees[workers[-1]]]
    units_of = [by_degree[degrees[worker]].profile.units for worker in workers]
    shared = shared_between_stages([unit.parameter_bytes for unit in units], bounds)
    on_one_worker = tuple(parameter for parameter in shared if workers[parameter.earlier] == workers[parameter.later])
    existing: dict[int, int] = {}  # gradients that a later stage of the worker makes, whose backward comes first
    for parameter in on_one_worker:
        existing[parameter.unit] = existing.get(parameter.unit, 0) + parameter.num_bytes
    if serial_s is None:
        samples = sum(sizes) * plan.mesh.data / profile.batch_size
        serial_s = _serial_s(plan, whole or profile, model_overheads, samples) / max(builder.speeds)
    batch_bytes, is_saved = _batch_input(plan, profile)
    return PlanCosts(
        plan=plan,
        topology=topology,
        stages=tuple(
            replace(builders[degrees[worker]].build(index, first, last, existing), copies=_copies(plan, index))
            for index, (worker, (first, last)) in enumerate(zip(workers, bounds, strict=True))
        ),
        shares=tuple(size / profile.batch_size for size in sizes),
        model_overheads=model_overheads,
        engine_overheads=engine_overheads,
        codecs=tuple(codecs) if codecs else (NO_CODEC,) * len(cuts),
        gradients=tuple(
            (unit.parameter_bytes.added(first), unit.backward_s)
            for stage_units, (first, last) in zip(units_of, bounds, strict=True)
            for unit in stage_units[first : last + 1]
        ),
        tied_bytes=sum(entry.num_bytes for entry in shared) - sum(entry.num_bytes for entry in on_one_worker),
        shared_parameters=on_one_worker,
        batch_input_bytes=batch_bytes if is_saved else 0,
        unsaved_batch_bytes=0 if is_saved else batch_bytes,
        output_bytes=max(units[-1].output_bytes, *(last_costs.tensor or no_traffic)[-1].gathered_bytes, 0),
        serial_s=serial_s,
        contention=builder.contention,
    )


def _copies(plan: Plan, stage: int) -> tuple[int, int]:
    """Return how often a worker of a stage sends its outputs, and one of the next stage the gradient."""
    if stage + 1 == plan.num_stages or not plan.mesh.tensor_degrees:
        return 1, 1
    own, following = plan.stage_workers[stage : stage + 2]
    return plan.mesh.num_copies(own, following), plan.mesh.num_copies(following, own)


def _check_profile(plan: Plan, profile: Profile, cuts: Sequence[int]) -> None:
    if plan.training and not profile.training:
        raise UsageError(
            f"the profile of {profile.model!r} has only forward passes, but the plan trains: profile it for training"
        )
    if len(cuts) + 1 != plan.num_stages:
        raise UsageError(f"the plan has {plan.num_stages} stages, but {len(cuts)} cuts make {len(cuts) + 1}")


def _serial_s(plan: Plan, profile: Profile, overheads: ModelOverheads, samples: float) -> float:
    """Return the step time on one device: the micro-batches in sequence without recomputation, one optimizer step."""
    forward_scale, backward_scale = pass_scales(profile, max(1, round(samples)))
    microbatch_s = sum(unit.forward.median_s for unit in profile.units) * forward_scale + overheads.loss_forward_s
    if not plan.training:
        return samples * microbatch_s
    microbatch_s += sum(unit.backward_s for unit in profile.units) * backward_scale + overheads.loss_backward_s
    parameter_bytes = amount_of([unit.parameter_bytes for unit in profile.units], 0, len(profile.units) - 1)
    return samples * microbatch_s + parameter_bytes * overheads.optimizer_s_per_byte


def _batch_input(plan: Plan, profile: Profile) -> tuple[int, bool]:
    """Return the bytes of the batch's inputs, and whether the first unit saves them for backward.

    With autocast it saves a copy in another dtype.
    """
    first = profile.units[0]
    input_bytes = first.recompute_saved_bytes
    return int(plan.batch / profile.batch_size * input_bytes), saves_inputs(first, input_bytes)
