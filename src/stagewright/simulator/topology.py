"""The mapping of a mesh to the devices of a cluster, and the links between its workers.

    2 hosts of 4, data=2, pipeline=4:   host a  0 1 2 3   replica 0      pipelines stay within a host,
                                        host b  4 5 6 7   replica 1      replicas communicate between hosts

Workers are assigned to devices by rank, numbered as in the engine: pipeline innermost. Peers along data and tensor are
equivalent, so the slowest one represents all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stagewright.cluster.cluster import FREE, Cluster, Link
from stagewright.errors import UsageError
from stagewright.simulator.action_graph import Integers
from stagewright.simulator.collective import Group
from stagewright.spec.plan import AXES, Axis, Mesh


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Topology:
    """A mesh on a cluster."""

    mesh: Mesh
    cluster: Cluster
    innermost: Axis = "pipeline"
    """Axis along which adjacent ranks differ; the engine uses pipeline."""
    shares: tuple[int, ...] = ()
    """Samples of each replica, where their devices differ in speed; (): as many for each."""
    free_collectives: bool = False
    """What-if: collectives cost nothing; P2P costs stay."""
    devices: Integers = field(init=False)
    """[data, tensor, pipeline]: the device of each worker."""
    hosts: Integers = field(init=False)
    """The host of each device."""
    _cache: dict[Any, Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        cluster, mesh = self.cluster, self.mesh
        if mesh.num_workers > cluster.num_devices:
            raise UsageError(
                f"the mesh {mesh} has {mesh.num_workers} workers, but the cluster has {cluster.num_devices} devices: "
                "use a smaller mesh or a larger cluster"
            )
        host_numbers: dict[tuple[str, int], int] = {}
        hosts = [host_numbers.setdefault(host, len(host_numbers)) for host in cluster.places]
        object.__setattr__(self, "hosts", np.array(hosts))
        if mesh.tensor_degrees:
            object.__setattr__(self, "devices", self._devices_of_degrees())
            return
        outer = [axis for axis in AXES if axis != self.innermost]
        order = (*outer, self.innermost)
        numbers = np.arange(mesh.num_workers).reshape([mesh.size(axis) for axis in order])
        object.__setattr__(self, "devices", np.transpose(numbers, [order.index(axis) for axis in AXES]))

    def _devices_of_degrees(self) -> Integers:
        """Return the devices of a mesh whose tensor degrees differ.

        Where a stage has fewer tensor workers than others, those it has are repeated as they send and receive.
        """
        mesh = self.mesh
        if self.innermost != "pipeline":
            raise UsageError(
                f"{mesh} has a tensor degree for each stage, whose ranks are numbered with the pipeline innermost: "
                f"leave out innermost = {self.innermost}"
            )
        tensor = range(mesh.tensor)
        return np.array(
            [
                [[mesh.rank(data, index % degree, p) for p, degree in enumerate(mesh.degrees)] for index in tensor]
                for data in range(mesh.data)
            ]
        )

    def _cached(self, key: Any, compute: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    def speeds(self) -> list[float]:
        """Return the speed of the slowest worker at each pipeline index, relative to the profiled device.

        A replica with a smaller share counts as faster, because costs are those of the largest share.
        """
        return self._cached("speeds", self._speeds)  # type: ignore[no-any-return]

    def _speeds(self) -> list[float]:
        speeds = np.array([device.speed for device in self.cluster.members])[self.devices]
        if self.shares:
            speeds = speeds * (max(self.shares) / np.maximum(self.shares, 1))[:, None, None]
        return [float(speed) for speed in speeds.min(axis=(0, 1))]

    def memory_limits(self) -> list[int | None]:
        """Return the smallest memory at each pipeline index; None: no limit."""
        return self._cached("limits", self._memory_limits)  # type: ignore[no-any-return]

    def _memory_limits(self) -> list[int | None]:
        unlimited = 2**62
        sizes = np.array(
            [unlimited if device.memory_bytes is None else device.memory_bytes for device in self.cluster.members]
        )
        limits = sizes[self.devices].min(axis=(0, 1))
        return [None if limit == unlimited else int(limit) for limit in limits]

    def num_on_host(self) -> int:
        """Return the largest number of workers on one host."""
        return self._cached("host", lambda: int(np.bincount(self.hosts[np.unique(self.devices)]).max()))  # type: ignore[no-any-return]

    def link(self, first: int, second: int) -> Link:
        """Return the slowest link between two pipeline indices, over all replicas."""
        if first == second:
            return FREE
        return self._outside if self._crosses(first, second) else self.cluster.links.intra_host

    def host_link(self) -> Link:
        """Return the link between a device and the memory of its host."""
        if self.cluster.links.host is None:
            raise UsageError(
                "offload copies activations between devices and host memory, and the cluster does not say how fast: "
                'add [links.host] with bandwidth = "25GB/s", or leave out offload'
            )
        return self.cluster.links.host

    def _crosses(self, first: int, second: int) -> bool:
        def compute() -> bool:
            return bool((self.hosts[self.devices[:, :, first]] != self.hosts[self.devices[:, :, second]]).any())

        return self._cached((first, second), compute)  # type: ignore[no-any-return]

    def group(self, axis: Axis) -> Group:
        """Return the process group along an axis; if the groups differ, the one spread over most hosts."""
        return self._cached(axis, lambda: self._group(axis))  # type: ignore[no-any-return]

    def _group(self, axis: Axis) -> Group:
        return self._group_of(np.moveaxis(self.hosts[self.devices], AXES.index(axis), -1))

    def tensor_group(self, degree: int) -> Group:
        """Return the tensor group of the stages of a tensor degree, as ``group`` does."""

        def compute() -> Group:
            indices = [index for index, own in enumerate(self.mesh.degrees) if own == degree]
            group = self._group_of(np.moveaxis(self.hosts[self.devices][:, :degree, indices], 1, -1))
            links = self.cluster.links
            if links.tensor is None or self.free_collectives or group.num_hosts > 1:
                return group
            return replace(group, inside=links.tensor, allreduce_points=links.tensor_sums)

        return self._cached(("tensor", degree), compute)  # type: ignore[no-any-return]

    def expert_group(self) -> Group:
        """Return the group among which experts are divided: neighbors along data."""
        return self._cached("expert", lambda: self._group_of(self._expert_blocks()))  # type: ignore[no-any-return]

    def same_experts_group(self) -> Group:
        """Return the group of replicas that hold the same experts."""
        blocks = self._expert_blocks()
        return self._cached("same", lambda: self._group_of(np.moveaxis(blocks, -2, -1)))  # type: ignore[no-any-return]

    def shard_group(self, num_shards: int) -> Group:
        """Return the group among which HSDP shards parameters: neighbors along data."""
        return self._cached(("shard", num_shards), lambda: self._group_of(self._blocks(num_shards)))  # type: ignore[no-any-return]

    def replicate_group(self, num_shards: int) -> Group:
        """Return the group of replicas that hold the same shards of HSDP."""
        blocks = self._blocks(num_shards)
        return self._cached(("replicate", num_shards), lambda: self._group_of(np.moveaxis(blocks, -2, -1)))  # type: ignore[no-any-return]

    def _expert_blocks(self) -> Integers:
        return self._blocks(self.mesh.expert)

    def _blocks(self, size: int) -> Integers:
        """Return the host of each worker: [tensor, pipeline, block of neighbors along data, replica in the block]."""
        hosts = np.moveaxis(self.hosts[self.devices], 0, -1)
        return hosts.reshape(*hosts.shape[:-1], -1, size)

    def _group_of(self, hosts: Integers) -> Group:
        rows = hosts.reshape(-1, hosts.shape[-1])
        return self._make_group(rows.shape[-1], min(_most_on_host(row) for row in np.unique(rows, axis=0)))

    def pair(self, first: int, second: int) -> Group:
        """Return the group of the workers at two pipeline indices; of all of them, where their degrees differ."""
        sizes = self.mesh.degrees[first], self.mesh.degrees[second]
        if sizes[0] == sizes[1]:
            return self._make_group(2, 1 if self._crosses(first, second) else 2)
        hosts = self.hosts[self.devices]
        return self._group_of(np.concatenate([hosts[:, : sizes[0], first], hosts[:, : sizes[1], second]], axis=1))

    def _make_group(self, num_workers: int, num_on_host: int) -> Group:
        crosses, free = num_on_host < num_workers, self.free_collectives
        inside = FREE if free else self.cluster.links.collective or self.cluster.links.intra_host
        return Group(
            num_workers=num_workers,
            num_on_host=num_on_host,
            inside=inside,
            outside=self._outside if crosses and not free else inside,
            allreduce_points=() if crosses or free else self.cluster.links.sums,
            # NCCL picks the fastest algorithm; Gloo always uses a ring.
            algorithm="best" if all(group.kind == "cuda" for group in self.cluster.devices) else "ring",
        )

    @property
    def _outside(self) -> Link:
        assert self.cluster.links.inter_host is not None, "a cluster of several hosts has a link between them"
        return self.cluster.links.inter_host


def _most_on_host(hosts: Sequence[int]) -> int:
    return int(np.bincount(np.asarray(hosts)).max())
