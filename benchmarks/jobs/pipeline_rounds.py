"""One worker's part of ``pipeline_speedup.py``: serial, our pipeline and torch's own, in turns, in the same processes.

Machines are noisy: a core may be a fifth slower a minute later. So the rivals run seconds apart, round after
round, on the same cores; serial goes to another of these cores each round. A round's ratio is what counts. Serial also
runs on all of these cores at once ("together"): what that takes longer is the machine's doing, not the pipeline's.
Stock ``torch.distributed.pipelining`` gets the same stages, the same micro-batches, and its own schedule and transport.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from proven import proven_replica
from threads import mean_taken, read_counters, taken
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _ScheduleForwardOnly

from stagewright.cluster.device import available_cores
from stagewright.engine.parallel.model import load_model
from stagewright.engine.parallel.model import capture_for, cut_indices
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.worker.recorder import recorder
from stagewright.zoo.model import Batch

AT_THE_END = "together"  # a worker that is done waits for the others
PEERS = ("prepare_pippy", "torchgpipe")  # take one batch at a time; a stream is no part of their interface


class Single(nn.Module):
    """A stage as others want it: a value that is alone comes out as it is, several as a tuple."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *values: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if len(values) == 1 and isinstance(values[0], tuple):  # torchgpipe hands several over as one
            (values,) = values
        results: tuple[torch.Tensor, ...] = tuple(self.stage(*values))
        return results[0] if len(results) == 1 else results


def run_job(plan: Any, context: Any, run_folder: Any) -> None:
    """Prove the plan equal to serial, then time the rivals in turns; writes rounds.json."""
    settings = json.loads(os.environ["PIPELINE_ROUNDS"])
    whole = load_model(plan, context)
    runner, batch, equality = proven_replica(plan, context)
    pipelined = plan.mesh.pipeline > 1
    count = settings["stream"] if pipelined and not plan.training else plan.microbatches
    rivals = {"ours": ours(plan, runner, batch, count)}
    if settings["stock"]:
        # The very same parameters: where memory lies moves times by half a percent.
        rivals["stock"] = stock(plan, whole, context, count, runner.part.stages[context.pipeline])
    if settings["parameters"]:
        model_again = load_model(plan, context)
        rivals["parameters"] = stock(replace(plan, cuts=tuple(settings["parameters"])), model_again, context, count)
    if "prepare_pippy" in settings["peers"] and not plan.training:  # it can do no other
        rivals["prepare_pippy"] = prepare_pippy(plan, context)
    if "torchgpipe" in settings["peers"]:
        rivals["torchgpipe"] = torchgpipe(plan, context)
    alone, alone_samples = serial(plan, whole, runner.splitter, context, settings["serial"])
    for name, rival in rivals.items():
        if name != "ours" or not plan.training:  # a step of ours has just been proven
            rival()
    gc.collect()
    gc.freeze()
    recorder.open()
    rounds: list[dict[str, float]] = []
    used: list[dict[str, float]] = []
    samples = plan.batch * count // plan.microbatches
    for number in range(settings["rounds"]):
        seconds = {
            "serial": timed(partial(alone, number % plan.mesh.num_workers)) / alone_samples,
            "together": timed(partial(alone, None)) / alone_samples,
        }
        for name in list(rivals) if number % 2 == 0 else list(rivals)[::-1]:
            before = read_counters()
            whole_s = timed(rivals[name], number if name == "ours" else None)
            if name == "ours":
                used.append(taken(before, read_counters(), threading.get_native_id()))
            seconds[name] = whole_s / (plan.batch if name in PEERS else samples)
        rounds.append(seconds)
    folder = run_folder.worker(context.rank).path
    folder.mkdir(parents=True, exist_ok=True)
    recorder.close()  # its log stays: pipeline_speedup.py divides the steps
    events = [(one["kind"], one["end_s"] - one["start_s"]) for one in recorder.rows() if one["note"] != AT_THE_END]
    result = {"equality": equality.to_dict(), "rounds": rounds, "count": count, "samples": samples}
    result |= {"threads": mean_taken(used), "compute": medians(events), "late": late(events)}
    (folder / "rounds.json").write_text(json.dumps(result))


def timed(run: Callable[[], None], number: int | None = None) -> float:
    """Seconds between two barriers, recorded as the step of a number, if any."""
    dist.barrier()
    with recorder.step(number) if number is not None else nullcontext():
        start = time.perf_counter()
        run()
        begun = recorder.now()
        dist.barrier()
        recorder.add("collective", begun, note=AT_THE_END)
        return time.perf_counter() - start


def medians(events: list[tuple[str, float]]) -> dict[str, float]:
    """The median time of each kind of event."""
    kinds: dict[str, list[float]] = {}
    for name, seconds in events:
        kinds.setdefault(name, []).append(seconds)
    return {name: sorted(all_of)[len(all_of) // 2] for name, all_of in kinds.items()}


def late(events: list[tuple[str, float]]) -> dict[str, float]:
    """Of each kind, how much of its time is beyond the median: what came late, as a share of all of it."""
    usual = medians(events)
    beyond = {name: sum(max(0.0, one - usual[name]) for kind, one in events if kind == name) for name in usual}
    total = {name: sum(one for kind, one in events if kind == name) for name in usual}
    return {name: beyond[name] / total[name] if total[name] else 0.0 for name in usual}


def serial(plan: Any, model: Any, splitter: Any, context: Any, most: int) -> tuple[Callable[[int | None], None], int]:
    """The user's own model over some micro-batches, on one worker or, given None, on each; and their samples."""
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    parts = splitter.split(batch, context.torch_device)[:most]
    optimizer = torch.optim.SGD(model.module.parameters(), lr=1e-4)

    def run(worker: int | None) -> None:
        if worker not in (None, context.rank):
            return
        optimizer.zero_grad()
        for part in parts:
            with torch.set_grad_enabled(plan.training):
                output = model.module(*part.args, **part.kwargs)
                if plan.training:
                    (model.loss(output, part.target) * part.weight).backward()
        if plan.training:
            optimizer.step()

    run(None)
    return run, sum(part.num_samples for part in parts)


def ours(plan: Any, runner: StepRunner, batch: Batch, count: int) -> Callable[[], None]:
    """Our way."""
    optimizer = torch.optim.SGD(runner.part.module.parameters(), lr=1e-4)

    def run() -> None:
        if not plan.training:
            for _ in runner.stream(batch, count // plan.microbatches):
                pass
            return
        runner.part.zero_gradients()
        runner.train_step(batch)
        runner.optimizer_step(optimizer)

    return run


def stock(plan: Any, model: Any, context: Any, count: int, given: nn.Module | None = None) -> Callable[[], None]:
    """torch.distributed.pipelining on the plan's cuts; ``given``: this worker's stage, if it is made already."""
    graph = capture_for(plan, model)
    cuts = cut_indices(graph, plan.cuts)
    size = plan.batch // plan.microbatches
    index = context.pipeline
    stage = Single(given or graph.stages(cuts)[index])
    flat = graph.flatten(model.args, model.kwargs)
    if len(flat) != 1:
        raise SystemExit("the comparison with stock torch is for models with one input; use --no-stock")

    def example(cut: int) -> tuple[torch.Tensor, ...]:
        crossing = graph.crossing_shapes(cuts[cut], size)
        return tuple(torch.zeros(shape, dtype=dtype, requires_grad=plan.training) for shape, dtype in crossing)

    last = index == plan.mesh.pipeline - 1
    inputs = (flat[0][:size],) if index == 0 else example(index - 1)
    outputs = stage(*inputs).detach() if last else example(index)
    staged = PipelineStage(
        stage,
        index,
        plan.mesh.pipeline,
        context.torch_device,
        input_args=inputs,
        output_args=outputs,
        group=context.link_groups[False, True],
    )
    if plan.training:
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[plan.schedule]
        schedule: Any = kind(staged, count, loss_fn=nn.functional.cross_entropy)
    else:
        schedule = _ScheduleForwardOnly(staged, count)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-4)
    args = (flat[0].repeat(count // plan.microbatches, *[1] * (flat[0].ndim - 1)),) if index == 0 else ()

    def run() -> None:
        if not plan.training:
            with torch.no_grad():
                schedule.step(*args)
            return
        optimizer.zero_grad()
        schedule.step(*args, **({"target": model.target} if last else {}))
        optimizer.step()

    return run


def prepare_pippy(plan: Any, context: Any) -> Callable[[], None]:
    """Accelerate's pipeline at the same cuts, forward alone; a sample a chunk: it pads other batches wrongly."""
    import accelerate

    accelerate.PartialState(cpu=True)
    model = load_model(plan, context)
    names = [call.name for call in capture_for(plan, model).calls]
    begin = [names[names.index(cut) + 1] for cut in plan.cuts]
    example = tuple(one[:1] for one in model.args)
    prepared = accelerate.prepare_pippy(model.module, split_points=begin, example_args=example, num_chunks=plan.batch)

    def run() -> None:
        with torch.no_grad():
            prepared(*model.args)

    return run


def torchgpipe(plan: Any, context: Any) -> Callable[[], None]:
    """torchgpipe on the same stages: one process, a thread a stage, all of the pipeline's cores."""
    from torchgpipe import GPipe

    model = load_model(plan, context)
    graph = capture_for(plan, model)
    stages = nn.Sequential(*(Single(stage) for stage in graph.stages(cut_indices(graph, plan.cuts))))
    stages.train(plan.training)
    count = plan.mesh.pipeline
    piped = GPipe(stages, [1] * count, devices=["cpu"] * count, chunks=plan.microbatches, checkpoint="never")
    own, every = available_cores(), {int(device.split(":")[1]) for device in plan.devices}

    def run() -> None:
        if context.rank != 0:
            return
        os.sched_setaffinity(0, every)  # its threads begin with this one's cores
        try:
            with torch.set_grad_enabled(plan.training):
                output = piped(*model.args)
                if plan.training:
                    stages.zero_grad()
                    nn.functional.cross_entropy(output, model.target).backward()
        finally:
            os.sched_setaffinity(0, own)

    return run
