"""One rank of a real training job that is slow on request; `benchmarks/stragglers_real.py` starts and steers it.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=… MASTER_PORT=… python benchmarks/jobs/straggling_job.py data=2,pipeline=2

The training loop is a user's: DDP, or the 1F1B schedule of torch.distributed.pipelining, on Gloo, with a DataLoader and
AdamW, and `sw.attach()` before the first step. A line on standard input asks for one recorded window of steps, and says
what is slow in it; the answer on standard output is the run folder.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset, default_collate

import stagewright as sw
from stagewright.spec.plan import Mesh

WIDTH, LAYERS, BATCH, MICROBATCHES = 384, 3, 64, 2
SAMPLE = 16  # rows of a sample: a batch has few, so that its collation has few operators
COLLECTED = 0.4  # of the steps of a faulty rank have a garbage collection


class _Slower(torch.autograd.Function):
    """Passes a tensor on after as many matrix products as a layer, times the given factor, in both directions."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor, extra: float) -> torch.Tensor:
        context.save_for_backward(x, weight)
        context.extra = extra
        _multiply(x, weight, extra)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        x, weight = context.saved_tensors
        _multiply(x, weight, 2 * context.extra)
        return gradients[0], None, None


def _multiply(x: torch.Tensor, weight: torch.Tensor, times: float) -> None:
    for part in range(int(times) + 1):
        rows = x[: int(len(x) * min(1.0, times - part))]
        if len(rows):
            torch.mm(rows, weight)


class Block(nn.Module):
    """A linear layer that may take longer than on other ranks."""

    extra = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.layer(x))
        return _Slower.apply(x, self.layer.weight.detach(), Block.extra) if Block.extra else x  # type: ignore[no-any-return]


class Loader:
    """Batches of a DataLoader, whose storage may be slow."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        shape = (8 * BATCH // SAMPLE, SAMPLE, WIDTH)
        data = TensorDataset(torch.randn(shape), torch.randn(shape))
        self._loader = DataLoader(data, batch_size=BATCH // SAMPLE, collate_fn=self._collate)

    def _collate(self, samples: list[Any]) -> Any:
        time.sleep(self.delay_s)
        return default_collate(samples)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._loader


class DataParallel:
    """DDP."""

    def __init__(self) -> None:
        self.model = nn.parallel.DistributedDataParallel(nn.Sequential(*[Block() for _ in range(LAYERS)]))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.mse_loss(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Pipeline:
    """1F1B of torch.distributed.pipelining, with an all-reduce of the gradients over replicas."""

    def __init__(self, mesh: Mesh) -> None:
        devices = init_device_mesh("cpu", (mesh.data, mesh.pipeline), mesh_dim_names=("dp", "pp"))
        self.index, self.num_stages = devices.get_local_rank("pp"), mesh.pipeline
        self.replicas = devices.get_group("dp") if mesh.data > 1 else None
        self.model = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        group = devices.get_group("pp")
        stage = PipelineStage(self.model, self.index, self.num_stages, torch.device("cpu"), group=group)
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.index == 0:
            self.schedule.step(x)
        elif self.index == self.num_stages - 1:
            self.schedule.step(target=y)
        else:
            self.schedule.step()
        if self.replicas is not None:
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self.replicas)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient) / dist.get_world_size(self.replicas))
        self.optimizer.step()
        self.optimizer.zero_grad()


def _collected(window: Mapping[str, Any]) -> Collection[int]:
    """Draw the steps with a garbage collection."""
    steps = range(window["steps"])
    return random.Random(window["seed"]).sample(steps, round(COLLECTED * len(steps)))


def main() -> None:
    torch.set_num_threads(1)
    mesh = Mesh.parse(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job: DataParallel | Pipeline = Pipeline(mesh) if mesh.pipeline > 1 else DataParallel()
    loader = Loader()
    batches = iter(loader)
    heap: list[Any] = []

    def train(steps: int, collected: Collection[int] = ()) -> None:
        for step in range(steps):
            x, y = (tensor.flatten(0, 1) for tensor in next(batches))
            if step in collected:
                gc.collect()
            job.step(x, y)

    gc.disable()  # as large training scripts do: only the fault collects
    train(3)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        window = json.loads(line)
        fault = window["fault"] or {"cause": None, "ranks": [], "size": 0.0}
        cause = fault["cause"] if rank in fault["ranks"] else None
        Block.extra = fault["size"] if cause == "worker" else 0.0
        loader.delay_s = fault["size"] if cause == "data loader" else 0.0
        heap[:] = [[number] for number in range(int(fault["size"]))] if cause == "garbage collector" else []
        collected = _collected(window) if cause == "garbage collector" else ()
        dist.barrier()
        run = sw.attach(window["root"], name=window["name"], profile_steps=window["profile_steps"])
        begin_s = time.perf_counter()
        train(window["steps"], collected)
        seconds = time.perf_counter() - begin_s
        run.stop()
        gc.collect()  # between windows
        print(json.dumps({"path": str(run.path), "seconds": seconds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
