"""One worker of a plan whose process groups go through shared memory. Prints its losses and those of a plain loop."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import stagewright as sw
from stagewright.engine.worker import context
from stagewright.shared_memory.process_group import HOST_BACKEND, register
from stagewright.spec.plan import OptimizerSpec


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def main(rank: int, mesh: str, shard: bool, meeting: str) -> None:
    torch.set_num_threads(1)
    context.BACKENDS["cpu"] = register(HOST_BACKEND)
    store = dist.FileStore(meeting, 2)
    dist.init_process_group(HOST_BACKEND, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    plan = sw.Plan.of(
        "a stack",
        batch=8,
        mesh=mesh,
        shard=shard,
        microbatches=4 if "pipeline" in mesh else 1,
        optimizer=OptimizerSpec(name="sgd", learning_rate=0.1),
    )
    trainer = sw.parallelize(make_model(), (batches[0], batches[0]), plan=plan, loss=nn.functional.mse_loss)
    losses = [trainer.step((batch, batch)).loss for batch in batches]
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(plain(batch), batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    sys.stdout.write(json.dumps([losses, expected]) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", sys.argv[4])
