"""One end of a link that is being measured.

    python -m stagewright.machine.link_worker RANK DEVICE BACKEND FILE SECONDS

    end 0   send n ──►            ──► receive n          half of a round trip is one message
    end 1        receive n ──► send n

Then the same with all-reduces, whose two steps count as a round trip.

All sizes are measured in several interleaved rounds, so that a disturbance does not affect one size only. Before each
round end 0 sends the number of round trips, 0 when the time is up; it prints the times as one line of JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stagewright.cluster.device import Device, pin_process
from stagewright.machine.gloo_threads import sched_batch_threads

if TYPE_CHECKING:
    import torch

SIZES_BYTES = (8, 4 * 2**10, 64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)
_ROUNDS = 10  # about this many fit into the time
_LEAST_ROUNDS = 3
_MOST = 200  # round trips of one size in a round


def measure(
    rank: int, trip: Callable[[torch.Tensor], None], target: torch.device, budget_s: float
) -> list[dict[str, Any]]:
    """Measure message times at every size, each for its share of the time; `trip` is one round trip of a tensor."""
    import torch

    tensors = [torch.zeros(num_bytes, dtype=torch.uint8, device=target) for num_bytes in SIZES_BYTES]
    counts = torch.ones(len(tensors), dtype=torch.int64, device=target)
    for tensor in (*tensors, counts):
        trip(tensor)
    times_s: list[list[float]] = [[] for _ in tensors]
    until_s = time.perf_counter() + budget_s
    for completed in itertools.count():
        trip(counts)  # end 1 receives end 0's counts
        numbers = counts.tolist()
        if not any(numbers):
            break
        for index, num_trips in enumerate(numbers):
            for _ in range(num_trips):
                begin = time.perf_counter()
                trip(tensors[index])
                times_s[index].append((time.perf_counter() - begin) / 2)
            share_s = budget_s / len(tensors) / _ROUNDS
            counts[index] = min(_MOST, max(1, int(share_s / (2 * statistics.median(times_s[index])))))
        if completed + 1 >= _LEAST_ROUNDS and time.perf_counter() > until_s:
            counts.zero_()
    points = []
    for num_bytes, taken_s in zip(SIZES_BYTES, times_s, strict=True):
        lower_s, median_s, upper_s = statistics.quantiles(taken_s, n=4, method="inclusive")
        spread_s = upper_s - lower_s
        points.append(
            {"num_bytes": num_bytes, "median_s": median_s, "spread_s": spread_s, "num_messages": 2 * len(taken_s)}
        )
    return points


def main(rank: int, device_text: str, backend: str, meeting: str, budget_s: float) -> None:
    """Pin this process, connect to the other end and measure."""
    device = Device.parse(device_text)
    pinned = pin_process(device)
    import torch
    from torch import distributed

    from stagewright.shared_memory.process_group import GPU_BACKEND, register

    target = device.torch_device()
    if target.type == "cuda":
        torch.cuda.set_device(target)
    if backend == GPU_BACKEND:
        register(GPU_BACKEND)
    store = distributed.FileStore(meeting, 2)  # type: ignore[attr-defined]
    with sched_batch_threads():
        distributed.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=100))

    def trip(tensor: torch.Tensor) -> None:
        if rank == 0:
            distributed.send(tensor, 1)
            distributed.recv(tensor, 1)
        else:
            distributed.recv(tensor, 0)
            distributed.send(tensor, 0)
        if target.type == "cuda":
            torch.cuda.synchronize(target)

    def all_reduce(tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.uint8:
            distributed.all_reduce(tensor.view(torch.float32))
        else:  # the number of round trips, which both ends need
            distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
        if target.type == "cuda":
            torch.cuda.synchronize(target)

    points = measure(rank, trip, target, budget_s)
    sums = measure(rank, all_reduce, target, budget_s / 2)
    if rank == 0:
        sys.stdout.write(json.dumps({"points": points, "sums": sums, "pinned": pinned}) + "\n")
        sys.stdout.flush()
    distributed.barrier()
    with contextlib.suppress(RuntimeError):  # the other end may have ended already
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
