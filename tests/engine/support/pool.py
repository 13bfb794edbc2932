"""Workers for the tests of the engine: Gloo processes that are started once and run one function after another.

    pool.run("jobs:pipeline_step", plan…)      on every worker; returns what each gave

A worker that raises fails the test with its traceback; a worker that does not answer in time ends the pool.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stagewright.engine.launch.fork_server import forked_workers

HERE = Path(__file__).parent


class Pool:
    """Some workers."""

    def __init__(self, num_workers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_workers, theirs), daemon=True)
            with forked_workers():
                process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        assert self.pipes[0].poll(240), "worker 0 did not start"
        port = self.pipes[0].recv()
        for pipe in self.pipes[1:]:
            pipe.send(port)

    def run(self, function: str, *args: Any, time_limit_s: float = 240, **kwargs: Any) -> list[Any]:
        """Run ``module:function(rank, *args, **kwargs)`` on every worker."""
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        answers, failures = [], []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(time_limit_s):
                self.close()
                raise AssertionError("\n".join([f"worker {rank} gave no answer to {function}", *failures]))
            good, answer = pipe.recv()
            if not good:
                failures.append(f"worker {rank}:\n{answer}")
                time_limit_s = 2
            answers.append(answer)
        assert not failures, "\n".join(failures)
        return answers

    def close(self) -> None:
        """End every worker."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


@contextmanager
def pools(keep: Collection[int] = ()) -> Iterator[Callable[[int], Pool]]:
    """Yield ``pool_of(n)``: n workers; one pool at a time is alive, beside those of the sizes to keep."""
    alive: dict[int, Pool] = {}

    def get(num_workers: int) -> Pool:
        pool = alive.get(num_workers)
        if pool is None or not all(process.is_alive() for process in pool.processes):
            for other in [size for size in alive if size not in (*keep, num_workers)]:
                alive.pop(other).close()
            alive[num_workers] = Pool(num_workers)
        return alive[num_workers]

    try:
        yield get
    finally:
        for pool in alive.values():
            pool.close()


def _serve(rank: int, num_workers: int, pipe: Connection) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", RANK=str(rank))
    sys.path[:0] = [str(HERE), str(HERE / "axes")]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Worker 0 takes a port that is free and keeps it: one that was looked for before could be another's by now.
    store = dist.TCPStore("127.0.0.1", 0 if rank == 0 else pipe.recv(), is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_workers)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            module, _, name = function.partition(":")
            pipe.send((True, getattr(importlib.import_module(module), name)(rank, *args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
