"""Two worker processes with a core each, in one Gloo group."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

__all__ = ["run_two"]


def run_two(work: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``work(rank, *args)`` in two new processes, and return both results.

    The processes are pinned before they import torch, so the module of ``work`` imports it inside of functions.
    """
    context = multiprocessing.get_context("spawn")
    ports, results = context.Queue(), context.Queue()
    workers = [context.Process(target=_run, args=(work, rank, ports, results, args)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=600) for _ in workers)
    for worker in workers:
        worker.join()
    return [found[rank] for rank in range(2)]


def _run(work: Callable[..., Any], rank: int, ports: Any, results: Any, args: tuple[Any, ...]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0 if rank == 0 else ports.get(), 2, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        ports.put(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    results.put((rank, work(rank, *args)))
    dist.barrier()
    dist.destroy_process_group()
