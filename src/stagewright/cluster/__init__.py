"""Devices: what one worker computes on."""

from __future__ import annotations

from stagewright.cluster.device import Device, pin_process

__all__ = ["Device", "pin_process"]
