"""The torch engine: the same messages through torch.distributed (Gloo, or NCCL where there are GPUs).

What PyTorch really does, with the algorithm that its backend chooses; steps and waits stay inside it. Buffers, payloads
and checks are those of the sockets engine.
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
from stagewright.fabric.ranks.sockets_engine import Flow
from stagewright.fabric.traffic.workload import Message, Workload
from stagewright.machine.gloo_threads import patient_threads

__all__ = ["TorchEngine", "check_sizes", "interface_of"]

_SIOCGIFADDR = 0x8915


def check_sizes(workload: Workload) -> None:
    """Refuse what torch's collectives can't send."""
    for message in workload.messages:
        for group in message.groups:
            if message.num_bytes % 4 or (
                message.algorithm in ("reduce-scatter", "all-gather", "all-to-all")
                and message.num_bytes % (4 * len(group))
            ):
                raise UsageError(
                    f"the torch engine can't send {message.num_bytes} bytes as {message.algorithm} of {len(group)} "
                    f"ranks: use a multiple of {4 * len(group)}"
                )


class TorchEngine:
    """Runs flows through one process group for each group of ranks."""

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
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hosts without a name are none of its business
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(host))
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface_of(host))
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        self._torch, self._distributed = torch, distributed
        self.rank = rank
        self.receive_wait_s = [0.0] * workload.num_ranks
        self.send_wait_s = [0.0] * workload.num_ranks
        timeout = timedelta(seconds=timeout_s)
        address, port = addresses[0]
        more: dict[str, Any] = {}
        if listener is not None and rank == 0:
            more["master_listen_fd"] = listener.detach()
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            address, port, workload.num_ranks, is_master=rank == 0, timeout=timeout, use_libuv=True, **more
        )
        self._device = torch.device("cpu")
        if backend == "nccl":
            if not torch.cuda.device_count():
                raise UsageError(
                    "the nccl engine needs a GPU on every host, and there is none here: use gloo or sockets"
                )
            self._device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        wanted = dict.fromkeys(group for message in workload.messages for group in message.groups)
        with patient_threads():
            distributed.init_process_group(
                backend, store=store, rank=rank, world_size=workload.num_ranks, timeout=timeout
            )
            self._groups = {group: distributed.new_group(list(group), timeout=timeout) for group in wanted}
        self._flags = torch.zeros(1, dtype=torch.int64, device=self._device)

    def retransmits(self) -> int:
        """Not known: the connections are inside torch."""
        return 0

    def barrier(self, trial: int, flags: int = 0) -> int:
        """Wait for all; returns the largest flags."""
        self._flags.fill_(flags)
        try:
            self._distributed.all_reduce(self._flags, op=self._distributed.ReduceOp.MAX)
        except RuntimeError as error:
            raise RunError(_first_line(error)) from None
        return int(self._flags.item())

    def run_message(self, flow: Flow, message: Message, group: tuple[int, ...]) -> None:
        """One message, to its end."""
        distributed, torch = self._distributed, self._torch
        whole = torch.from_numpy(flow.array).to(self._device)
        mine, members = self._groups[group], len(group)
        at = group.index(self.rank)
        try:
            if message.algorithm == "reduce-scatter":
                offset, size = (value // flow.program.item_bytes for value in flow.program.chunks[at])
                result = torch.empty(size, dtype=whole.dtype, device=self._device)
                distributed.reduce_scatter_tensor(result, whole, group=mine)
                whole[offset : offset + size] = result
            elif message.algorithm == "all-gather":
                offset, size = (value // flow.program.item_bytes for value in flow.program.chunks[at])
                distributed.all_gather_into_tensor(whole, whole[offset : offset + size].clone(), group=mine)
            elif message.algorithm == "all-to-all":
                places = {chunk: (start // 4, size // 4) for chunk, (start, size) in flow.program.chunks.items()}
                give = torch.cat([_part(whole, places[at * members + to]) for to in range(members)])
                take = torch.empty_like(give)
                distributed.all_to_all_single(take, give, group=mine)
                size = len(give) // members
                for source in range(members):
                    _part(whole, places[source * members + at])[:] = take[source * size : (source + 1) * size]
            elif message.algorithm == "broadcast":
                distributed.broadcast(whole, group[0], group=mine)
            elif message.algorithm == "pipeline":
                if at > 0:
                    distributed.recv(whole, group[at - 1], group=mine)
                if at + 1 < members:
                    distributed.send(whole, group[at + 1], group=mine)
            else:
                distributed.all_reduce(whole, group=mine)
            if self._device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise RunError(_first_line(error)) from None
        if self._device.type == "cuda":
            np.copyto(flow.array, whole.cpu().numpy())

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._distributed.destroy_process_group()


def _part(whole: Any, place: tuple[int, int]) -> Any:
    return whole[place[0] : place[0] + place[1]]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["torch.distributed failed"])[0]


def interface_of(host: str) -> str:
    """The name of the interface that has an IPv4 address."""
    wanted = socket.inet_aton(socket.gethostbyname(host))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue
            if answer[20:24] == wanted:
                return name
    raise RunError(f"no interface of this host has the address {host}")
