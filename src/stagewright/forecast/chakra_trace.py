"""A plan's step as Chakra execution traces, for ASTRA-sim and other simulators: one file a rank.

    prefix.0.et   varint-delimited: GlobalMetadata(version="0.0.4"), Node, Node, …
    computing     COMP_NODE with its duration in whole microseconds
    messages      COMM_SEND_NODE and COMM_RECV_NODE with comm_size (int64: others are read as 0), comm_src, comm_dst,
                  comm_tag
    sums          COMM_COLL_NODE with comm_type and the name of its group

Times of computing are the forecast's; how long communication takes is for the simulator to find out. Needs the package
mlc-chakra: pip install 'stagewright[chakra]'.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import IO, Any

from stagewright.errors import UsageError
from stagewright.forecast.costs import PlanCosts
from stagewright.forecast.order import BACKWARD, FORWARD, KINDS, Order
from stagewright.forecast.times import step_order

__all__ = ["check_chakra", "write_chakra"]

_VERSION = "0.0.4"
_MOST_NODES = 2_000_000


def check_chakra() -> Any:
    """The package's protobuf, or how to get it."""
    try:
        from chakra.schema.protobuf import et_def_pb2
    except ImportError:
        raise UsageError(
            "Chakra traces need the package mlc-chakra (the one called chakra is another): pip install mlc-chakra"
        ) from None
    return et_def_pb2


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
    written = []
    for rank in range(mesh.num_workers):
        path = Path(f"{prefix}.{rank}.et")
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temporary, "xb") as file:
                _write(file, proto.GlobalMetadata(version=_VERSION))
                for node in _Rank(costs, order, rank, proto).nodes():
                    _write(file, node)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UsageError(f"can't write {path}: {error.strerror}") from None
        written.append(path)
    return written


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
        node.attr.append(self.proto.AttributeProto(name="is_cpu_op", bool_val=False))
        for key, value in attributes.items():
            if isinstance(value, str):
                node.attr.append(self.proto.AttributeProto(name=key, string_val=value))
            elif key == "comm_size" or key == "comm_type":
                node.attr.append(self.proto.AttributeProto(name=key, int64_val=value))
            else:
                node.attr.append(self.proto.AttributeProto(name=key, int32_val=value))
        self.found.append(node)
        return int(node.id)


def _write(file: IO[bytes], message: Any) -> None:
    """A message with its length before it, as a varint."""
    content = message.SerializeToString()
    length = len(content)
    while True:
        low, length = length & 0x7F, length >> 7
        file.write(bytes([low | (0x80 if length else 0)]))
        if not length:
            break
    file.write(content)
