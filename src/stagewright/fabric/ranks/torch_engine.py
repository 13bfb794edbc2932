"""The torch engine: the same messages through torch.distributed (Gloo, or NCCL on GPUs).

The backend chooses the algorithm; its steps and waits are not visible. Buffers, payloads and checks are those of the
sockets engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import Any

import numpy as np

from stagewright.errors import RunError, UsageError
from stagewright.fabric.ranks.flow import Flow
from stagewright.fabric.traffic.workload import Message, Workload
from stagewright.machine.gloo_threads import sched_batch_threads

_SIOCGIFADDR = 0x8915


def check_sizes(workload: Workload) -> None:
    """Raise UsageError for sizes that torch's collectives cannot send."""
    for message in workload.messages:
        for group in message.groups:
            if message.num_bytes % 4 or (
                message.algorithm in ("reduce-scatter", "all-gather", "all-to-all")
                and message.num_bytes % (4 * len(group))
            ):
                raise UsageError(
                    f"the torch engine cannot send {message.num_bytes} bytes as {message.algorithm} of {len(group)} "
                    f"ranks: use a multiple of {4 * len(group)}"
                )


class TorchEngine:
    """Engine with one process group per group of ranks."""

    def __init__(
        self,
        backend: str,
        workload: Workload,
        rank: int,
        addresses: list[tuple[str, int]],
        listener: socket.socket | None,
        host: str,
        timeout_s: float,
    ) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # silence warnings about hosts without a name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", find_interface(host))
        os.environ.setdefault("NCCL_SOCKET_IFNAME", find_interface(host))
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        self._torch, self._distributed = torch, distributed
        self.rank = rank
        self.receive_wait_s = [0.0] * workload.num_ranks
        self.send_wait_s = [0.0] * workload.num_ranks
        timeout = timedelta(seconds=timeout_s)
        address, port = addresses[0]
        options: dict[str, Any] = {}
        if listener is not None and rank == 0:
            options["master_listen_fd"] = listener.detach()
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            address, port, workload.num_ranks, is_master=rank == 0, timeout=timeout, use_libuv=True, **options
        )
        self._device = torch.device("cpu")
        if backend == "nccl":
            if not torch.cuda.device_count():
                raise UsageError(
                    "the nccl engine needs a GPU on every host, but this host has none; use gloo or sockets"
                )
            self._device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        groups = dict.fromkeys(group for message in workload.messages for group in message.groups)
        with sched_batch_threads():
            distributed.init_process_group(
                backend, store=store, rank=rank, world_size=workload.num_ranks, timeout=timeout
            )
            self._groups = {group: distributed.new_group(list(group), timeout=timeout) for group in groups}
        self._flags = torch.zeros(1, dtype=torch.int64, device=self._device)

    def retransmits(self) -> int:
        """Return 0: torch does not expose its connections."""
        return 0

    def barrier(self, trial: int, flags: int = 0) -> int:
        """Wait for all ranks; return the largest flags."""
        self._flags.fill_(flags)
        try:
            self._distributed.all_reduce(self._flags, op=self._distributed.ReduceOp.MAX)
        except RuntimeError as error:
            raise RunError(_first_line(error)) from None
        return int(self._flags.item())

    def run_message(self, flow: Flow, message: Message, group: tuple[int, ...]) -> None:
        """Run one message to completion."""
        distributed, torch = self._distributed, self._torch
        buffer = torch.from_numpy(flow.array).to(self._device)
        process_group, num_members = self._groups[group], len(group)
        position = group.index(self.rank)
        try:
            if message.algorithm == "reduce-scatter":
                offset, size = (value // flow.program.item_bytes for value in flow.program.chunks[position])
                result = torch.empty(size, dtype=buffer.dtype, device=self._device)
                distributed.reduce_scatter_tensor(result, buffer, group=process_group)
                buffer[offset : offset + size] = result
            elif message.algorithm == "all-gather":
                offset, size = (value // flow.program.item_bytes for value in flow.program.chunks[position])
                distributed.all_gather_into_tensor(buffer, buffer[offset : offset + size].clone(), group=process_group)
            elif message.algorithm == "all-to-all":
                locations = {chunk: (start // 4, size // 4) for chunk, (start, size) in flow.program.chunks.items()}
                sent = torch.cat(
                    [_part(buffer, locations[position * num_members + peer]) for peer in range(num_members)]
                )
                received = torch.empty_like(sent)
                distributed.all_to_all_single(received, sent, group=process_group)
                size = len(sent) // num_members
                for source in range(num_members):
                    _part(buffer, locations[source * num_members + position])[:] = received[
                        source * size : (source + 1) * size
                    ]
            elif message.algorithm == "broadcast":
                distributed.broadcast(buffer, group[0], group=process_group)
            elif message.algorithm == "pipeline":
                if position > 0:
                    distributed.recv(buffer, group[position - 1], group=process_group)
                if position + 1 < num_members:
                    distributed.send(buffer, group[position + 1], group=process_group)
            else:
                distributed.all_reduce(buffer, group=process_group)
            if self._device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise RunError(_first_line(error)) from None
        if self._device.type == "cuda":
            np.copyto(flow.array, buffer.cpu().numpy())

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._distributed.destroy_process_group()


def _part(buffer: Any, location: tuple[int, int]) -> Any:
    return buffer[location[0] : location[0] + location[1]]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["torch.distributed failed"])[0]


def find_interface(host: str) -> str:
    """Return the name of the network interface with an IPv4 address."""
    address = socket.inet_aton(socket.gethostbyname(host))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(query.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue
            if answer[20:24] == address:
                return name
    raise RunError(f"no interface of this host has the address {host}")
