"""The training loop that a user would write without Stagewright, timed on one device: the "origin code" of the tables.

It uses nothing of the engine, so it shows whether the single-device baseline, to which speed-ups refer, is a fair one.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from stagewright.spec.plan import Plan


def time_plain_loop(plan: Plan) -> dict[str, Any]:
    """Train the model of a single-device plan on its example batch; return the median samples/s of its steps."""
    import torch
    from torch.utils._pytree import tree_map_only

    from stagewright.cluster.device import Device
    from stagewright.engine.parallel.optimizer import make_optimizer

    device = Device.parse(plan.devices[0])
    torch_device = device.torch_device()
    torch.manual_seed(plan.seed)
    model = plan.model.load(batch=plan.batch)
    module = model.module.train().to(torch_device)
    batch = (model.args, model.kwargs, model.target)
    args, kwargs, target = tree_map_only(torch.Tensor, lambda tensor: tensor.to(torch_device), batch)
    optimizer = make_optimizer(plan.optimizer, list(module.parameters()))
    seconds = []
    with device.pinned():
        for _ in range(plan.warmup + plan.steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = model.loss(module(*args, **kwargs), target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()  # waits for the device
            seconds.append(time.perf_counter() - start)
    timed = seconds[plan.warmup :]
    return {"samples_per_s": plan.batch / statistics.median(timed), "steps_s": timed}
