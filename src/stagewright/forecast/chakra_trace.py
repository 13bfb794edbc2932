"""A plan's step as Chakra execution traces, for ASTRA-sim and other simulators: one file a rank.

    computing     COMP_NODE with its duration in whole microseconds
    messages      COMM_SEND_NODE and COMM_RECV_NODE with comm_size, comm_src, comm_dst, comm_tag
    sums          COMM_COLL_NODE with comm_type and the name of its group

Times of computing are the forecast's; how long communication takes is for the simulator to find out. Needs the package
mlc-chakra: pip install 'stagewright[chakra]'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagewright.chakra_file import add_attributes, check_chakra, write_ranks
from stagewright.errors import UsageError
from stagewright.forecast.costs import PlanCosts
from stagewright.forecast.order import BACKWARD, FORWARD, KINDS, Order
from stagewright.forecast.times import step_order

__all__ = ["check_chakra", "write_chakra"]

_MOST_NODES = 2_000_000


def write_chakra(costs: PlanCosts, prefix: str | Path) -> list[Path]:
    """Write a file for every rank of the mesh; each appears whole or not at all."""
    proto = check_chakra()
    mesh = costs.plan.mesh
    order = step_order(costs)
    if order.num_nodes * mesh.data * mesh.tensor > _MOST_NODES:
        raise UsageError(
            f"{order.num_nodes} actions and messages on {mesh.data * mesh.tensor} pipelines are too many for traces; "
            "use fewer micro-batches or a smaller mesh"
        )
    return write_ranks(prefix, mesh.num_workers, lambda rank: _Rank(costs, order, rank, proto).nodes())


class _Rank:
    """The nodes of one rank."""

    def __init__(self, costs: PlanCosts, order: Order, rank: int, proto: Any) -> None:
        self.costs, self.order, self.rank, self.proto = costs, order, rank, proto
        self.place = costs.plan.mesh.coordinates(rank)
        self.found: list[Any] = []
        self.numbers: dict[int, int] = {}  # node of the order → id here

    def nodes(self) -> list[Any]:
        order, (data, tensor, worker) = self.order, self.place
        mesh = self.costs.plan.mesh
        compute, collective = self.costs.parts(order)
        for at in range(order.num_nodes):
            if order.is_message[at]:
                if worker in (order.worker[at], order.receiver[at]):
                    sends = order.worker[at] == worker
                    self._message(at, sends, mesh.rank(data, tensor, int(order.worker[at])), mesh)
                continue
            if order.worker[at] != worker:
                continue
            name = f"{KINDS[order.kind[at]].value}{order.stage[at]}.{order.microbatch[at]}"
            before = self._before(at)
            self.numbers[at] = self._add(name, "COMP_NODE", before, duration=compute[at])
            if collective[at] > 0:
                size = self._tensor_bytes(at)
                self.numbers[at] = self._sum(f"tensor {name}", size, [self.numbers[at]], f"tensor-{data}-{worker}")
        if mesh.data > 1 and self.costs.plan.training:
            size = sum(stage.parameter_bytes for stage in self.costs.stages if stage.worker == worker)
            last = [self.found[-1].id] if self.found else []
            self._sum("gradients", size, last, f"data-{tensor}-{worker}")
        return self.found

    def _before(self, at: int) -> list[int]:
        known = [int(one) for one in self.order.after_end[at] if one < self.order.num_nodes]
        return [self.numbers[one] for one in known if one in self.numbers]

    def _message(self, at: int, sends: bool, sender: int, mesh: Any) -> None:
        order, (data, tensor, _) = self.order, self.place
        edge = int(order.stage[at]) - (order.kind[at] == BACKWARD)
        size = self.costs.stages[edge].sends_bytes * self.costs.codecs[edge].ratio
        receiver = mesh.rank(data, tensor, int(order.receiver[at]))
        kind = "COMM_SEND_NODE" if sends else "COMM_RECV_NODE"
        way = "message" if order.kind[at] == FORWARD else "gradient"
        before = self._before(at) if sends else []
        self.numbers[at] = self._add(
            f"{way} {order.stage[at]}.{order.microbatch[at]}",
            kind,
            before,
            comm_size=max(1, round(size)),
            comm_src=sender,
            comm_dst=receiver,
            comm_tag=int((edge * 2 + (order.kind[at] == BACKWARD)) * order.num_microbatches + order.microbatch[at]),
        )

    def _tensor_bytes(self, at: int) -> int:
        passes = max(1, len(self.costs.shares)) * 2
        return max(1, self.costs.tensor_bytes // passes // max(1, len(self.costs.stages)))

    def _sum(self, name: str, size: int, before: list[int], group: str) -> int:
        kind = self.proto.ALL_REDUCE
        return self._add(name, "COMM_COLL_NODE", before, comm_type=int(kind), comm_size=int(size), pg_name=group)

    def _add(self, name: str, kind: str, before: list[int], duration: float = 0.0, **attributes: Any) -> int:
        node = self.proto.Node(id=len(self.found), name=name, type=getattr(self.proto, kind))
        node.data_deps.extend(sorted(set(before)))
        node.duration_micros = round(duration * 1e6)
        add_attributes(node, **attributes)
        self.found.append(node)
        return int(node.id)
