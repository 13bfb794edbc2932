"""Which link lies between which workers: a mesh laid over the devices of a cluster, rank by rank.

    2 hosts of 4, data=2, pipeline=4:   host a  0 1 2 3   replica 0      pipelines stay inside a host,
                                        host b  4 5 6 7   replica 1      replicas talk between hosts

Workers take devices in the order of their ranks, as the engine numbers them: pipeline innermost. Peers along data and
tensor are alike, so one stands for all: the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stagewright.cluster.cluster import FREE, Cluster, Link
from stagewright.errors import UsageError
from stagewright.simulator.collective import Group
from stagewright.simulator.action_graph import Integers
from stagewright.spec.plan import AXES, Axis, Mesh

__all__ = ["Topology"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Topology:
    """A mesh on a cluster."""

    mesh: Mesh
    """The mesh."""
    cluster: Cluster
    """The cluster."""
    innermost: Axis = "pipeline"
    """Which axis neighbours in rank differ along; the engine's is the pipeline."""
    free_collectives: bool = False
    """Whether collectives cost nothing, whatever messages cost: what if."""
    places: Integers = field(init=False)
    """[data, tensor, pipeline]: the device of each worker."""
    hosts: Integers = field(init=False)
    """The host of each device."""
    _known: dict[Any, Any] = field(init=False, repr=False, default_factory=dict)
    """What was asked before."""

    def __post_init__(self) -> None:
        cluster, mesh = self.cluster, self.mesh
        if mesh.num_workers > cluster.num_devices:
            raise UsageError(
                f"the mesh {mesh} has {mesh.num_workers} workers, but the cluster has {cluster.num_devices} devices: "
                "use a smaller mesh or a larger cluster"
            )
        known: dict[tuple[str, int], int] = {}
        numbered = [known.setdefault(place, len(known)) for place in cluster.places]
        object.__setattr__(self, "hosts", np.array(numbered))
        outer = [axis for axis in AXES if axis != self.innermost]
        order = (*outer, self.innermost)
        numbers = np.arange(mesh.num_workers).reshape([mesh.size(axis) for axis in order])
        object.__setattr__(self, "places", np.transpose(numbers, [order.index(axis) for axis in AXES]))

    def _once(self, key: Any, find: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def speeds(self) -> list[float]:
        """How fast the slowest worker at each place along the pipeline is, relative to the profiled device."""
        return self._once("speeds", self._speeds)  # type: ignore[no-any-return]

    def _speeds(self) -> list[float]:
        speeds = np.array([one.speed for one in self.cluster.members])
        return [float(one) for one in speeds[self.places].min(axis=(0, 1))]

    def memory_limits(self) -> list[int | None]:
        """The least memory at each place along the pipeline; None: not limited."""
        return self._once("limits", self._memory_limits)  # type: ignore[no-any-return]

    def _memory_limits(self) -> list[int | None]:
        without = 2**62
        sizes = np.array([without if one.memory_bytes is None else one.memory_bytes for one in self.cluster.members])
        limits = sizes[self.places].min(axis=(0, 1))
        return [None if one == without else int(one) for one in limits]

    def num_on_host(self) -> int:
        """The most workers that share a host."""
        return self._once("host", lambda: int(np.bincount(self.hosts[self.places.reshape(-1)]).max()))  # type: ignore[no-any-return]

    def link(self, first: int, second: int) -> Link:
        """The slowest link between two places along the pipeline, over all replicas."""
        if first == second:
            return FREE
        return self._outside if self._crosses(first, second) else self.cluster.links.intra_host

    def _crosses(self, first: int, second: int) -> bool:
        def find() -> bool:
            return bool((self.hosts[self.places[:, :, first]] != self.hosts[self.places[:, :, second]]).any())

        return self._once((first, second), find)  # type: ignore[no-any-return]

    def group(self, axis: Axis) -> Group:
        """The workers along an axis, and what is between them; where such groups differ, the most scattered one."""
        return self._once(axis, lambda: self._group(axis))  # type: ignore[no-any-return]

    def _group(self, axis: Axis) -> Group:
        at = AXES.index(axis)
        lines = np.moveaxis(self.hosts[self.places], at, -1).reshape(-1, self.mesh.size(axis))
        return self._members(self.mesh.size(axis), min(_largest_run(line) for line in np.unique(lines, axis=0)))

    def pair(self, first: int, second: int) -> Group:
        """Workers at two places along the pipeline, as a group."""
        return self._members(2, 1 if self._crosses(first, second) else 2)

    def _members(self, num_workers: int, num_on_host: int) -> Group:
        crosses, free = num_on_host < num_workers, self.free_collectives
        inside = FREE if free else self.cluster.links.collective or self.cluster.links.intra_host
        return Group(
            num_workers=num_workers,
            num_on_host=num_on_host,
            inside=inside,
            outside=self._outside if crosses and not free else inside,
            sums=() if crosses or free else self.cluster.links.sums,
            # GPUs sum by NCCL, which takes the quickest way; CPUs by Gloo, in a ring.
            algorithm="best" if all(one.kind == "cuda" for one in self.cluster.devices) else "ring",
        )

    @property
    def _outside(self) -> Link:
        assert self.cluster.links.inter_host is not None, "a cluster of several hosts has a link between them"
        return self.cluster.links.inter_host


def _largest_run(hosts: Sequence[int]) -> int:
    return int(np.bincount(np.asarray(hosts)).max())
