"""One worker's part of ``pipeline_speedup.py``: serial, Stagewright and stock torch, alternating in the same processes.

Machines are noisy: a core may be a fifth slower a minute later. So all competitors run seconds apart, in rounds, on the
same cores; serial runs on another of these cores each round. Only ratios within a round count. Serial also runs on all
of these cores at once ("together"): its slowdown is the machine's, not the pipeline's. Stock
``torch.distributed.pipelining`` gets the same stages and micro-batches, with its own schedule and transport.
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
from thread_counters import counter_means, counters_between, read_counters
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _ScheduleForwardOnly
from verified import verified_runner

from stagewright.cluster.device import available_cores
from stagewright.engine.parallel.model import capture_for, cut_indices, load_model
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.worker.recorder import recorder
from stagewright.zoo.model import Batch

AT_THE_END = "together"  # note of the event in which a finished worker waits for the others
PEERS = ("prepare_pippy", "torchgpipe")  # take one batch at a time; their interface has no streams


class UnpackedStage(nn.Module):
    """A stage with the interface of other libraries: one output as a tensor, several as a tuple."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *values: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if len(values) == 1 and isinstance(values[0], tuple):  # torchgpipe passes several values as one tuple
            (values,) = values
        results: tuple[torch.Tensor, ...] = tuple(self.stage(*values))
        return results[0] if len(results) == 1 else results


def run_job(plan: Any, context: Any, run_folder: Any) -> None:
    """Check parity, then time all competitors in rounds; writes rounds.json."""
    settings = json.loads(os.environ["PIPELINE_ROUNDS"])
    whole = load_model(plan, context)
    runner, batch, parity = verified_runner(plan, context)
    pipelined = plan.mesh.pipeline > 1
    count = settings["stream"] if pipelined and not plan.training else plan.microbatches
    competitors = {"ours": run_stagewright(plan, runner, batch, count)}
    if settings["stock"]:
        # The same parameter tensors: their place in memory changes times by half a percent.
        competitors["stock"] = run_stock(plan, whole, context, count, runner.part.stages[context.pipeline])
    if settings["parameters"]:
        copy = load_model(plan, context)
        competitors["parameters"] = run_stock(replace(plan, cuts=tuple(settings["parameters"])), copy, context, count)
    if "prepare_pippy" in settings["peers"] and not plan.training:  # inference only
        competitors["prepare_pippy"] = run_prepare_pippy(plan, context)
    if "torchgpipe" in settings["peers"]:
        competitors["torchgpipe"] = run_torchgpipe(plan, context)
    run_alone, serial_samples = run_serial(plan, whole, runner.splitter, context, settings["serial"])
    for name, run in competitors.items():
        if name != "ours" or not plan.training:  # the parity check has just run such a step
            run()
    gc.collect()
    gc.freeze()
    recorder.open()
    rounds: list[dict[str, float]] = []
    counters: list[dict[str, float]] = []
    samples = plan.batch * count // plan.microbatches
    for number in range(settings["rounds"]):
        seconds = {
            "serial": timed(partial(run_alone, number % plan.mesh.num_workers)) / serial_samples,
            "together": timed(partial(run_alone, None)) / serial_samples,
        }
        for name in list(competitors) if number % 2 == 0 else list(competitors)[::-1]:
            before = read_counters()
            elapsed_s = timed(competitors[name], number if name == "ours" else None)
            if name == "ours":
                counters.append(counters_between(before, read_counters(), threading.get_native_id()))
            seconds[name] = elapsed_s / (plan.batch if name in PEERS else samples)
        rounds.append(seconds)
    folder = run_folder.worker(context.rank).path
    folder.mkdir(parents=True, exist_ok=True)
    recorder.close()  # its log stays: pipeline_speedup.py breaks the steps down
    events = [(row["kind"], row["end_s"] - row["start_s"]) for row in recorder.rows() if row["note"] != AT_THE_END]
    result = {"equality": parity.to_dict(), "rounds": rounds, "count": count, "samples": samples}
    result |= {"threads": counter_means(counters), "compute": medians(events), "late": late(events)}
    (folder / "rounds.json").write_text(json.dumps(result))


def timed(run: Callable[[], None], number: int | None = None) -> float:
    """Return the seconds between two barriers; with a number, record them as that step."""
    wait_for_device()
    dist.barrier()
    with recorder.step(number) if number is not None else nullcontext():
        start = time.perf_counter()
        run()
        wait_for_device()
        begun = recorder.now()
        dist.barrier()
        recorder.add("collective", begun, note=AT_THE_END)
        return time.perf_counter() - start


def wait_for_device() -> None:
    """Wait until a GPU has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def medians(events: list[tuple[str, float]]) -> dict[str, float]:
    """Return the median time of each kind of event."""
    kinds: dict[str, list[float]] = {}
    for name, seconds in events:
        kinds.setdefault(name, []).append(seconds)
    return {name: sorted(times)[len(times) // 2] for name, times in kinds.items()}


def late(events: list[tuple[str, float]]) -> dict[str, float]:
    """Return the share of each kind's time that is beyond its median."""
    median_s = medians(events)
    beyond = {
        name: sum(max(0.0, seconds - median_s[name]) for kind, seconds in events if kind == name) for name in median_s
    }
    total = {name: sum(seconds for kind, seconds in events if kind == name) for name in median_s}
    return {name: beyond[name] / total[name] if total[name] else 0.0 for name in median_s}


def run_serial(
    plan: Any, model: Any, splitter: Any, context: Any, max_microbatches: int
) -> tuple[Callable[[int | None], None], int]:
    """Return a run of the user's model over some micro-batches, on one worker or (None) on each, and their samples."""
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    model.module.to(context.torch_device)
    microbatches = splitter.split(batch, context.torch_device)[:max_microbatches]
    optimizer = torch.optim.SGD(model.module.parameters(), lr=1e-4)

    def run(worker: int | None) -> None:
        if worker not in (None, context.rank):
            return
        optimizer.zero_grad()
        for microbatch in microbatches:
            with torch.set_grad_enabled(plan.training):
                output = model.module(*microbatch.args, **microbatch.kwargs)
                if plan.training:
                    (model.loss(output, microbatch.target) * microbatch.weight).backward()
        if plan.training:
            optimizer.step()

    run(None)
    return run, sum(microbatch.num_samples for microbatch in microbatches)


def run_stagewright(plan: Any, runner: StepRunner, batch: Batch, count: int) -> Callable[[], None]:
    """Return a step, or a stream, of Stagewright's pipeline."""
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


def run_stock(plan: Any, model: Any, context: Any, count: int, existing: nn.Module | None = None) -> Callable[[], None]:
    """Return a step of torch.distributed.pipelining with the plan's cuts; ``existing`` is this worker's stage."""
    graph = capture_for(plan, model)
    cuts = cut_indices(graph, plan.cuts)
    size = plan.batch // plan.microbatches
    index, device = context.pipeline, context.torch_device
    stage = UnpackedStage(existing or graph.stages(cuts)[index]).to(device)
    flat = [value.to(device) for value in graph.flatten(model.args, model.kwargs)]
    if len(flat) != 1:
        raise SystemExit("stock torch is compared only for models with one input; use --no-stock")

    def example(cut: int) -> tuple[torch.Tensor, ...]:
        crossing = graph.crossing_shapes(cuts[cut], size)
        options: dict[str, Any] = {"device": device, "requires_grad": plan.training}
        return tuple(torch.zeros(shape, dtype=dtype, **options) for shape, dtype in crossing)

    last = index == plan.mesh.pipeline - 1
    inputs = (flat[0][:size],) if index == 0 else example(index - 1)
    outputs = stage(*inputs).detach() if last else example(index)
    staged = PipelineStage(
        stage,
        index,
        plan.mesh.pipeline,
        device,
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
    target = None if model.target is None else model.target.to(device)
    args = (flat[0].repeat(count // plan.microbatches, *[1] * (flat[0].ndim - 1)),) if index == 0 else ()

    def run() -> None:
        if not plan.training:
            with torch.no_grad():
                schedule.step(*args)
            return
        optimizer.zero_grad()
        schedule.step(*args, **({"target": target} if last else {}))
        optimizer.step()

    return run


def run_prepare_pippy(plan: Any, context: Any) -> Callable[[], None]:
    """Return a forward of Accelerate's pipeline with the same cuts; one sample per chunk, as it pads others wrongly."""
    import accelerate

    accelerate.PartialState(cpu=True)
    model = load_model(plan, context)
    names = [call.name for call in capture_for(plan, model).calls]
    split_points = [names[names.index(cut) + 1] for cut in plan.cuts]
    example = tuple(argument[:1] for argument in model.args)
    prepared = accelerate.prepare_pippy(
        model.module, split_points=split_points, example_args=example, num_chunks=plan.batch
    )

    def run() -> None:
        with torch.no_grad():
            prepared(*model.args)

    return run


def run_torchgpipe(plan: Any, context: Any) -> Callable[[], None]:
    """Return a step of torchgpipe with the same stages: one process, one thread per stage, all cores."""
    from torchgpipe import GPipe

    model = load_model(plan, context)
    graph = capture_for(plan, model)
    stages = nn.Sequential(*(UnpackedStage(stage) for stage in graph.stages(cut_indices(graph, plan.cuts))))
    stages.train(plan.training)
    count = plan.mesh.pipeline
    piped = GPipe(stages, [1] * count, devices=["cpu"] * count, chunks=plan.microbatches, checkpoint="never")
    own_cores, all_cores = available_cores(), {int(device.split(":")[1]) for device in plan.devices}

    def run() -> None:
        if context.rank != 0:
            return
        os.sched_setaffinity(0, all_cores)  # its threads inherit this
        try:
            with torch.set_grad_enabled(plan.training):
                output = piped(*model.args)
                if plan.training:
                    stages.zero_grad()
                    nn.functional.cross_entropy(output, model.target).backward()
        finally:
            os.sched_setaffinity(0, own_cores)

    return run
