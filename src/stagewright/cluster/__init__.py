"""Devices, links and clusters."""

from __future__ import annotations

from stagewright.cluster.cluster import Cluster, DeviceGroup, Link, Links
from stagewright.cluster.device import Device, pin_process
from stagewright.cluster.file import read_cluster, write_cluster

__all__ = ["Cluster", "Device", "DeviceGroup", "Link", "Links", "pin_process", "read_cluster", "write_cluster"]
