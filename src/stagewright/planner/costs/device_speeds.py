"""The speeds of a cluster's devices in a plan: shares of the batch and stages follow them."""

from __future__ import annotations

from dataclasses import replace

from stagewright.cluster.cluster import Cluster
from stagewright.spec.plan import Plan
from stagewright.spec.unequal_devices import MEASURED, relative_speeds


def with_measured_speeds(plan: Plan, cluster: Cluster) -> Plan:
    """Replace speeds that a run would measure by those of the cluster."""
    return with_cluster_speeds(plan, cluster) if plan.speeds == MEASURED else plan


def with_cluster_speeds(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan with the speeds of its workers' devices; without, where they are alike."""
    speeds = [device.speed for device in cluster.members[: plan.mesh.num_workers]]
    return replace(plan, speeds=relative_speeds(speeds))
