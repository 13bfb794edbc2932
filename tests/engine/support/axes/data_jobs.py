"""Worker functions for tests of the data axis, run by ``pool``; each compares with the baseline itself."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import tensor_jobs
import torch
import torch.distributed as dist
from data_models import Passing, Picking, Routed, Series, Tied, build
from full_model import full_gradients, full_state_dict, load_full_state_dict
from tensor_jobs import max_relative_error, worst
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from stagewright.engine.batch.microbatch import split_sizes
from stagewright.engine.data.data_parallel import DataParallelReplica
from stagewright.engine.data.wrap import wrap_data_parallel
from stagewright.engine.pipeline.activation_checkpointing import CheckpointedForward
from stagewright.engine.tensor.apply import apply_tensor_parallel
from stagewright.graph import capture
from stagewright.planner.calibration.job import gather_rounds


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def local_rows(batch: int, num_replicas: int, index: int) -> tuple[slice, float]:
    """Return this replica's samples and weight; a replica without samples takes the first one with weight 0."""
    sizes = split_sizes(batch, num_replicas)
    first = sum(sizes[:index])
    return (slice(first, first + sizes[index]), sizes[index] / batch) if sizes[index] else (slice(0, 1), 0.0)


def replica_step(
    replica: DataParallelReplica, x: torch.Tensor, target: torch.Tensor, chunks: int = 1, forwards_first: bool = False
) -> torch.Tensor:
    """Run one step on this replica's samples; return the loss of the whole batch. ``forwards_first``: GPipe order."""
    rows, weight = local_rows(len(x), replica.num_workers, replica.index)
    pieces = list(zip(x[rows].chunk(chunks), target[rows].chunk(chunks), strict=True))
    losses: list[torch.Tensor] = []

    def forward(index: int) -> None:
        inputs, labels = pieces[index]
        losses.append(loss_of(replica(inputs), labels) * weight * (len(inputs) / (rows.stop - rows.start)))

    def backward(index: int) -> None:
        if losses[index].requires_grad:  # as the engine does
            losses[index].backward()

    indices = range(len(pieces))
    if forwards_first:
        order = [(action, index) for action in (forward, backward) for index in indices]
    else:
        order = [(action, index) for index in indices for action in (forward, backward)]
    for action, index in order:
        with replica.accumulate() if index < len(pieces) - 1 else contextlib.nullcontext():
            action(index)
    total = torch.stack([loss.detach() for loss in losses]).sum()
    replica.synchronize(weight)
    dist.all_reduce(total, group=replica.group)
    return total


def steps(
    rank: int,
    name: str,
    batches: tuple[int, ...],
    shard: bool,
    chunks: int = 1,
    bucket_bytes: int = 100,
    forwards_first: bool = False,
) -> dict[str, Any]:
    """Run optimizer steps on batches of these sizes; return the largest errors against the baseline."""
    serial, _, _ = build(name, 2)
    copied = copy.deepcopy(serial)
    if rank:  # replica 0's values are broadcast
        with torch.no_grad():
            next(copied.parameters()).add_(1.0)
    units: list[nn.Module] = []
    if isinstance(copied, Tied):
        units = [*copied.layers, copied.embedding, copied.head]
    elif isinstance(copied, Routed):
        units = [copied.first, copied.routed]
    elif isinstance(copied, Picking | Passing):
        units = list(copied.children()) if isinstance(copied, Passing) else [*copied.layers, copied.head]
    replica = wrap_data_parallel(copied, dist.group.WORLD, shard=shard, units=units, bucket_bytes=bucket_bytes)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (serial, replica)]
    result: dict[str, Any] = {"loss": 0.0, "gradients": 0.0, "state": 0.0, "bytes": [], "none": []}
    for step, batch in enumerate(batches):
        _, x, target = build(name, batch, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        replica.payload_bytes = 0
        loss = replica_step(replica, x, target, chunks, forwards_first)
        expected = serial_step(serial, name, x, target, replica.num_workers)
        result["loss"] = max(result["loss"], max_relative_error(loss, expected))
        gradients = full_gradients(replica.module)
        result["gradients"] = max(result["gradients"], worst(gradients, full_gradients(serial)))
        for optimizer in optimizers:
            optimizer.step()
        state = full_state_dict(replica.module)
        result["state"] = max(result["state"], worst(as_float(state), as_float(serial.state_dict())))
        result["bytes"].append(replica.payload_bytes)
        result["none"].append([key for key, value in gradients.items() if value is None])
    changed = {key: value + 1 for key, value in state.items()}
    load_full_state_dict(replica.module, changed)
    result["loads"] = all(torch.equal(value, changed[key]) for key, value in full_state_dict(replica.module).items())
    result["tied"] = not isinstance(copied, Tied) or copied.head.weight is copied.embedding.weight
    return result


def serial_step(model: nn.Module, name: str, x: torch.Tensor, target: torch.Tensor, num_replicas: int) -> torch.Tensor:
    """Run the baseline on the whole batch; with batch norm or routing on each replica's samples in turn, from the same
    running statistics, which are then averaged by weight."""
    if name == "tied":
        loss = loss_of(model(x), target)
        loss.backward()
        return loss.detach()
    before = {key: value.clone() for key, value in model.named_buffers()}
    after = {key: torch.zeros_like(value) for key, value in before.items()}
    total = torch.zeros(())
    for index in range(num_replicas):
        rows, weight = local_rows(len(x), num_replicas, index)
        for key, value in model.named_buffers():
            value.copy_(before[key])
        if not weight:
            continue
        loss = loss_of(model(x[rows]), target[rows]) * weight
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
        for key, value in model.named_buffers():
            after[key] += value * weight if value.is_floating_point() else value - after[key]
    for key, value in model.named_buffers():
        value.copy_(after[key])
    return total


def as_float(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.float() for key, value in state.items()}


def running_mean(rank: int, batch: int) -> float:
    """Compare the running mean with the plain model on the whole batch."""
    serial, x, target = build("normed", batch)
    replica = wrap_data_parallel(copy.deepcopy(serial), dist.group.WORLD)
    replica_step(replica, x, target)
    serial(x)
    mean = replica.module.get_buffer("norm.running_mean")
    return max_relative_error(mean, serial.get_buffer("norm.running_mean"))


def warned(rank: int, shard: bool) -> list[str]:
    """Return torch's warnings in three steps."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        steps(rank, "tied", (4, 4, 4), shard)
    return [str(warning.message) for warning in seen]


def recomputed(rank: int) -> float:
    """Run FSDP with activation checkpointing on replicas that use different units; return the gradient error."""
    torch.manual_seed(0)
    serial = Series()
    model = copy.deepcopy(serial)
    x, target = torch.rand(4, 4), torch.randint(0, 3, (4,))
    x[:2] *= -1  # the first replica uses no layer
    x[2:, 1] *= -1  # the second uses all but one
    (stage,) = capture(model, (x,), {}, ["first", *(f"layers.{index}" for index in range(4))]).stages([])
    replica = wrap_data_parallel(stage, dist.group.WORLD, shard=True, units=[model.first, *model.layers])
    forward = CheckpointedForward(stage, policy="always", index=0, num_microbatches=1, wrapper=replica)
    rows, weight = local_rows(4, 2, rank)
    for _ in range(2):
        stage.zero_grad()
        (output,) = forward((x[rows],), 0)
        (loss_of(output, target[rows]) * weight).backward()
        replica.synchronize(weight)
    loss_of(serial(x), target).backward()
    return worst(full_gradients(stage), full_gradients(serial))


def changed_in_place(rank: int) -> float:
    """Change an output in place before the loss; return the largest gradient error."""
    serial, x, target = build("normed", 4)
    replica = wrap_data_parallel(copy.deepcopy(serial), dist.group.WORLD)
    for model in (replica, replica, serial):
        serial.zero_grad()
        replica.module.zero_grad()
        loss_of(model(x).mul_(2), target).backward()
        if model is replica:
            replica.synchronize(0.5)
            gradients = full_gradients(replica.module)
    return worst({key: value / replica.num_workers for key, value in gradients.items()}, full_gradients(serial))


def mesh_step(rank: int, name: str, shard: bool, steps: int = 3) -> dict[str, Any]:
    """Compare two replicas of two tensor-parallel workers each with the baseline."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    serial, batch = tensor_jobs.build(name)
    serial.eval()  # without dropout
    model = copy.deepcopy(serial)
    axis = apply_tensor_parallel(model, mesh["tensor"])
    blocks = [block for block in model.modules() if type(block).__name__.endswith(("Layer", "Block"))]
    replica = wrap_data_parallel(model, mesh["data"], shard=shard, units=blocks)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3) for module in (serial, replica)]
    samples = len(next(iter(batch.values())))
    result = {"loss": 0.0, "gradients": 0.0}
    for step in range(steps):
        size = samples - step % 2  # 4, 3, 4 samples
        whole = {key: value[:size] for key, value in batch.items()}
        rows, weight = local_rows(size, 2, replica.index)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = tensor_jobs.loss_of(replica(**{key: value[rows] for key, value in whole.items()})) * weight
        loss.backward()
        replica.synchronize(weight)
        total = loss.detach().clone()
        dist.all_reduce(total, group=replica.group)
        expected = tensor_jobs.loss_of(serial(**whole))
        expected.backward()
        result["loss"] = max(result["loss"], max_relative_error(total, expected.detach()))
        result["gradients"] = max(result["gradients"], worst(full_gradients(replica.module), full_gradients(serial)))
        for optimizer in optimizers:
            optimizer.step()
    result["state"] = worst(full_state_dict(replica.module), dict(serial.state_dict()))
    result["tensor_bytes"] = axis.payload_bytes
    result["data_bytes"] = replica.payload_bytes
    return result


def rounds(rank: int) -> list[Any]:
    """Exchange calibration results of different lengths."""
    return gather_rounds([{"sums": {8: [0.5] * (1 + 3 * rank)}}])["workers"]  # type: ignore[no-any-return]


def broadcast_tensors(rank: int, source: int, piece_bytes: int) -> int:
    """Broadcast tensors of every kind and compare them; return the number of broadcasts."""
    from stagewright.engine.worker import broadcast as module

    made = [
        torch.arange(3, dtype=torch.float32),
        torch.tensor(True),
        torch.arange(5, dtype=torch.int64),
        torch.empty(0, 4),
        torch.ones(7, dtype=torch.bfloat16) / 3,
        torch.arange(600, dtype=torch.float64).view(20, 30).t(),  # large, and not contiguous
        torch.tensor([1 + 2j, 3 - 4j]),
        torch.tensor([True, False, True]),
    ]
    held = made if rank == source else [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in made]
    calls, plain = [], dist.broadcast

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return plain(*args, **kwargs)

    before = module.BUCKET_BYTES
    module.BUCKET_BYTES, dist.broadcast = piece_bytes, counted
    try:
        received = [tensor.clone() for tensor in module.broadcast(iter(held), torch.device("cpu"), source=source)]
    finally:
        module.BUCKET_BYTES, dist.broadcast = before, plain
    for sent, copied in zip(made, received, strict=True):
        assert (sent.dtype, sent.shape) == (copied.dtype, copied.shape)
        assert torch.equal(sent, copied)
    return len(calls)


def gloo_policies(rank: int) -> dict[str, list[int]]:
    """Return the scheduling policies of Gloo's threads and of the compute thread."""
    import os
    from pathlib import Path

    from stagewright.cluster.device import Device
    from stagewright.engine.worker.context import make_context
    from stagewright.spec.plan import Mesh

    def threads() -> dict[int, str]:
        return {int(path.name): (path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()}

    before = threads()
    make_context(Mesh(pipeline=2), rank, Device.parse(f"cpu:{rank}"))
    made = {thread: name for thread, name in threads().items() if thread not in before and "gloo" in name}
    return {"made": sorted(os.sched_getscheduler(thread) for thread in made), "own": [os.sched_getscheduler(0)]}
