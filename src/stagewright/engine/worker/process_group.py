"""Join the workers: NCCL between GPUs (with Gloo for what stays on the host), Gloo between CPUs.

    one machine                     its loopback, whatever other networks it has
    several workers on one GPU      NCCL takes each for a machine of its own, and sends through the loopback

NCCL refuses two workers on one GPU of one machine. With that, every plan can be tried, and proven, where there is one
GPU; how fast it would be on several it does not show.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from stagewright.cluster.device import Device
from stagewright.engine.worker.context import BACKENDS
from stagewright.machine.gloo_threads import patient_threads

__all__ = ["join_group"]


def join_group(device: Device, *, worker: int, devices: Sequence[str] = (), one_machine: bool, **options: Any) -> None:
    """Make the process group of all workers; ``devices`` are the plan's, ``options`` are torch's."""
    on_cuda = device.kind == "cuda"
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if one_machine and loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if on_cuda and sum(Device.parse(one).index == device.index for one in devices) > 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-worker-{worker}")
    if on_cuda:
        torch.cuda.set_device(device.torch_device())
    with patient_threads():
        dist.init_process_group(BACKENDS[device.kind], **options)
