"""One worker of a group by shared memory: every collective against its definition. Prints "equal" at the end."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from stagewright.shared_memory.process_group import HOST_BACKEND, register


def lose_a_worker(rank: int) -> None:
    """Worker 1 ends without a word in the middle of an exchange."""
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    dist.barrier()  # what it has written is read
    if rank == 1:
        os._exit(0)
    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:
        sys.stdout.write(f"{error}\n")
        sys.stdout.flush()
        os._exit(3)


def main(rank: int, size: int, meeting: str) -> None:
    store = dist.FileStore(meeting, size)
    dist.init_process_group(
        register(HOST_BACKEND), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    if meeting.endswith("-lost"):
        lose_a_worker(rank)
    values = [
        torch.randn(6 * size, 7, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(size)
    ]
    mine, total = values[rank], sum(values[1:], values[0])

    def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert torch.equal(found, expected), f"{name}: {(found - expected).abs().max()}"

    for op, expected in (
        (dist.ReduceOp.SUM, total),
        (dist.ReduceOp.MAX, torch.stack(values).amax(0)),
        (dist.ReduceOp.MIN, torch.stack(values).amin(0)),
        (dist.ReduceOp.AVG, total / size),
    ):
        tensor = mine.clone()
        dist.all_reduce(tensor, op=op)
        check(f"all-reduce {op}", tensor, expected)
    large = [torch.randn(300_001, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    tensor = large[rank].clone()
    dist.all_reduce(tensor)  # in two steps
    check("large all-reduce", tensor, sum(large[1:], large[0]))
    for root in range(size):
        tensor = mine.clone()
        dist.broadcast(tensor, src=root)
        check("broadcast", tensor, values[root])
        gathered = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
        dist.gather(mine, gathered, dst=root)
        for found, expected in zip(gathered or (), values, strict=rank == root):
            check("gather", found, expected)
        tensor = torch.empty_like(mine)
        dist.scatter(tensor, [value + r for r, value in enumerate(values)] if rank == root else None, src=root)
        check("scatter", tensor, values[rank] + rank)
        tensor = mine.clone()
        dist.reduce(tensor, dst=root)
        check("reduce", tensor, total if rank == root else mine)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine)
    for found, expected in zip(gathered, values, strict=True):
        check("all-gather", found, expected)
    joined = torch.empty(6 * size * size, 7, dtype=torch.float64)
    dist.all_gather_into_tensor(joined, mine)
    check("all-gather into a tensor", joined, torch.cat(values))
    part = torch.empty(6, 7, dtype=torch.float64)
    dist.reduce_scatter_tensor(part, mine)
    check("reduce-scatter of a tensor", part, total[6 * rank : 6 * rank + 6])
    dist.reduce_scatter(part, list(mine.split(6)))
    check("reduce-scatter", part, total[6 * rank : 6 * rank + 6])
    found = torch.empty_like(mine)
    dist.all_to_all_single(found, mine)
    check("all-to-all", found, torch.cat([value[6 * rank : 6 * rank + 6] for value in values]))
    # Unequal parts: worker r sends r + t + 1 rows to worker t.
    sizes_in, sizes_out = [rank + t + 1 for t in range(size)], [s + rank + 1 for s in range(size)]
    rows = torch.arange(sum(sizes_in), dtype=torch.float32) + 1000 * rank
    found = torch.empty(sum(sizes_out))
    dist.all_to_all_single(found, rows, sizes_out, sizes_in)
    starts = [sum(s + t + 1 for t in range(rank)) for s in range(size)]
    expected = [torch.arange(a, a + n) + 1000.0 * s for s, (a, n) in enumerate(zip(starts, sizes_out, strict=True))]
    check("uneven all-to-all", found, torch.cat(expected))

    # A worker that has only to give does not run ahead.
    exchange, values = dist.distributed_c10d._get_default_group().exchange, torch.empty(1 << 18)
    before = len(exchange._slots)
    for repeat in range(50):
        dist.broadcast(values.fill_(repeat) if rank == 0 else values, 0)
        if rank > 0:
            time.sleep(0.002)
            check("broadcast", values, torch.full_like(values, repeat))
    assert len(exchange._slots) <= before + 3, len(exchange._slots)

    # A ring of messages of many sizes, several in flight, received in order whatever is waited for first.
    after, before = (rank + 1) % size, (rank - 1) % size
    for repeat in range(20):
        sent = [torch.full((1 + 37 * i,), float(100 * repeat + i)) for i in range(5)]
        for value in sent:
            dist.isend(value.clone().mul_(rank + 1), after)
        buffers = [torch.empty_like(value) for value in sent]
        posted = [dist.irecv(buffer, before) for buffer in buffers]
        posted[3].wait()
        for work, buffer, value in zip(posted, buffers, sent, strict=True):
            work.wait()
            assert work.is_completed()
            check("message", buffer, value * (before + 1))
    dist.barrier()
    part = dist.new_group(list(range(size)))
    dist.all_reduce(torch.ones(1), group=part)
    dist.destroy_process_group(part)
    sys.stdout.write(f"equal {len(dist.distributed_c10d._get_default_group().exchange._slots)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
