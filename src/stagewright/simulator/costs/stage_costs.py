"""Costs of each stage: the profiles of its units added up, on the device of its worker.

Measured unit times are scaled so that they sum to the whole model's time, measured in the same rounds: cache effects
and the model's code between units are thereby distributed over the units.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stagewright.cluster.cluster import FREE
from stagewright.profiler.profile import Profile, Time, UnitProfile
from stagewright.simulator.collective import all_gather_s, all_reduce_s, all_to_all_s
from stagewright.simulator.costs.expert_traffic import ExpertTraffic
from stagewright.simulator.costs.fsdp import (
    copy_s,
    exposed_gather_s,
    exposed_reduce_scatter_s,
    separately_gathered_bytes,
)
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.costs.range_sums import RangeSums
from stagewright.simulator.costs.recomputation import (
    StageRecomputation,
    UnitMemory,
    attention_memory,
    recompute_attention,
    recompute_units,
    recompute_whole,
    saves_inputs,
    treatments_of,
    unit_memory,
)
from stagewright.simulator.costs.tensor_traffic import StageSequenceTraffic, TensorTraffic, stage_sequence_traffic
from stagewright.simulator.costs.working_memory import StageWorkingMemory, stage_working_memory
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """One stage for one micro-batch of the profiled size, on its worker's device."""

    first: int
    """Index of its first unit."""
    last: int
    """Index of its last unit."""
    worker: int
    """Pipeline index of its worker."""
    forward_s: float
    backward_input_s: float
    """Compute of the input gradients."""
    backward_weight_s: float
    """Compute of the weight gradients."""
    tensor_forward_s: float
    """Collectives of the tensor axis in forward."""
    tensor_backward_s: float
    """Collectives of the tensor axis in backward, with a share of those that come once per step."""
    tensor_forward_bytes: tuple[int, ...]
    """Bytes of each all-reduce among them."""
    tensor_backward_bytes: tuple[int, ...]
    tensor_gathered_bytes: tuple[int, ...]
    """Bytes of each all-gather of the tensor axis in forward."""
    tensor_loss_bytes: tuple[int, ...]
    """Bytes of each all-reduce of the tensor axis in the loss."""
    sequence: StageSequenceTraffic
    """All-gathers and reduce-scatters of the tensor axis where sequences are divided."""
    expert_s: float
    """All-to-alls of the expert axis in forward; as many in backward."""
    expert_row_bytes: int
    """Bytes that each of dispatch and combine exchanges, over all layers."""
    expert_bytes: int
    """Parameters of this worker's experts: part of `parameter_bytes`, but not of the all-reduce over all replicas."""
    gather_s: float
    """Exposed FSDP all-gathers in each pass, with their copies."""
    scatter_s: float
    """Exposed FSDP reduce-scatters in each backward, with their copies; 0 if they come once per step."""
    accumulate_s: float
    """Gradient accumulation, from the second micro-batch on."""
    parameter_bytes: int
    buffer_bytes: int
    saved_bytes: int
    """Activations saved for backward."""
    input_bytes: int
    """The stage's inputs: all that activation checkpointing saves."""
    recompute_bytes: int
    """Activations that recomputation of the whole stage adds to the inputs."""
    recomputation: StageRecomputation
    """What recomputation and offload repeat and hold, if the plan has any."""
    offload_s: float
    """Copies of offloaded activations to the host in forward, with what can't hide them; as long in backward."""
    gradient_rise_bytes: int
    """Peak of the first backward above its start, as gradients appear and activations are freed; 0 where recomputed
    units have it in `recomputation`."""
    separate_bytes: int
    """With FSDP, parameters gathered unit by unit, twice per micro-batch."""
    gathered_bytes: int
    """With FSDP, gathered parameters held during a pass."""
    gather_rise_bytes: tuple[int, int]
    """With FSDP, gathered parameters and gradients of one unit above what the stage holds, in forward and backward;
    (0, 0) where working memory includes them."""
    working_memory: StageWorkingMemory
    sent_bytes: int
    """Bytes sent to the next stage; in training the gradient has the same size. 0 for the last stage."""
    copies: tuple[int, int] = (1, 1)
    """To how many workers one worker sends them, and one worker of the next stage the gradient."""

    @property
    def recompute_s(self) -> float:
        """Recomputation of one micro-batch, if the plan has any."""
        return self.forward_s * self.recomputation.forward_share

    @property
    def compute_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s


def time_scales(profile: Profile) -> tuple[float, float]:
    """Return the factors that make the units' forward and backward times sum to the whole model's.

    The whole model's time is less certain than its units', which are measured more often. A difference within its
    spread is therefore ignored.
    """
    forward = sum(unit.forward.median_s for unit in profile.units)
    backward = sum(unit.backward_s for unit in profile.units)
    return _scale(profile.whole_forward, forward), _scale(profile.whole_backward, backward)


def pass_scales(profile: Profile, num_microbatches: int) -> tuple[float, float]:
    """Return the factors on the units' forward and backward times in a step of that many micro-batches.

    On a GPU, passes in sequence take less than their parts alone. In training all micro-batches but the first follow
    another one; in inference all do.
    """
    forward_scale, backward_scale = time_scales(profile)
    alone_s = forward_scale * sum(unit.forward.median_s for unit in profile.units)
    alone_s += backward_scale * sum(unit.backward_s for unit in profile.units)
    if not profile.first_pass_s or not alone_s:
        return forward_scale, backward_scale
    num_first = 1 if profile.training else 0
    total_s = num_first * profile.first_pass_s + (num_microbatches - num_first) * profile.following_pass_s
    factor = total_s / num_microbatches / alone_s
    return factor * forward_scale, factor * backward_scale


def _scale(whole: Time, units_s: float) -> float:
    if not units_s or not whole.median_s:
        return 1.0
    return min(max(units_s, whole.median_s - whole.spread_s), whole.median_s + whole.spread_s) / units_s


class StageCostBuilder:
    """Computes the costs of a plan's stages; holds what they have in common."""

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        topology: Topology,
        traffic: Sequence[TensorTraffic],
        model_overheads: ModelOverheads,
        engine_overheads: EngineOverheads,
        num_microbatches: int,
        experts: Sequence[ExpertTraffic],
        degree: int,
    ) -> None:
        """``degree``: the tensor degree of the profile; with one for each stage, of the stages to build."""
        self.plan, self.units, self.topology, self.traffic = plan, profile.units, topology, traffic
        self.model_overheads, self.engine_overheads = model_overheads, engine_overheads
        self.contention = engine_overheads.contention_factor(topology.num_on_host())
        self.speeds = topology.speeds()
        self.forward_scale, self.backward_scale = pass_scales(profile, num_microbatches)
        parameters = [unit.parameter_bytes for unit in self.units]
        self._parameters, self._saved = RangeSums(parameters), RangeSums([unit.saved_bytes for unit in self.units])
        self._separate = separately_gathered_bytes(parameters)
        self._shard_group, tensor_group = topology.shard_group(plan.num_shards), topology.tensor_group(degree)
        sizes = {size for unit in traffic for size in (*unit.forward_bytes, *unit.backward_bytes, *unit.loss_bytes)}
        self._allreduce_s = {size: all_reduce_s(tensor_group, size) for size in sizes}
        self._tensor_group, self._num_microbatches = tensor_group, num_microbatches
        self.experts = experts
        self._treatments = treatments_of(plan, self.units)
        self._host_link = topology.host_link() if self._treatments.offloaded else FREE
        self._expert_group = topology.expert_group()
        # With several micro-batches, FSDP and ZeRO-1 keep gradients unsharded until the last one; so does FSDP that
        # gathers once per step.
        at_once = num_microbatches == 1 and ((plan.shard and not plan.gathers_once) or plan.zero == 1)
        is_sharded = plan.scatters_every_microbatch or at_once
        self._gradient_share = 1 / plan.num_shards if is_sharded else 1.0
        if plan.optimizer_in_backward:
            self._gradient_share = 0.0

    def build(self, index: int, first: int, last: int, existing_gradients: Mapping[int, int]) -> StageCosts:
        """Compute the costs of stage `index` with the units first … last.

        ``existing_gradients``: bytes of each unit's gradients that a later stage of the same worker has already made.
        """
        plan, units, overheads = self.plan, self.units[first : last + 1], self.model_overheads
        worker = plan.stage_workers[index]
        slowdown = self.contention / self.speeds[worker]
        backward_scale = self.backward_scale * slowdown if plan.training else 0.0
        forward_s = sum(unit.forward.median_s for unit in units) * self.forward_scale * slowdown
        traffic = self.traffic[first : last + 1]
        forward_bytes = tuple(itertools.chain.from_iterable(unit.forward_bytes for unit in traffic))
        backward_bytes = tuple(itertools.chain.from_iterable(unit.backward_bytes for unit in traffic))
        gathered = tuple(itertools.chain.from_iterable(unit.gathered_bytes for unit in traffic))
        loss_sizes = tuple(itertools.chain.from_iterable(unit.loss_bytes for unit in traffic))
        sequence = stage_sequence_traffic(traffic)
        parameter_bytes, saved_bytes = self._parameters.of(first, last), self._saved.of(first, last)
        rows = [size for unit in self.experts[first : last + 1] for size in unit.row_bytes]
        expert_bytes = sum(unit.parameter_bytes for unit in self.experts[first : last + 1])
        held_bytes = expert_bytes // plan.mesh.expert if plan.mesh.expert > 1 else 0
        parameter_bytes -= expert_bytes - held_bytes if plan.mesh.expert > 1 else 0
        input_bytes = self.units[first - 1].crossing_bytes if first else units[0].recompute_saved_bytes
        # With recomputation, the loss backward is done before the stage's memory rises.
        loss_bytes = 0 if plan.recomputes(index) or last < len(self.units) - 1 else overheads.loss_kept_bytes
        separate = self._separate[first : last + 1]
        recomputation = self._recomputation(first, last, existing_gradients, loss_bytes)
        if not recomputation.units:
            recomputation = recompute_whole(input_bytes, forward_bytes, gathered, sequence)
        return StageCosts(
            first=first,
            last=last,
            worker=worker,
            forward_s=forward_s,
            backward_input_s=sum(unit.backward_input.median_s for unit in units) * backward_scale,
            backward_weight_s=sum(unit.backward_weight.median_s for unit in units) * backward_scale,
            tensor_forward_s=self._tensor_forward_s(traffic),
            tensor_backward_s=sum(self._allreduce_s[size] for size in backward_bytes)
            + self._sequence_backward_s(sequence),
            tensor_forward_bytes=forward_bytes,
            tensor_backward_bytes=backward_bytes,
            tensor_gathered_bytes=gathered,
            tensor_loss_bytes=loss_sizes,
            sequence=sequence,
            expert_s=self._expert_s(rows) if plan.mesh.expert > 1 else 0.0,
            expert_row_bytes=sum(rows) if plan.mesh.expert > 1 else 0,
            expert_bytes=held_bytes,
            gather_s=self._gather_s(units, forward_s, parameter_bytes, slowdown) if self._gathers_often else 0.0,
            scatter_s=self._scatter_s(units) if plan.shard and plan.scatters_every_microbatch else 0.0,
            accumulate_s=parameter_bytes * overheads.accumulate_s_per_byte * slowdown,
            parameter_bytes=parameter_bytes,
            buffer_bytes=sum(unit.buffer_bytes for unit in units),
            saved_bytes=saved_bytes,
            input_bytes=input_bytes,
            # A divided block saves its own shard of its input.
            recompute_bytes=saved_bytes
            - (input_bytes if saves_inputs(units[0], input_bytes) and not traffic[0].sequence.divided_bytes else 0),
            recomputation=recomputation,
            offload_s=self._offload_s(recomputation.offload_bytes, units, slowdown),
            gradient_rise_bytes=(
                0 if recomputation.units else self._gradient_rise(first, last, existing_gradients, loss_bytes)
            ),
            separate_bytes=sum(separate) if plan.shard else 0,
            gathered_bytes=parameter_bytes - sum(separate) if self._gathers_often else 0,
            gather_rise_bytes=(
                self._gather_rises(first, last, recomputed=plan.recomputes(index)) if self._gathers_often else (0, 0)
            ),
            working_memory=self._working_memory(index, first, last, max(gathered, default=0)),
            sent_bytes=units[-1].crossing_bytes if last < len(self.units) - 1 else 0,
        )

    def _offload_s(self, num_bytes: int, units: Sequence[UnitProfile], slowdown: float) -> float:
        """Return the time of a stage's copies, and of two units: they begin after the first and end before the last."""
        longest_s = max(unit.forward.median_s for unit in units) * self.forward_scale * slowdown
        return num_bytes / self._host_link.bandwidth_bytes_per_s + 2 * longest_s if num_bytes else 0.0

    def _tensor_forward_s(self, traffic: Sequence[TensorTraffic]) -> float:
        """Return the time of the tensor axis's collectives in the forward of consecutive units."""
        reduced = [size for unit in traffic for size in (*unit.forward_bytes, *unit.loss_bytes)]
        gathered = [size for unit in traffic for size in unit.gathered_bytes]
        exchanged = (*gathered, *stage_sequence_traffic(traffic).forward_bytes)
        return sum(self._allreduce_s[size] for size in reduced) + sum(
            all_gather_s(self._tensor_group, size) for size in exchanged
        )

    def _recomputation(self, first: int, last: int, existing: Mapping[int, int], loss_bytes: int) -> StageRecomputation:
        """Return the recomputation of the stage's chosen units; without units if there are none."""
        inside = self._treatments.within(first, last)
        if not inside.units:
            return StageRecomputation(held_bytes=0)
        gradients = [
            int((self.units[index].parameter_bytes.added(first) - existing.get(index, 0)) * self._gradient_share)
            for index in range(first, last + 1)
        ]
        if inside.units == inside.attention:
            found = recompute_attention(self.units, first, last, gradients, loss_bytes, inside.attention)
        else:
            found = recompute_units(
                self.units,
                first,
                last,
                inside,
                self.traffic,
                self.experts,
                self._tensor_forward_s,
                gradients,
                loss_bytes,
            )
        if not any(unit.forward_working_bytes for unit in self.units[first : last + 1]):
            return found
        return replace(found, rise_bytes=0, first_rise_bytes=0)  # working memory includes them

    def _sequence_backward_s(self, sequence: StageSequenceTraffic) -> float:
        """Return the time of the collectives of divided sequences in backward; gradients are summed once per step."""
        summed_s = all_reduce_s(self._tensor_group, sequence.partial_bytes) if sequence.partial_bytes else 0.0
        exchanged_s = sum(all_gather_s(self._tensor_group, size) for size in sequence.backward_bytes)
        return exchanged_s + summed_s / self._num_microbatches

    def _expert_s(self, rows: Sequence[int]) -> float:
        """Return the time of counts, dispatch and combine of each layer."""
        group = self._expert_group
        return sum(all_to_all_s(group, 0) + 2 * all_to_all_s(group, size) for size in rows)

    def _gather_s(self, units: Sequence[UnitProfile], forward_s: float, num_bytes: int, slowdown: float) -> float:
        copy = copy_s(num_bytes, self.plan, self.model_overheads) * slowdown
        return exposed_gather_s(units, forward_s, copy, self._shard_group, self.topology, self.engine_overheads)

    def _scatter_s(self, units: Sequence[UnitProfile]) -> float:
        return exposed_reduce_scatter_s(
            [unit.parameter_bytes.total for unit in units],
            self.plan,
            self.topology,
            self.model_overheads,
            self.engine_overheads,
            self.contention,
        )

    @property
    def _gathers_often(self) -> bool:
        """Whether FSDP gathers parameters in each pass."""
        return self.plan.shard and not self.plan.gathers_once

    def _gather_rises(self, first: int, last: int, *, recomputed: bool) -> tuple[int, int]:
        """Return the rise above a stage's start in forward, as activations are saved, and backward, as they are freed.

        A unit's full gradients take the place of its activations, unless they are accumulated and counted as such. A
        recomputed stage has all its units gathered when backward begins.
        """
        units, memory = self.units[first : last + 1], self._unit_memory(first, last)
        if not self.plan.training or any(unit.forward_working_bytes for unit in units):
            return 0, 0
        separate, forward, backward, saved = self._separate[first : last + 1], 0, 0, 0
        for activations, own in zip(memory, separate, strict=True):
            saved += 0 if recomputed else activations.held_bytes
            forward = max(forward, saved + own)
        freed, held = 0, sum(separate)
        for activations, own in zip(reversed(memory), reversed(separate), strict=True):
            gathered, again = held if recomputed else own, activations.added_bytes
            unit_saved = activations.held_bytes + again
            gradients = own - unit_saved if self._gradient_share < 1 else 0
            backward = max(backward, gathered + again - freed + max(0, gradients))
            freed, held = freed + unit_saved - again, held - own
        return forward, backward

    def _working_memory(self, index: int, first: int, last: int, whole_bytes: int) -> StageWorkingMemory:
        return stage_working_memory(
            self.units,
            first,
            last,
            self.model_overheads,
            recomputed=self.plan.recomputes(index),
            by_unit=self._unit_memory(first, last) if self._treatments.units else None,
            offloaded=self._treatments.offloaded,
            training=self.plan.training,
            whole_bytes=whole_bytes,
            held_share=self._gradient_share,
            gathered=self._separate if self._gathers_often else (),
        )

    def _unit_memory(self, first: int, last: int) -> list[UnitMemory]:
        """Return the activations of each unit of the stage."""
        treatments = self._treatments
        if treatments.units and treatments.units == treatments.attention:
            return attention_memory(self.units, first, last, treatments.attention)
        return unit_memory(self.units, first, last, treatments)

    def _gradient_rise(self, first: int, last: int, existing: Mapping[int, int], loss_bytes: int) -> int:
        """Return the largest excess of allocated gradients over freed activations during backward.

        Within a unit both change together. Shared amounts belong to the earlier unit: a tied weight's gradient is
        complete, and a shared tensor is freed, when all uses have run backward.
        """
        peak, level = 0, -loss_bytes
        for index in range(last, first - 1, -1):
            unit = self.units[index]
            if self.plan.optimizer_in_backward:  # one gradient at a time, until its parameter is stepped
                peak = max(peak, level + unit.largest_parameter_bytes)
                level -= unit.saved_bytes.added(first)
                continue
            level += unit.parameter_bytes.added(first) - existing.get(index, 0) - unit.saved_bytes.added(first)
            peak = max(peak, level)
        return peak
