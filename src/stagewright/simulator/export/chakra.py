"""A plan's step as Chakra execution traces for ASTRA-sim and other simulators: one file per rank.

    all-gather ─► F0.0 ─► tensor all-reduce ─► send     gradients of a stage, statistics, tied weights ─► optimizer

    compute       COMP_NODE with its duration in whole microseconds
    P2P           COMM_SEND_NODE and COMM_RECV_NODE with comm_size, comm_src, comm_dst, comm_tag
    collectives   COMM_COLL_NODE with comm_type, comm_size and the name of its group: each tensor all-reduce; an
                  all-reduce of every stage's gradients or, with FSDP, an all-gather before each pass and a
                  reduce-scatter

comm_size is a rank's input, as simulators read it: of an all-gather its shard, otherwise the whole tensor. Compute
times come from the forecast; the simulator determines the time of communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stagewright.errors import UsageError
from stagewright.files.chakra import Collective, Node, NodeType, write_ranks
from stagewright.simulator.action_graph import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    ActionGraph,
    Floats,
)
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.costs.tensor_traffic import StageSequenceTraffic
from stagewright.simulator.gradient_allreduce import statistics_bytes
from stagewright.simulator.simulate import optimizer_s
from stagewright.simulator.step_times import step_graph

_MAX_NODES = 2_000_000


def write_chakra(costs: PlanCosts, prefix: str | Path) -> list[Path]:
    """Write one file per rank, each atomically."""
    mesh = costs.plan.mesh
    if mesh.expert > 1:
        raise UsageError(f"the all-to-alls of expert = {mesh.expert} are not written to Chakra traces: leave it out")
    if mesh.tensor_degrees:
        raise UsageError(f"the transfers of {mesh} are not written to Chakra traces: use tensor = {mesh.tensor}")
    graph = step_graph(costs)
    sizes = ("tensor_forward_bytes", "tensor_backward_bytes", "tensor_gathered_bytes", "tensor_loss_bytes")
    num_collectives = sum(len(getattr(stage, name)) for stage in costs.stages for name in sizes)
    num_collectives += sum(
        len(stage.sequence.forward_bytes) + len(stage.sequence.backward_bytes) for stage in costs.stages
    )
    num_nodes = graph.num_nodes + num_collectives * graph.num_microbatches
    if num_nodes * mesh.data * mesh.tensor > _MAX_NODES:
        raise UsageError(
            f"{num_nodes} actions, P2P transfers and all-reduces on {mesh.data * mesh.tensor} pipelines exceed the "
            f"limit of {_MAX_NODES} nodes; use fewer micro-batches or a smaller mesh"
        )
    compute_s, _ = costs.node_times(graph)
    return write_ranks(prefix, mesh.num_workers, lambda rank: _Rank(costs, graph, compute_s, rank).nodes())


class _Rank:
    """The nodes of one rank."""

    def __init__(self, costs: PlanCosts, graph: ActionGraph, compute_s: Floats, rank: int) -> None:
        self.costs, self.graph, self.compute_s = costs, graph, compute_s
        self.coordinates = costs.plan.mesh.coordinates(rank)
        self._nodes: list[Node] = []
        self.ids: dict[int, int] = {}  # graph node → Chakra id
        self.backward: dict[int, int] = {}  # stage → Chakra id of its latest backward

    def nodes(self) -> list[Node]:
        graph, worker = self.graph, self.coordinates[2]
        for node in range(graph.num_nodes):
            if graph.is_p2p[node]:
                if worker in (graph.worker[node], graph.receiver[node]):
                    self._add_p2p(node)
            elif graph.worker[node] == worker:
                self._add_action(node)
        if self.costs.plan.training:
            self._add_step_end()
        return self._nodes

    def _share(self, node: int) -> float:
        return self.costs.shares[int(self.graph.microbatch[node]) % len(self.costs.shares)]

    def _dependencies(self, node: int) -> list[int]:
        return [self.ids[int(before)] for before in self.graph.after_end[node] if int(before) in self.ids]

    def _add_action(self, node: int) -> None:
        graph, plan, (data, tensor, worker) = self.graph, self.costs.plan, self.coordinates
        index, kind = int(graph.stage[node]), int(graph.kind[node])
        stage = self.costs.stages[index]
        name = f"{KINDS[kind].value}{index}.{graph.microbatch[node]}"
        before, duration = self._dependencies(node), float(self.compute_s[node])
        is_first = kind == FORWARD and int(graph.microbatch[node]) == 0
        gathers = is_first if plan.gathers_once else kind != BACKWARD_WEIGHT
        if plan.shard and stage.parameter_bytes and gathers:
            size = -(-stage.parameter_bytes // plan.num_shards)
            gather = self._collective(f"gather {name}", Collective.ALL_GATHER, size, before, f"data-{tensor}-{worker}")
            before, duration = [*before, gather], duration - stage.gather_s
        last = self._add(name, NodeType.COMP_NODE, before, duration_s=duration)
        for collective, size in self._tensor_collectives(node):
            num_bytes = round(size * self._share(node))
            last = self._collective(f"tensor {name}", collective, num_bytes, [last], f"tensor-{data}-{worker}")
        if plan.shard and plan.scatters_every_microbatch and kind == BACKWARD and stage.parameter_bytes:
            size, group = stage.parameter_bytes, f"data-{tensor}-{worker}"
            last = self._collective(f"gradients {name}", Collective.REDUCE_SCATTER, size, [last], group)
        self.ids[node] = last
        if kind != FORWARD:
            self.backward[index] = last

    def _tensor_collectives(self, node: int) -> list[tuple[Collective, int]]:
        """Return an action's tensor collectives, for a micro-batch of the profiled size.

        An all-gather has the bytes of one worker's part.
        """
        index, kind = int(self.graph.stage[node]), self.graph.kind[node]
        stage = self.costs.stages[index]
        sequence = stage.sequence
        if kind == FORWARD:
            forward = self._forward_collectives(stage.tensor_forward_bytes, stage.tensor_gathered_bytes, sequence)
            return [*forward, *((Collective.ALL_REDUCE, size) for size in stage.tensor_loss_bytes)]
        # A split backward has them in its first half; the first stage, whose inputs need no gradient, in the second.
        if kind == (BACKWARD_INPUT if index == 0 else BACKWARD_WEIGHT):
            return []
        is_last = self.graph.microbatch[node] == len(self.costs.shares) - 1
        exempt = self.costs.plan.recompute == "except-last" and is_last
        again = stage.recomputation
        recomputed = self._forward_collectives(again.forward_bytes, again.gathered_bytes, again.sequence)
        return [
            *(recomputed if self.costs.recomputes(index) and not exempt else ()),
            *((Collective.ALL_REDUCE, size) for size in stage.tensor_backward_bytes),
            *self._gathers(sequence.backward_gathered_bytes),
            *((Collective.REDUCE_SCATTER, size) for size in sequence.backward_scattered_bytes),
        ]

    def _forward_collectives(
        self, reduced: Sequence[int], gathered: Sequence[int], sequence: StageSequenceTraffic
    ) -> list[tuple[Collective, int]]:
        return [
            *((Collective.ALL_REDUCE, size) for size in reduced),
            *self._gathers((*gathered, *sequence.forward_gathered_bytes)),
            *((Collective.REDUCE_SCATTER, size) for size in sequence.forward_scattered_bytes),
        ]

    def _gathers(self, sizes: Sequence[int]) -> list[tuple[Collective, int]]:
        return [(Collective.ALL_GATHER, -(-size // self.costs.plan.mesh.tensor)) for size in sizes]

    def _add_p2p(self, node: int) -> None:
        graph, mesh, (data, tensor, worker) = self.graph, self.costs.plan.mesh, self.coordinates
        backward = graph.kind[node] == BACKWARD
        edge = int(graph.stage[node]) - backward
        size = self.costs.stages[edge].sent_bytes * self.costs.codecs[edge].ratio * self._share(node)
        sends = graph.worker[node] == worker
        self.ids[node] = self._add(
            f"{'gradient' if backward else 'message'} {graph.stage[node]}.{graph.microbatch[node]}",
            NodeType.COMM_SEND_NODE if sends else NodeType.COMM_RECV_NODE,
            self._dependencies(node) if sends else [],
            comm_size=max(1, round(size)),
            comm_src=mesh.rank(data, tensor, int(graph.worker[node])),
            comm_dst=mesh.rank(data, tensor, int(graph.receiver[node])),
            comm_tag=int((edge * 2 + backward) * graph.num_microbatches + graph.microbatch[node]),
        )

    def _add_step_end(self) -> None:
        """Add gradient all-reduces over replicas, those of tied weights, and the optimizer step."""
        costs, (data, tensor, worker) = self.costs, self.coordinates
        before = list(self.backward.values())
        partial = sum(stage.sequence.partial_bytes for stage in costs.stages if stage.worker == worker)
        if partial:
            group = f"tensor-{data}-{worker}"
            before = [self._collective("gradients of norms", Collective.ALL_REDUCE, partial, before, group)]
        if costs.plan.mesh.data > 1:
            kind, group = (
                Collective.REDUCE_SCATTER if costs.plan.shard or costs.plan.zero else Collective.ALL_REDUCE,
                f"data-{tensor}-{worker}",
            )
            for index, last in self.backward.items():
                size = costs.stages[index].parameter_bytes
                if size and not (costs.plan.shard and costs.plan.scatters_every_microbatch):
                    before.append(self._collective(f"gradients of stage {index}", kind, size, [last], group))
            statistics = int(statistics_bytes(costs, worker))
            if statistics:
                before = [self._collective("statistics", Collective.ALL_REDUCE, statistics, before, group)]
        if costs.tied_bytes and worker in (0, costs.plan.mesh.pipeline - 1):
            group = f"tied-{data}-{tensor}"
            before = [self._collective("tied weights", Collective.ALL_REDUCE, costs.tied_bytes, before, group)]
        self._add("optimizer", NodeType.COMP_NODE, before, duration_s=optimizer_s(costs, worker))

    def _collective(self, name: str, kind: Collective, num_bytes: int, before: list[int], group: str) -> int:
        size = max(1, num_bytes)
        return self._add(name, NodeType.COMM_COLL_NODE, before, comm_type=int(kind), comm_size=size, pg_name=group)

    def _add(
        self, name: str, kind: NodeType, before: list[int], duration_s: float = 0.0, **attributes: int | str
    ) -> int:
        node = Node(
            id=len(self._nodes),
            name=name,
            type=kind,
            data_dependencies=sorted(set(before)),
            duration_us=round(duration_s * 1e6),
            attributes={"is_cpu_op": False, **attributes},
        )
        self._nodes.append(node)
        return node.id
