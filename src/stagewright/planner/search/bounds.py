"""Lower bounds on a plan's step time and memory, without simulating its schedule.

    worker w    ├ forwards before it ┤├──── all its compute ────┤├ backwards behind it ┤├ all-reduce, optimizer ┤

Before a worker's first forward and after its last backward, one micro-batch passes through the other stages and their
links. With a split backward, a worker may compute weight gradients meanwhile, so nothing is certain to come after it.
Neither bound ever exceeds the forecast, so no plan is discarded that could be among the best.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from stagewright.quantity import format_bytes
from stagewright.schedules.rules import SCHEDULES
from stagewright.simulator.action_graph import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Floats
from stagewright.simulator.costs.action_times import ActionTimes
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.gradient_allreduce import min_exposed_allreduce_s
from stagewright.simulator.memory import num_optimizer_states
from stagewright.simulator.simulate import step_end_s
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Plan


def lower_bound_s(costs: PlanCosts) -> float:
    """Return a lower bound on the step time for any order of the actions."""
    plan, times = costs.plan, costs.action_times()
    splits = SCHEDULES[plan.schedule].splits_backward
    first_stage = {stage.worker: index for index, stage in reversed(list(enumerate(costs.stages)))}
    busy = [0.0] * plan.mesh.pipeline
    for stage, seconds in zip(costs.stages, _totals_s(costs, times, splits).tolist(), strict=True):
        busy[stage.worker] += seconds
    if not plan.training:  # steps run without gaps
        return max(busy)
    warmup, drain = _path_s(costs, times)
    ends = [warmup[first_stage[worker]] + seconds for worker, seconds in enumerate(busy)]
    if not splits:  # the first stage's worker ends when the last gradient has returned to it
        ends[costs.stages[0].worker] = max(end + drain[first_stage[worker]] for worker, end in enumerate(ends))
    longest = _backwards_s(times, max(costs.shares), costs.recomputed)
    allreduce_s = [min_exposed_allreduce_s(costs, worker, longest[first_stage[worker]]) for worker in range(len(ends))]
    return step_end_s(costs, [end + seconds for end, seconds in zip(ends, allreduce_s, strict=True)])


def max_codec_saving_s(costs: PlanCosts) -> float:
    """Return an upper bound on what a codec can save: the cost of all P2P bytes."""
    _, transfer_s = costs.p2p_times()
    # A micro-batch crosses each edge twice; each action of a worker sends or receives at most all bytes.
    handled = 8 * sum(costs.shares) * sum(stage.sent_bytes for stage in costs.stages)
    return 2 * min(costs.shares) * float(transfer_s.sum()) + handled * costs.engine_overheads.message_s_per_byte


def _totals_s(costs: PlanCosts, times: ActionTimes, splits: bool) -> Floats:
    """Return the compute time of each stage in a step."""
    shares, num_recomputed = costs.shares, len(costs.recomputed_shares)
    accumulates = [index > 0 or costs.copies_gradients for index in range(len(shares))]

    def total(recomputed: int, low: int, high: int) -> Floats:
        """Return the time of each kind of action for these micro-batches, with or without recomputation."""
        share, num_accumulated = sum(shares[low:high]), sum(accumulates[low:high])
        seconds: Floats = (times.compute_s[recomputed] + times.tensor_s[recomputed]) * share
        seconds += times.fixed_s[recomputed] * (high - low) + times.accumulate_s[recomputed] * num_accumulated
        return seconds

    recomputed_s = total(1, 0, num_recomputed) + total(0, num_recomputed, len(shares))
    kinds = np.where(costs.recomputed[:, None], recomputed_s, total(0, 0, len(shares)))
    whole, halves = kinds[:, BACKWARD], kinds[:, BACKWARD_INPUT] + kinds[:, BACKWARD_WEIGHT]
    backward = np.minimum(whole, halves) if splits else whole
    seconds: Floats = kinds[:, FORWARD] + (backward if costs.plan.training else 0.0)
    return seconds


def _path_s(costs: PlanCosts, times: ActionTimes) -> tuple[list[float], list[float]]:
    """Return, for each stage, the time of one micro-batch to reach it and of its gradient back through the first."""
    share = min(costs.shares)
    latency_s, transfer_s = costs.p2p_times()
    links = latency_s + share * transfer_s
    seconds = (times.compute_s[0] + times.tensor_s[0]) * share + times.fixed_s[0]
    recomputed = costs.recomputed & (costs.plan.recompute != "except-last")  # it may be the last micro-batch
    backward = _backwards_s(replace(times, accumulate_s=np.zeros_like(times.accumulate_s)), share, recomputed)
    return (
        [0.0, *itertools.accumulate((seconds[:-1, FORWARD] + links).tolist())],
        [0.0, *itertools.accumulate((backward[:-1] + links).tolist())],
    )


def _backwards_s(times: ActionTimes, share: float, recomputed: npt.NDArray[np.bool_]) -> Floats:
    """Return the time of an unsplit backward of each stage."""
    seconds = (times.compute_s + times.tensor_s) * share + times.fixed_s + times.accumulate_s
    backward: Floats = seconds[recomputed.astype(np.int64), np.arange(len(recomputed)), BACKWARD]
    return backward


def parameter_overflow(plan: Plan, topology: Topology, parameter_bytes: int) -> str | None:
    """Return what parameters, gradients and optimizer states need on some worker for any cuts, if it does not fit."""
    limits = [_limit(plan, size) for size in topology.memory_limits()]
    known = [limit for limit in limits if limit is not None]
    needed = parameter_bytes * (held_per_parameter(plan) + unsharded_gradients(plan)) / plan.mesh.pipeline
    return None if len(known) < len(limits) else _format_overflow(needed, max(known))


def memory_overflow(costs: PlanCosts) -> str | None:
    """Return a lower bound on some worker's memory, if its device has less; None if the plan may fit."""
    plan = costs.plan
    num_microbatches = len(costs.shares)
    for worker, device_bytes in enumerate(costs.topology.memory_limits()):
        limit = _limit(plan, device_bytes)
        if limit is None:
            continue
        in_flight = {"gpipe": num_microbatches, "1f1b": min(num_microbatches, plan.mesh.pipeline - worker)}
        held = in_flight.get(plan.schedule, 1)
        # Parameters shared by two stages of a worker exist once.
        shared = costs.shared_parameters
        parameters = -sum(entry.num_bytes for entry in shared if costs.stages[entry.later].worker == worker)
        activations = 0.0
        for index, stage in enumerate(costs.stages):
            if stage.worker == worker:
                saved = stage.recomputation.held_bytes if costs.recomputes(index) else stage.saved_bytes
                parameters += stage.parameter_bytes
                activations += held * saved * min(costs.shares) if plan.training else 0
        # Activations are freed by the time all gradients exist.
        needed = parameters * held_per_parameter(plan)
        needed += max(activations, parameters * unsharded_gradients(plan))
        if needed > limit:
            return _format_overflow(needed, limit)
    return None


def _limit(plan: Plan, device_bytes: int | None) -> int | None:
    return min((limit for limit in (device_bytes, plan.memory_bytes) if limit is not None), default=None)


def unsharded_gradients(plan: Plan) -> int:
    """Return 1 if gradients count in full; sharded ones are left out, since their shards are rounded."""
    if plan.gathers_once:  # a stage is freed and its gradients are sharded when it is done
        return int(plan.num_stages == plan.mesh.pipeline)
    is_sharded = plan.shard or plan.zero == 2 or (plan.zero == 1 and plan.microbatches == 1)
    return int(plan.training and not is_sharded)


def held_per_parameter(plan: Plan) -> float:
    """Return the parameters and optimizer states that a worker holds, as a multiple of its parameters."""
    states = num_optimizer_states(plan)
    if plan.shard:
        return (1 + states) / plan.num_shards + plan.gathers_once
    return 1 + states / plan.num_shards


def _format_overflow(needed: float, limit: int) -> str | None:
    return f"{format_bytes(needed)} of {format_bytes(limit)}" if needed > limit else None
