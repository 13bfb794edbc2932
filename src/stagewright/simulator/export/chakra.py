"""A plan's step as Chakra execution traces, for ASTRA-sim and other simulators: one file a rank.

    gather ─► F0.0 ─► tensor sum ─► send       gradients of a stage, statistics, tied weights ─► optimizer

    computing     COMP_NODE with its duration in whole microseconds
    messages      COMM_SEND_NODE and COMM_RECV_NODE with comm_size, comm_src, comm_dst, comm_tag
    collectives   COMM_COLL_NODE with comm_type, comm_size and the name of its group: each all-reduce of the tensor
                  axis; an all-reduce of every stage's gradients or, where it is sharded, an all-gather before each
                  pass and a reduce-scatter

comm_size is what a rank puts in, as simulators read it: of an all-gather its own part, else the whole. StepTimes of
computing are the forecast's; how long communication takes is for the simulator to find out. Needs the package
mlc-chakra: pip install 'stagewright[chakra]'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.files.chakra import add_attributes, check_chakra, write_ranks
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.gradient_allreduce import statistics_bytes
from stagewright.simulator.action_graph import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KINDS, Floats, ActionGraph
from stagewright.simulator.simulate import optimizer_s
from stagewright.simulator.step_times import step_order

__all__ = ["check_chakra", "write_chakra"]

_MOST_NODES = 2_000_000


def write_chakra(costs: PlanCosts, prefix: str | Path) -> list[Path]:
    """Write a file for every rank of the mesh; each appears whole or not at all."""
    proto = check_chakra()
    mesh = costs.plan.mesh
    order = step_order(costs)
    sums = sum(len(stage.tensor_forward_bytes) + len(stage.tensor_backward_bytes) for stage in costs.stages)
    num_nodes = order.num_nodes + sums * order.num_microbatches
    if num_nodes * mesh.data * mesh.tensor > _MOST_NODES:
        raise UsageError(
            f"{num_nodes} actions, messages and sums on {mesh.data * mesh.tensor} pipelines are more than the "
            f"{_MOST_NODES} that traces may have; use fewer micro-batches or a smaller mesh"
        )
    compute_s, _ = costs.parts(order)
    return write_ranks(prefix, mesh.num_workers, lambda rank: _Rank(costs, order, compute_s, rank, proto).nodes())


class _Rank:
    """The nodes of one rank."""

    def __init__(self, costs: PlanCosts, order: ActionGraph, compute_s: Floats, rank: int, proto: Any) -> None:
        self.costs, self.order, self.compute_s, self.proto = costs, order, compute_s, proto
        self.place = costs.plan.mesh.coordinates(rank)
        self.found: list[Any] = []
        self.numbers: dict[int, int] = {}  # node of the order → id here
        self.backward: dict[int, int] = {}  # stage → id of its last backward until now

    def nodes(self) -> list[Any]:
        order, worker = self.order, self.place[2]
        for at in range(order.num_nodes):
            if order.is_p2p[at]:
                if worker in (order.worker[at], order.receiver[at]):
                    self._message(at)
            elif order.worker[at] == worker:
                self._action(at)
        if self.costs.plan.training:
            self._finish()
        return self.found

    def _share(self, at: int) -> float:
        return self.costs.shares[int(self.order.microbatch[at]) % len(self.costs.shares)]

    def _before(self, at: int) -> list[int]:
        return [self.numbers[int(one)] for one in self.order.after_end[at] if int(one) in self.numbers]

    def _action(self, at: int) -> None:
        order, plan, (data, tensor, worker) = self.order, self.costs.plan, self.place
        index, kind = int(order.stage[at]), int(order.kind[at])
        stage = self.costs.stages[index]
        name = f"{KINDS[kind].value}{index}.{order.microbatch[at]}"
        before, duration = self._before(at), float(self.compute_s[at])
        if plan.shard and stage.parameter_bytes and kind != BACKWARD_WEIGHT:
            size = -(-stage.parameter_bytes // plan.mesh.data)
            gather = self._collective(f"gather {name}", "ALL_GATHER", size, before, f"data-{tensor}-{worker}")
            before, duration = [*before, gather], duration - stage.gather_s
        last = self._add(name, "COMP_NODE", before, duration_s=duration)
        for size in self._tensor_bytes(at):
            given = round(size * self._share(at))
            last = self._collective(f"tensor {name}", "ALL_REDUCE", given, [last], f"tensor-{data}-{worker}")
        self.numbers[at] = last
        if kind != FORWARD:
            self.backward[index] = last

    def _tensor_bytes(self, at: int) -> tuple[int, ...]:
        """Bytes of the tensor axis' all-reduces of an action, each of a micro-batch of the profiled size."""
        index, kind = int(self.order.stage[at]), self.order.kind[at]
        stage = self.costs.stages[index]
        if kind == FORWARD:
            return stage.tensor_forward_bytes
        # Of a backward in two halves the first has them; of the first stage, whose inputs need no gradient, the second.
        if kind == (BACKWARD_INPUT if index == 0 else BACKWARD_WEIGHT):
            return ()
        spared = self.costs.plan.recompute == "except-last" and self.order.microbatch[at] == len(self.costs.shares) - 1
        again = stage.tensor_forward_bytes if self.costs.recomputes(index) and not spared else ()
        return (*again, *stage.tensor_backward_bytes)

    def _message(self, at: int) -> None:
        order, mesh, (data, tensor, worker) = self.order, self.costs.plan.mesh, self.place
        backward = order.kind[at] == BACKWARD
        edge = int(order.stage[at]) - backward
        size = self.costs.stages[edge].sends_bytes * self.costs.codecs[edge].ratio * self._share(at)
        sends = order.worker[at] == worker
        self.numbers[at] = self._add(
            f"{'gradient' if backward else 'message'} {order.stage[at]}.{order.microbatch[at]}",
            "COMM_SEND_NODE" if sends else "COMM_RECV_NODE",
            self._before(at) if sends else [],
            comm_size=max(1, round(size)),
            comm_src=mesh.rank(data, tensor, int(order.worker[at])),
            comm_dst=mesh.rank(data, tensor, int(order.receiver[at])),
            comm_tag=int((edge * 2 + backward) * order.num_microbatches + order.microbatch[at]),
        )

    def _finish(self) -> None:
        """What a training step ends with: sums over replicas, of tied weights over their holders, the optimiser."""
        costs, (data, tensor, worker) = self.costs, self.place
        before = list(self.backward.values())
        if costs.plan.mesh.data > 1:
            kind, group = "REDUCE_SCATTER" if costs.plan.shard else "ALL_REDUCE", f"data-{tensor}-{worker}"
            for index, last in self.backward.items():
                size = costs.stages[index].parameter_bytes
                if size:
                    before.append(self._collective(f"gradients of stage {index}", kind, size, [last], group))
            statistics = int(statistics_bytes(costs, worker))
            if statistics:
                before = [self._collective("statistics", "ALL_REDUCE", statistics, before, group)]
        if costs.tied_bytes and worker in (0, costs.plan.mesh.pipeline - 1):
            group = f"tied-{data}-{tensor}"
            before = [self._collective("tied weights", "ALL_REDUCE", costs.tied_bytes, before, group)]
        self._add("optimizer", "COMP_NODE", before, duration_s=optimizer_s(costs, worker))

    def _collective(self, name: str, kind: str, num_bytes: int, before: list[int], group: str) -> int:
        comm_type = int(getattr(self.proto, kind))
        return self._add(
            name, "COMM_COLL_NODE", before, comm_type=comm_type, comm_size=max(1, num_bytes), pg_name=group
        )

    def _add(self, name: str, kind: str, before: list[int], duration_s: float = 0.0, **attributes: Any) -> int:
        node = self.proto.Node(id=len(self.found), name=name, type=getattr(self.proto, kind))
        node.data_deps.extend(sorted(set(before)))
        node.duration_micros = round(duration_s * 1e6)
        add_attributes(node, **attributes)
        self.found.append(node)
        return int(node.id)
