"""The process group of all workers: NCCL between GPUs (with Gloo for host tensors), Gloo between CPUs.

    one machine                     the loopback interface, whatever other networks it has
    several workers on one GPU      each gets its own NCCL host id, and NCCL sends through the loopback

NCCL refuses two workers on one GPU of one machine. With separate host ids, every plan can be run and checked for parity
on a single GPU; its speed there says nothing about several GPUs.
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
from stagewright.machine.gloo_threads import sched_batch_threads


def join_group(device: Device, *, worker: int, devices: Sequence[str] = (), one_machine: bool, **options: Any) -> None:
    """Initialize the process group; ``devices`` are the plan's, ``options`` are passed to torch."""
    on_cuda = device.kind == "cuda"
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if one_machine and loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if on_cuda and sum(Device.parse(name).index == device.index for name in devices) > 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-worker-{worker}")
    if on_cuda:
        torch.cuda.set_device(device.torch_device())
    with sched_batch_threads():
        dist.init_process_group(BACKENDS[device.kind], **options)
