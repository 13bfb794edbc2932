"""What a plan takes at the very least, without its schedule being listed: step time and memory.

    worker w    ├ forwards before it ┤├──── all that it computes ────┤├ backwards behind it ┤├ sums, optimiser ┤

What comes before its first stage and after its last backward is one micro-batch's way through the other stages and
their links. Where backwards are split, a worker may do second halves meanwhile, and nothing is sure to come after it.
Neither bound ever exceeds the forecast, so that no plan is thrown away that could be among the best.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from stagewright.quantity import format_bytes
from stagewright.schedules.catalog import SCHEDULES
from stagewright.simulator.costs.plan_costs import ActionTimes, PlanCosts
from stagewright.simulator.gradient_allreduce import min_exposed_allreduce_s
from stagewright.simulator.memory import num_optimizer_states
from stagewright.simulator.action_graph import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Floats
from stagewright.simulator.simulate import step_end_s
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Plan

__all__ = ["memory_overflow", "parameter_overflow", "lower_bound_s", "max_codec_saving_s"]


def lower_bound_s(costs: PlanCosts) -> float:
    """The least that a step can take, whatever the order of its actions."""
    plan, times = costs.plan, costs.action_times()
    splits = SCHEDULES[plan.schedule].splits_backward
    first = {stage.worker: index for index, stage in reversed(list(enumerate(costs.stages)))}
    busy = [0.0] * plan.mesh.pipeline
    for stage, seconds in zip(costs.stages, _totals_s(costs, times, splits).tolist(), strict=True):
        busy[stage.worker] += seconds
    if not plan.training:  # steps follow each other without a gap
        return max(busy)
    fill, drain = _ways_s(costs, times)
    computed = [fill[first[worker]] + one for worker, one in enumerate(busy)]
    if not splits:  # the worker of the first stage ends when the last micro-batch has come back to it
        start = costs.stages[0].worker
        computed[start] = max(one + drain[first[worker]] for worker, one in enumerate(computed))
    longest = _backwards_s(times, max(costs.shares), costs.recomputed)
    ends = [one + min_exposed_allreduce_s(costs, worker, longest[first[worker]]) for worker, one in enumerate(computed)]
    return step_end_s(costs, ends)


def max_codec_saving_s(costs: PlanCosts) -> float:
    """How much lower the bound could be at most if messages had no bytes, as no codec makes them."""
    _, carried_s = costs.p2p_times()
    # On its way each crosses an edge twice; each action of a worker takes or gives at most all of them.
    handled = 8 * sum(costs.shares) * sum(stage.sent_bytes for stage in costs.stages)
    return 2 * min(costs.shares) * float(carried_s.sum()) + handled * costs.engine_overheads.message_s_per_byte


def _totals_s(costs: PlanCosts, times: ActionTimes, splits: bool) -> Floats:
    """What each stage computes in a step."""
    shares, again = costs.shares, len(costs.recomputed_shares)
    adds = [chunk > 0 or costs.copies_gradients for chunk in range(len(shares))]

    def total(which: int, low: int, high: int) -> Floats:
        """Of each kind, for these micro-batches, as they are or run again."""
        share, added = sum(shares[low:high]), sum(adds[low:high])
        work_s = (times.work_s[which] + times.tensor_s[which]) * share
        found: Floats = work_s + times.fixed_s[which] * (high - low) + times.adding_s[which] * added
        return found

    anew = total(1, 0, again) + total(0, again, len(shares))
    kinds = np.where(costs.recomputed[:, None], anew, total(0, 0, len(shares)))
    whole, halves = kinds[:, BACKWARD], kinds[:, BACKWARD_INPUT] + kinds[:, BACKWARD_WEIGHT]
    backward = np.minimum(whole, halves) if splits else whole
    found: Floats = kinds[:, FORWARD] + (backward if costs.plan.training else 0.0)
    return found


def _ways_s(costs: PlanCosts, times: ActionTimes) -> tuple[list[float], list[float]]:
    """Of each stage, the way of one micro-batch to it, and that of its gradient from it back through the first."""
    share = min(costs.shares)
    latency_s, carried_s = costs.p2p_times()
    links = latency_s + share * carried_s
    taken = (times.work_s[0] + times.tensor_s[0]) * share + times.fixed_s[0]
    again = costs.recomputed & (costs.plan.recompute != "except-last")  # the last micro-batch may be the one
    backward = _backwards_s(replace(times, adding_s=np.zeros_like(times.adding_s)), share, again)
    return (
        [0.0, *itertools.accumulate((taken[:-1, FORWARD] + links).tolist())],
        [0.0, *itertools.accumulate((backward[:-1] + links).tolist())],
    )


def _backwards_s(times: ActionTimes, share: float, again: npt.NDArray[np.bool_]) -> Floats:
    """A backward of each stage, in one piece."""
    taken = (times.work_s + times.tensor_s) * share + times.fixed_s + times.adding_s
    found: Floats = taken[again.astype(np.int64), np.arange(len(again)), BACKWARD]
    return found


def parameter_overflow(plan: Plan, topology: Topology, parameter_bytes: int) -> str | None:
    """What parameters, gradients and the optimiser's states alone need on some worker, however the model is cut.

    None where a device has as much.
    """
    limits = [_limit(plan, one) for one in topology.memory_limits()]
    known = [one for one in limits if one is not None]
    all_bytes = parameter_bytes * ((1 + _states(plan)) / _divide(plan) + _gradients(plan))
    needed = all_bytes / plan.mesh.pipeline
    return None if len(known) < len(limits) else _told(needed, max(known))


def memory_overflow(costs: PlanCosts) -> str | None:
    """What a worker needs at the very least, where its device has less; None where it may fit."""
    plan = costs.plan
    chunks = len(costs.shares)
    for worker, device_bytes in enumerate(costs.topology.memory_limits()):
        limit = _limit(plan, device_bytes)
        if limit is None:
            continue
        held = {"gpipe": chunks, "1f1b": min(chunks, plan.mesh.pipeline - worker)}.get(plan.schedule, 1)
        # What two stages of a worker have in common is there once.
        parameters = -sum(size for _, later, size in costs.common if costs.stages[later].worker == worker)
        activations = 0.0
        for index, stage in enumerate(costs.stages):
            if stage.worker == worker:
                kept = stage.input_bytes if costs.recomputes(index) else stage.saved_bytes
                parameters += stage.parameter_bytes
                activations += held * kept * min(costs.shares) if plan.training else 0
        # Activations have gone when all gradients are there.
        needed = parameters * (1 + _states(plan)) / _divide(plan) + max(activations, parameters * _gradients(plan))
        if needed > limit:
            return _told(needed, limit)
    return None


def _limit(plan: Plan, device_bytes: int | None) -> int | None:
    return min((one for one in (device_bytes, plan.memory_bytes) if one is not None), default=None)


def _states(plan: Plan) -> int:
    return num_optimizer_states(plan)


def _gradients(plan: Plan) -> int:
    """Gradients, as often as parameters; those that are sharded are left out, whose parts are rounded."""
    return int(plan.training and not plan.shard)


def _divide(plan: Plan) -> int:
    return plan.mesh.data if plan.shard else 1


def _told(needed: float, limit: int) -> str | None:
    return f"{format_bytes(needed)} of {format_bytes(limit)}" if needed > limit else None
