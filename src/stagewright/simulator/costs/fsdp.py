"""Costs of FSDP: which parameters are gathered separately, and the time its collectives add to compute.

FSDP2 all-gathers each unit before its forward and backward, overlapped with the unit before it, and reduce-scatters
its gradients. A unit that shares a parameter with another one is gathered with the whole stage instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.profiler.profile import Amount, UnitProfile
from stagewright.simulator.collective import Group, all_gather_s, reduce_scatter_s
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Plan


def separately_gathered_bytes(parameters: Sequence[Amount]) -> list[int]:
    """Return each unit's parameter bytes, or 0 if it shares a parameter with another unit."""
    shared = {
        unit for index, amount in enumerate(parameters) for earlier, _ in amount.shares for unit in (earlier, index)
    }
    return [0 if index in shared else amount.total for index, amount in enumerate(parameters)]


def exposed_gather_s(
    units: Sequence[UnitProfile],
    forward_s: float,
    copies_s: float,
    group: Group,
    topology: Topology,
    overheads: EngineOverheads,
) -> float:
    """Return the time that a stage's all-gathers add to each pass, not hidden behind compute."""
    total_s = sum(all_gather_s(group, unit.parameter_bytes.total) for unit in units)
    hidden_s = (1 - _compute_lost_share(topology, overheads)) * total_s
    sizes = [unit.parameter_bytes.total for unit in units]
    return total_s - min(hidden_s, forward_s) + (_measured_copies_s(sizes, overheads) or copies_s)


def exposed_reduce_scatter_s(
    sizes: Sequence[int],
    plan: Plan,
    topology: Topology,
    model_overheads: ModelOverheads,
    engine_overheads: EngineOverheads,
    contention: float,
) -> float:
    """Return the time that reduce-scatters of gradients of these sizes add to a worker's compute."""
    group = topology.shard_group(plan.num_shards)
    total_s = sum(reduce_scatter_s(group, size) for size in sizes)
    if not total_s:  # a what-if with free collectives
        return 0.0
    measured = _measured_copies_s(sizes, engine_overheads) if plan.shard else 0.0
    copy = measured or copy_s(sum(sizes), plan, model_overheads) * contention
    return total_s * _compute_lost_share(topology, engine_overheads) + copy


def copy_s(num_bytes: int, plan: Plan, overheads: ModelOverheads) -> float:
    """Return the time to copy shards into a collective's buffer and gathered parameters out of it.

    Gradients are copied likewise. Accumulation reads two numbers and writes one, a copy reads one and writes one.
    """
    return num_bytes * (1 + 1 / plan.num_shards) * overheads.accumulate_s_per_byte * 2 / 3


def _measured_copies_s(sizes: Sequence[int], overheads: EngineOverheads) -> float:
    """Return the time of hooks and copies of one collective of each unit, a third of a step's; 0 if not measured."""
    units = [size for size in sizes if size]
    return (len(units) * overheads.fsdp_unit_s + sum(units) * overheads.fsdp_s_per_byte) / 3


def _compute_lost_share(topology: Topology, overheads: EngineOverheads) -> float:
    """Return the compute time lost per second of a collective: a CPU blocks on it, a GPU overlaps it."""
    on_cpu = any(group.kind == "cpu" for group in topology.cluster.devices)
    return 1.0 if on_cpu else overheads.collective_cost
