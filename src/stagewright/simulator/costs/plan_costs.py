"""What every action and message of a plan costs: the profile's units gathered into stages, on the plan's devices.

    forward    units + tensor collectives (+ loss in the last stage)          + the executor's own work, decoding and
    backward   units + tensor collectives (+ the forward again) (+ adding up)   encoding, device time of messages
    message    latency + bytes · ratio / bandwidth

A profile is of one micro-batch; unequal micro-batches cost by their share of its samples. What is computed between
units is in their times. These are scaled so that they sum to the whole model's, measured in the same rounds: what
caches and the model's own code make of it is shared out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stagewright.errors import UsageError
from stagewright.profiler.profile import Amount, Profile, Time, UnitProfile, amount_of
from stagewright.simulator.collective import all_gather_s, all_reduce_s, reduce_scatter_s
from stagewright.simulator.costs.link_codec import NO_CODEC, LinkCodec
from stagewright.simulator.action_graph import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Floats, ActionGraph
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.topology import Topology
from stagewright.simulator.costs.working_memory import StageWorkingMemory, stage_working_memory
from stagewright.spec.plan import Plan

__all__ = ["ActionTimes", "PlanCosts", "StageCosts", "TensorTraffic", "plan_costs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTraffic:
    """What one unit hands to the tensor axis for one micro-batch of the profiled size, a number a collective."""

    forward_bytes: tuple[int, ...] = ()
    """Bytes of each all-reduce in the forward pass."""
    backward_bytes: tuple[int, ...] = ()
    """Bytes of each all-reduce in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """One stage for one micro-batch, on its worker's device."""

    first: int
    """Its units: the first and the last, both included."""
    last: int
    worker: int
    """The worker's place along the pipeline."""
    forward_s: float
    """Computing forward."""
    backward_input_s: float
    """Computing backward as far as the inputs' gradients need it."""
    backward_weight_s: float
    """The rest of the backward pass."""
    tensor_forward_s: float
    """All-reduces of the tensor axis in the forward pass."""
    tensor_backward_s: float
    """… and in the backward pass."""
    tensor_forward_bytes: tuple[int, ...]
    """Bytes of each of them."""
    tensor_backward_bytes: tuple[int, ...]
    gather_s: float
    """Gathering of sharded parameters that computing does not hide, and copying them, in each pass."""
    accumulate_s: float
    """Adding a gradient to the one before, from the second micro-batch on."""
    parameter_bytes: int
    """Bytes of parameters and of buffers."""
    buffer_bytes: int
    saved_bytes: int
    """What autograd keeps of one micro-batch."""
    input_bytes: int
    """What is kept instead where the stage is recomputed: its inputs."""
    recompute_bytes: int
    """What comes beside them when it runs again."""
    gradient_rise_bytes: int
    """How far above its start memory rises in a stage's first backward, as gradients come and activations go."""
    alone_bytes: int
    """Of a sharded stage, parameters that are gathered unit by unit, twice for each micro-batch."""
    gathered_bytes: int
    """The largest unit's parameters, which a sharded stage holds whole while it is used."""
    work: StageWorkingMemory
    """What memory rises by while it runs."""
    sends_bytes: int
    """Bytes that it sends on; in training the gradient that comes back is as large. 0 for the last one."""

    @property
    def compute_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s


# Of StageCosts, as `action_times` takes them.
_STAGE_TIMES = (
    "forward_s",
    "backward_input_s",
    "backward_weight_s",
    "tensor_forward_s",
    "tensor_backward_s",
    "gather_s",
    "accumulate_s",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionTimes:
    """What actions take: [0 as they are, 1 running forward again; stage; kind, by its place in `order.KINDS`]."""

    work_s: Floats
    """Work that goes with the samples, for one micro-batch of the profiled size."""
    tensor_s: Floats
    """Collectives of the tensor axis, which do so too."""
    fixed_s: Floats
    """Work that does not."""
    adding_s: Floats
    """Adding up gradients, where there are some already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCosts:
    """Everything that a forecast needs to know about a plan."""

    plan: Plan
    """The plan."""
    topology: Topology
    """Where its workers are."""
    stages: tuple[StageCosts, ...]
    """The stages."""
    shares: tuple[float, ...]
    """Samples of each micro-batch over those of the profiled one, of the replica with most."""
    model_overheads: ModelOverheads
    """What a step costs beside its units."""
    engine_overheads: EngineOverheads
    codecs: tuple[LinkCodec, ...]
    """The codec after each stage but the last."""
    gradients: tuple[tuple[int, float], ...]
    """The unit's parameter bytes and backward time, for the order in which gradients come. What it shares with an
    earlier one of its stage counts there: a gradient is there when all uses of its parameter have gone backward."""
    tied_bytes: int
    """Parameters that two workers of the pipeline hold, by bytes."""
    common: tuple[tuple[int, int, int], ...] = ()
    """What two stages of one worker hold in common: the earlier, the later, bytes of parameters."""
    batch_bytes: int = 0
    """The whole batch's inputs, where the first unit keeps its micro-batch of them: parts of one tensor, held as one.
    """
    result_bytes: int = 0
    """The model's results for one micro-batch of the profiled size."""
    serial_s: float
    """Time of the whole batch on one device alone."""
    crowded: float
    """How much longer computing takes because other devices of the host are busy."""
    even_optimizer: bool = False
    """What if: whether every worker's optimiser takes the mean of all."""

    def durations(self, order: ActionGraph) -> Floats:
        """The duration of every node."""
        compute, collective = self.parts(order)
        messages: Floats = compute + collective
        return messages

    def parts(self, order: ActionGraph) -> tuple[Floats, Floats]:
        """Of every node: the device's own work (for a message: its whole time), and the tensor axis' collectives."""
        times = self.action_times()
        shares = np.array(self.shares)[order.microbatch % len(self.shares)]
        spared = (self.plan.recompute == "except-last") & (order.microbatch == order.num_microbatches - 1)
        row = (self.recomputed[order.stage] & ~spared).astype(np.int64), order.stage, order.kind
        adds = (order.microbatch > 0) | self.copies_gradients
        compute = times.work_s[row] * shares + times.fixed_s[row] + np.where(adds, times.adding_s[row], 0.0)
        collective = times.tensor_s[row] * shares
        message = order.is_p2p
        edge = order.stage[message] - (order.kind[message] == BACKWARD)
        latency_s, carried_s = self.message_times()
        compute[message] = latency_s[edge] + shares[message] * carried_s[edge]
        collective[message] = 0.0
        return compute, collective

    def action_times(self) -> ActionTimes:
        """The parts of every stage's actions."""
        terms, loss, again = self.engine_overheads, self.model_overheads, self.recomputed
        forward, inputs, weights, tensor_forward, tensor_backward, gather, accumulate = np.array(
            [[getattr(stage, name) for stage in self.stages] for name in _STAGE_TIMES]
        )
        work, tensor, fixed, adding = (np.zeros((2, len(self.stages), 4)) for _ in range(4))
        work[..., FORWARD], tensor[..., FORWARD] = forward, tensor_forward
        work[..., BACKWARD], tensor[..., BACKWARD] = inputs + weights, tensor_backward
        # In two halves it takes longer; where the stage is recomputed it is done in one, and told apart here alone.
        work[..., BACKWARD_INPUT] = inputs * np.where(again, 1.0, loss.split_input)
        work[..., BACKWARD_WEIGHT] = weights * np.where(again, 1.0, loss.split_weight)
        tensor[..., BACKWARD_INPUT] = tensor_backward
        # The first stage's inputs need no gradient: all of its backward is in the second half.
        for parts in (work, tensor):
            parts[:, 0, BACKWARD_WEIGHT], parts[:, 0, BACKWARD_INPUT] = parts[:, 0, BACKWARD], 0.0
        work[:, -1, FORWARD] += loss.loss_forward_s * self.crowded
        work[:, -1, BACKWARD : BACKWARD_INPUT + 1] += loss.loss_backward_s * self.crowded
        fixed[:] = terms.action_s
        fixed[..., :BACKWARD_WEIGHT] += gather[:, None]
        for edge, codec in enumerate(self.codecs):
            before, behind = self.stages[edge], self.stages[edge + 1]
            if before.worker == behind.worker:
                continue
            passing_s = terms.message_s_per_byte * codec.ratio
            encode_s = before.sends_bytes * (codec.encode_s_per_byte + passing_s)
            decode_s = before.sends_bytes * (codec.decode_s_per_byte + passing_s)
            work[:, edge, :BACKWARD_WEIGHT] += encode_s, decode_s, decode_s
            work[:, edge + 1, :BACKWARD_WEIGHT] += decode_s, encode_s, encode_s
            fixed[:, edge : edge + 2, :BACKWARD_WEIGHT] += terms.message_s
        adding[..., [BACKWARD, BACKWARD_WEIGHT]] = accumulate[:, None]
        # What runs again does so in its backward; of two halves in the first, which then does all of it.
        for kind, own in ((BACKWARD, slice(None)), (BACKWARD_INPUT, slice(1, None)), (BACKWARD_WEIGHT, slice(1))):
            work[1, own, kind] += forward[own]
            tensor[1, own, kind] += tensor_forward[own]  # sharded parameters are gathered for the backward anyway
        work[1, 1:, BACKWARD_INPUT] += weights[1:]
        adding[1, 1:, BACKWARD_INPUT] = accumulate[1:]
        work[1, 1:, BACKWARD_WEIGHT] = adding[1, 1:, BACKWARD_WEIGHT] = 0.0
        return ActionTimes(work_s=work, tensor_s=tensor, fixed_s=fixed, adding_s=adding)

    def message_times(self) -> tuple[Floats, Floats]:
        """Of every edge: latency, and what a message of a micro-batch of the profiled size takes beside."""
        latency, carried = [], []
        for stage, behind, codec in zip(self.stages, self.stages[1:], self.codecs, strict=False):
            link = self.topology.link(stage.worker, behind.worker)
            latency.append(link.latency_s)
            carried.append(stage.sends_bytes * codec.ratio / link.bandwidth_bytes_per_s)
        return np.array(latency), np.array(carried)

    @property
    def recomputed(self) -> npt.NDArray[np.bool_]:
        """Of every stage, whether it runs forward again."""
        wanted = self.plan.recompute
        found = wanted if isinstance(wanted, tuple) else [wanted != "none"] * len(self.stages)
        return np.array(found) & self.plan.training

    @property
    def copies_gradients(self) -> bool:
        """Whether a first micro-batch's gradients are copied too, into the buckets of DistributedDataParallel."""
        plan = self.plan
        return plan.training and plan.mesh.data > 1 and plan.mesh.pipeline == 1 and not plan.shard

    def statistics_share(self, worker: int) -> float:
        """The share of batch norm's running statistics that a worker of the pipeline holds, by bytes of buffers."""
        own = sum(stage.buffer_bytes for stage in self.stages if stage.worker == worker)
        return own / max(1, sum(stage.buffer_bytes for stage in self.stages))

    def recomputes(self, stage: int) -> bool:
        """Whether a stage runs forward again."""
        return self.plan.training and self.plan.recomputes(stage)

    @property
    def recomputed_shares(self) -> tuple[float, ...]:
        """The shares of those micro-batches that such a stage runs again."""
        return self.shares[:-1] if self.plan.recompute == "except-last" else self.shares

    def tensor_bytes(self, worker: int) -> int:
        """Bytes that a worker gives to the tensor axis in a step."""
        found = 0.0
        for index, stage in enumerate(self.stages):
            if stage.worker != worker:
                continue
            forward, backward = sum(stage.tensor_forward_bytes), sum(stage.tensor_backward_bytes)
            found += sum(self.shares) * (forward + (backward if self.plan.training else 0))
            if self.recomputes(index):
                found += sum(self.recomputed_shares) * forward
        return int(found)


def plan_costs(
    plan: Plan,
    profile: Profile,
    topology: Topology,
    *,
    cuts: Sequence[int],
    sizes: Sequence[int],
    tensor: Sequence[TensorTraffic] | None = None,
    model_overheads: ModelOverheads | None = None,
    engine_overheads: EngineOverheads | None = None,
    codecs: Sequence[LinkCodec] | None = None,
    whole: Profile | None = None,
    serial_s: float | None = None,
) -> PlanCosts:
    """The costs of a plan whose cuts are known; `sizes` are the samples of each micro-batch of one replica.

    ``whole`` is the profile with whole layers, where `profile` is that of one worker of a tensor axis. ``serial_s`` is
    the whole batch on one device alone, where it is known; otherwise by the same profile.
    """
    model_overheads, engine_overheads = model_overheads or ModelOverheads(), engine_overheads or EngineOverheads()
    if plan.training and not profile.training:
        raise UsageError(
            f"the profile of {profile.model!r} holds forward passes alone, but the plan trains: profile it for training"
        )
    units, num_stages = profile.units, len(cuts) + 1
    if num_stages != plan.num_stages:
        raise UsageError(f"the plan has {plan.num_stages} stages, but {len(cuts)} cuts make {num_stages}")
    traffic = tensor or [TensorTraffic()] * len(units)
    crowded = engine_overheads.crowded(topology.num_on_host())
    speeds = topology.speeds()
    forward_scale, backward_scale = _glue(profile)
    bounds = list(zip((0, *(cut + 1 for cut in cuts)), (*cuts, len(units) - 1), strict=True))
    held = _Sums([unit.parameter_bytes for unit in units])
    kept = _Sums([unit.saved_bytes for unit in units])
    tensor_group, data_group = topology.group("tensor"), topology.group("data")
    sizes_seen = {one for unit in traffic for one in (*unit.forward_bytes, *unit.backward_bytes)}
    sum_s = {one: all_reduce_s(tensor_group, one) for one in sizes_seen}
    workers, alone = plan.stage_workers, _alone([unit.parameter_bytes for unit in units])
    several = _in_several([unit.parameter_bytes for unit in units], bounds)
    common = [one for one in several if workers[one[1]] == workers[one[2]]]
    there: dict[int, int] = {}  # gradients of a unit that a later stage of its worker makes, whose backward comes first
    for before, _, _, size in common:
        there[before] = there.get(before, 0) + size
    stages = []
    for index, (first, last) in enumerate(bounds):
        own, slow = units[first : last + 1], crowded / speeds[workers[index]]
        forward = sum(unit.forward.median_s for unit in own) * forward_scale * slow
        backward_input = sum(unit.backward_input.median_s for unit in own) * backward_scale * slow
        backward_weight = sum(unit.backward_weight.median_s for unit in own) * backward_scale * slow
        exchanged = traffic[first : last + 1]
        forward_sums = tuple(itertools.chain.from_iterable(unit.forward_bytes for unit in exchanged))
        backward_sums = tuple(itertools.chain.from_iterable(unit.backward_bytes for unit in exchanged))
        parameter_bytes, saved_bytes = held.of(first, last), kept.of(first, last)
        input_bytes = units[first - 1].crossing_bytes if first else own[0].recompute_saved_bytes
        gathers = [all_gather_s(data_group, unit.parameter_bytes.total) for unit in own] if plan.shard else [0.0]
        hidden = (1 - _shard_cost(topology, engine_overheads)) * sum(gathers)
        copied = _copied_s(parameter_bytes, plan, model_overheads) * slow if plan.shard else 0.0
        stages.append(
            StageCosts(
                first=first,
                last=last,
                worker=workers[index],
                forward_s=forward,
                backward_input_s=backward_input if plan.training else 0.0,
                backward_weight_s=backward_weight if plan.training else 0.0,
                tensor_forward_s=sum(sum_s[one] for one in forward_sums),
                tensor_backward_s=sum(sum_s[one] for one in backward_sums),
                tensor_forward_bytes=forward_sums,
                tensor_backward_bytes=backward_sums,
                gather_s=sum(gathers) - min(hidden, forward) + copied,
                accumulate_s=parameter_bytes * model_overheads.accumulate_s_per_byte * slow,
                parameter_bytes=parameter_bytes,
                buffer_bytes=sum(unit.buffer_bytes for unit in own),
                saved_bytes=saved_bytes,
                input_bytes=input_bytes,
                recompute_bytes=saved_bytes - (input_bytes if _keeps(own[0], input_bytes) else 0),
                # Where the stage runs again, the loss has gone backward before.
                gradient_rise_bytes=_rise(
                    units, first, last, there, 0 if plan.recomputes(index) else model_overheads.loss_kept_bytes
                ),
                alone_bytes=sum(alone[first : last + 1]) if plan.shard else 0,
                gathered_bytes=_gathered(own, alone[first : last + 1], parameter_bytes) if plan.shard else 0,
                work=stage_working_memory(
                    units,
                    first,
                    last,
                    model_overheads,
                    recomputed=plan.recomputes(index),
                    training=plan.training,
                    # Of several micro-batches the sums of gradients are whole until the last.
                    held_share=1 / plan.mesh.data if plan.shard and len(sizes) == 1 else 1.0,
                    gathered=alone if plan.shard else (),
                ),
                sends_bytes=own[-1].crossing_bytes if index < num_stages - 1 else 0,
            )
        )
    if serial_s is None:
        samples = sum(sizes) * plan.mesh.data / profile.batch_size
        serial_s = _serial_s(plan, whole or profile, model_overheads, samples) / max(speeds)
    return PlanCosts(
        plan=plan,
        topology=topology,
        stages=tuple(stages),
        shares=tuple(size / profile.batch_size for size in sizes),
        model_overheads=model_overheads,
        engine_overheads=engine_overheads,
        codecs=tuple(codecs) if codecs else (NO_CODEC,) * (num_stages - 1),
        gradients=tuple(
            (unit.parameter_bytes.added(first), unit.backward_s)
            for first, last in bounds
            for unit in units[first : last + 1]
        ),
        tied_bytes=sum(size for _, _, _, size in several) - sum(size for _, _, _, size in common),
        common=tuple(one[1:] for one in common),
        batch_bytes=_batch_bytes(plan, profile),
        result_bytes=units[-1].output_bytes,
        serial_s=serial_s,
        crowded=crowded,
    )


def scattering_s(costs: PlanCosts, worker: int) -> float:
    """What the reduce-scatters of a sharded worker's gradients add to its computing."""
    group = costs.topology.group("data")
    own = [stage for stage in costs.stages if stage.worker == worker]
    sizes = [costs.gradients[at][0] for one in own for at in range(one.first, one.last + 1)]
    taken_s = sum(reduce_scatter_s(group, size) for size in sizes)
    if not taken_s:  # collectives that cost nothing: what if
        return 0.0
    copied_s = _copied_s(sum(sizes), costs.plan, costs.model_overheads) * costs.crowded
    return taken_s * _shard_cost(costs.topology, costs.engine_overheads) + copied_s


def _shard_cost(topology: Topology, terms: EngineOverheads) -> float:
    """Computing that is lost for each second of a shard's collective: a CPU waits for it, a GPU goes on."""
    on_cpu = any(one.kind == "cpu" for one in topology.cluster.devices)
    return 1.0 if on_cpu else terms.collective_cost


def _copied_s(num_bytes: int, plan: Plan, terms: ModelOverheads) -> float:
    """Shards are copied into one piece and, gathered, out of it; gradients alike, whose parts are summed then.

    Adding gradients reads two and writes one of each number, a copy one and one.
    """
    return num_bytes * (1 + 1 / plan.mesh.data) * terms.accumulate_s_per_byte * 2 / 3


def _glue(profile: Profile) -> tuple[float, float]:
    """What the units' forward and backward times must be multiplied by to sum to the whole model's.

    The whole model's is less surely known than its units', each measured more often: as far as its own spread explains
    the difference, there is none.
    """
    forward = sum(unit.forward.median_s for unit in profile.units)
    backward = sum(unit.backward_s for unit in profile.units)
    return _scale(profile.whole_forward, forward), _scale(profile.whole_backward, backward)


def _scale(whole: Time, units_s: float) -> float:
    if not units_s or not whole.median_s:
        return 1.0
    return min(max(units_s, whole.median_s - whole.spread_s), whole.median_s + whole.spread_s) / units_s


def _serial_s(plan: Plan, profile: Profile, terms: ModelOverheads, samples: float) -> float:
    """One device, the same micro-batches one after the other, no recomputation; one optimiser's step."""
    forward_scale, backward_scale = _glue(profile)
    once = sum(unit.forward.median_s for unit in profile.units) * forward_scale + terms.loss_forward_s
    if not plan.training:
        return samples * once
    once += sum(unit.backward_s for unit in profile.units) * backward_scale + terms.loss_backward_s
    size = amount_of([unit.parameter_bytes for unit in profile.units], 0, len(profile.units) - 1)
    return samples * once + size * terms.optimizer_s_per_byte


def _rise(units: Sequence[UnitProfile], first: int, last: int, there: Mapping[int, int], loss_kept_bytes: int) -> int:
    """The highest that gradients made exceed activations freed, going backward through the loss and the units.

    Inside a unit both go on side by side. What a unit shares with an earlier one (a tied weight's gradient, which is
    there when all its uses are done; a tensor that both keep) comes and goes with that one. ``there`` are bytes of
    gradients, by unit, that another stage of the worker has made before.
    """

    highest, level = 0, -loss_kept_bytes if last == len(units) - 1 else 0
    for at in range(last, first - 1, -1):
        level += units[at].parameter_bytes.added(first) - there.get(at, 0) - units[at].saved_bytes.added(first)
        highest = max(highest, level)
    return highest


def _alone(held: Sequence[Amount]) -> list[int]:
    """Bytes of each unit's parameters where no other unit has any of them: FSDP2 gathers such a unit by itself."""
    shared = {index for at, one in enumerate(held) for earlier, _ in one.shares for index in (earlier, at)}
    return [0 if at in shared else one.total for at, one in enumerate(held)]


def _gathered(own: Sequence[UnitProfile], alone: Sequence[int], parameter_bytes: int) -> int:
    """Whole parameters all along a pass: what is not gathered alone; on a CPU, which tells no more, two units."""
    if any(unit.forward_working_bytes for unit in own):
        return parameter_bytes - sum(alone)
    return 2 * max(unit.parameter_bytes.total for unit in own)


def _keeps(unit: UnitProfile, input_bytes: int) -> bool:
    """Whether what a unit keeps has its inputs among it, as that of most layers has."""
    return unit.saved_bytes.total >= input_bytes


def _batch_bytes(plan: Plan, profile: Profile) -> int:
    first = profile.units[0]
    samples = plan.batch / profile.batch_size
    return int(samples * first.recompute_saved_bytes) if _keeps(first, first.recompute_saved_bytes) else 0


class _Sums:
    """Amounts of ranges of units, by running sums."""

    def __init__(self, amounts: Sequence[Amount]) -> None:
        self._upto = [0, *itertools.accumulate(one.total for one in amounts)]
        self._shares = [(index, earlier, part) for index, one in enumerate(amounts) for earlier, part in one.shares]

    def of(self, first: int, last: int) -> int:
        """What the units first … last hold, everything counted once."""
        twice = sum(part for index, earlier, part in self._shares if earlier >= first and index <= last)
        return self._upto[last + 1] - self._upto[first] - twice


def _in_several(amounts: Sequence[Amount], bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """Parameters that two stages hold: the unit that has them first, its stage, the later stage, bytes."""
    stage_of = {unit: stage for stage, (first, last) in enumerate(bounds) for unit in range(first, last + 1)}
    found = [
        (before, stage_of[before], stage_of[unit], size)
        for unit, one in enumerate(amounts)
        for before, size in one.shares
    ]
    return [one for one in found if one[1] != one[2]]
