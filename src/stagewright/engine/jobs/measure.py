"""Measure a plan: what every worker does to check parity with the baseline, time steps and write the results.

    load, capture ─► worker 0: single-device baseline ─► build stages ─► steps compared with it ─► one to count memory
        ─► warm-up ─► timed steps ─► workers/N/result.json, metrics.jsonl, events.parquet, memory.parquet, clock.json

The launcher merges the workers' results (``merge_results``).
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from stagewright.engine.batch.batch_norm import reject_sync_batch_norm
from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parallel.resolve import (
    check_worker_plan as check_worker_plan,  # called by the worker
    finalize_plan,
)
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.check import baseline_of, check_parity, whole_batch_of
from stagewright.engine.parity.float64_step import decide_in_float64
from stagewright.engine.pipeline.config import PipelineResult
from stagewright.engine.worker.clock import write_clock
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.memory import MemoryReport, held_bytes
from stagewright.engine.worker.recorder import recorder
from stagewright.files.atomic import save_text
from stagewright.files.json_values import to_json
from stagewright.graph.compilation import compile_counts
from stagewright.runs.result import CompileReport, RunResult
from stagewright.runs.run_folder import RunFolder
from stagewright.simulator.bubble_bound import bubble_bound
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch

STREAM_REPEATS = 3
_Measured: TypeAlias = tuple[list[float], dict[int, int], MemoryReport]
"""Seconds of each step, bytes sent in a step by cut, and memory."""


def run_job(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """Check and measure a plan on this worker."""
    write_clock(context, run_folder.worker(context.rank))
    activity.begin("load model")
    model = load_model(plan, context, hollow=plan.baseline == "streamed")
    reject_sync_batch_norm(model.module, plan.mesh.num_workers)
    model_bytes = sum(parameter.nbytes for parameter in model.module.parameters())
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    activity.begin("capture")
    graph = capture_for(plan, model)
    plan = finalize_plan(plan, model, graph, context, write_plan=run_folder.write_plan)
    baseline, loss_info = None, {}
    spool = run_folder.worker(context.rank).path / "baseline"
    if context.rank == 0:
        baseline = baseline_of(plan, model, graph, context, folder=spool)
        whole = whole_batch_of(plan, model, graph, context, baseline)
        loss_info = {"loss_source": baseline.loss_source, "whole_batch": to_json(whole)}
    activity.begin("build stages")
    runner = StepRunner(plan, model, context, graph)
    with runner.memory.explain_oom():
        parity = check_parity(runner, batch, baseline, folder=spool / "optimizer-step")
    del baseline
    shutil.rmtree(spool, ignore_errors=True)
    parity = decide_in_float64(plan, parity, context, model_bytes)
    # Everything built so far stays alive: keep the garbage collector from scanning it during timed steps.
    gc.collect()
    gc.freeze()
    result: dict[str, Any] = {"worker": context.rank, "equality": to_json(parity), **loss_info}
    with run_folder.worker(context.rank) as folder, runner.memory.explain_oom():
        measure = _measure_training if plan.training else _measure_inference
        seconds, sent, memory = measure(runner, batch, folder)
        result |= {"step_s": seconds, "sent_bytes": {str(cut): count for cut, count in sent.items()}}
        result |= {"compiled": to_json(_compile_report(runner)), "replicated": runner.part.replicated}
        result |= {"collective_bytes": _collective_bytes(runner), "memory": memory.to_dict()}
        folder.write_events(recorder.rows())
        folder.write_memory(runner.memory.rows)
        save_text(json.dumps(result, indent=2) + "\n", folder.path / "result.json")


def _measure_training(runner: StepRunner, batch: Batch, folder: Any) -> _Measured:
    """Measure training steps: two that count memory, then warm-up steps, then timed ones."""
    plan = runner.plan
    optimizer = runner.make_optimizer()

    def step(number: int) -> tuple[float, PipelineResult, float]:
        start = time.perf_counter()
        with recorder.step(number):
            runner.part.zero_gradients()
            runner.memory.update()
            result = runner.train_step(batch)
            runner.optimizer_step(optimizer)
            loss = runner.total_loss(result)
        return time.perf_counter() - start, result, loss

    if plan.cuda_graphs:
        step(-3)  # records them, which takes more memory than a step
    runner.memory.reset_peak()
    with runner.memory.tracking():
        step(-2)
        if optimizer is not None:
            runner.memory.follow_optimizer(optimizer)
        runner.memory.begin_rows()
        step(-1)
    for number in range(plan.warmup):
        step(number)
    recorder.open(runner.context.torch_device)
    seconds: list[float] = []
    sent: dict[int, int] = {}
    _synchronize(runner)
    for number in range(plan.steps):
        _reset_traffic(runner)
        elapsed_s, result, loss = step(number)
        seconds.append(elapsed_s)
        sent = result.sent_bytes
        folder.append_metrics(
            step=number,
            seconds=elapsed_s,
            loss=loss,
            waited_s=result.waited_s,
            memory_bytes=held_bytes(runner.context.torch_device),
        )
    recorder.close()
    return seconds, sent, runner.memory.report()


def _measure_inference(runner: StepRunner, batch: Batch, folder: Any) -> _Measured:
    """Measure inference: a stream of batches that fills the pipeline once, repeated several times."""
    plan = runner.plan
    runner.memory.reset_peak()
    with runner.memory.tracking():
        runner.memory.begin_rows("loaded")
        with runner.memory.count_allocations():
            for _ in runner.stream(batch, 2):  # an output is held while the next is computed
                pass
    for _ in runner.stream(batch, max(1, plan.warmup)):
        pass
    recorder.open(runner.context.torch_device)
    seconds = []
    for number in range(STREAM_REPEATS):
        _synchronize(runner)
        start = time.perf_counter()
        with recorder.step(number, note=f"{plan.steps} batches"):
            for _ in runner.stream(batch, plan.steps):
                pass
            wait_start = recorder.now()
            _synchronize(runner)
            recorder.add("collective", wait_start, note="together")
        seconds.append((time.perf_counter() - start) / plan.steps)
        held = held_bytes(runner.context.torch_device)
        folder.append_metrics(
            step=number, seconds=seconds[-1], batches=plan.steps, total=STREAM_REPEATS, memory_bytes=held
        )
    recorder.close()
    memory = runner.memory.report()  # of the stream, which computes no loss
    _reset_traffic(runner)
    return seconds, runner.infer(batch).sent_bytes, memory


def _compile_report(runner: StepRunner) -> CompileReport | None:
    """Return what was compiled on this worker."""
    if runner.part.compile_mode == "none":
        return None
    counts = compile_counts()
    return CompileReport(
        mode=runner.part.compile_mode,
        reason=runner.part.compile_reason,
        graphs=counts.graphs,
        graph_breaks=counts.graph_breaks,
        break_reasons=counts.reasons,
    )


def _merge_compiled(workers: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Add up the graphs and graph breaks of all workers."""
    reports = [worker["compiled"] for worker in workers if worker["compiled"] is not None]
    if not reports:
        return None
    worst = max(reports, key=lambda report: int(report["graph_breaks"]))
    return {**worst, **{name: sum(report[name] for report in reports) for name in ("graphs", "graph_breaks")}}


def _reset_traffic(runner: StepRunner) -> None:
    """Reset the byte counters before a step."""
    part = runner.part
    for axis in (part.tensor_axis, part.context_axis, part.expert_axis, runner.sync.data_axis):
        if axis is not None:
            axis.payload_bytes = 0


def _collective_bytes(runner: StepRunner) -> dict[str, int]:
    """Return the payload bytes of the last step's collectives, by axis and for tied weights."""
    axes = {
        "tensor": runner.part.tensor_axis,
        "context": runner.part.context_axis,
        "expert": runner.part.expert_axis,
        "data": runner.sync.data_axis,
    }
    payload = {name: axis.payload_bytes for name, axis in axes.items() if axis is not None}
    for name, num_bytes in runner.sync.allreduce_bytes.items():
        if num_bytes:
            payload[name] = payload.get(name, 0) + num_bytes
    return payload


def _synchronize(runner: StepRunner) -> None:
    """Wait for the GPU and for all workers."""
    if runner.context.torch_device.type == "cuda":
        torch.cuda.synchronize()
    if runner.plan.mesh.num_workers > 1:
        dist.barrier()


def merge_results(plan: Plan, run_folder: RunFolder) -> RunResult:
    """Merge what the workers wrote into the result of the run."""
    workers = [
        json.loads((run_folder.worker(rank).path / "result.json").read_text()) for rank in range(plan.mesh.num_workers)
    ]
    steps = [max(times) for times in zip(*(worker["step_s"] for worker in workers), strict=True)]
    median = statistics.median(steps)
    rates = sorted(plan.batch / seconds for seconds in steps)
    quarters = statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else [rates[0]] * 3
    links = Counter[str]()
    for worker in workers[: plan.mesh.pipeline]:
        links.update(worker["sent_bytes"])
    measured = RunResult.from_dict(
        {
            **{name: workers[0][name] for name in ("equality", "loss_source", "whole_batch")},
            "compiled": _merge_compiled(workers),
            "peak_memory_bytes": [worker["memory"]["peak_memory_bytes"] for worker in workers],
            "process_peak_bytes": [worker["memory"]["process_peak_bytes"] for worker in workers],
            "memory": [worker["memory"]["peak"] for worker in workers],
        }
    )
    return RunResult.of_plan(
        plan,
        stages=plan.num_stages,
        cuts=plan.cuts,
        training=plan.training,
        samples_per_s=plan.batch / median,
        samples_per_s_spread=quarters[2] - quarters[0],
        latency_s=median,
        equal=measured.parity is not None and measured.parity.equal,
        parity=measured.parity,
        loss_source=measured.loss_source,
        whole_batch=measured.whole_batch,
        compiled=measured.compiled,
        replicated=workers[0]["replicated"],
        peak_memory_bytes=measured.peak_memory_bytes,
        process_peak_bytes=measured.process_peak_bytes,
        memory=measured.memory,
        link_bytes=dict(links),
        collective_bytes=tuple(worker["collective_bytes"] for worker in workers),
        bound=bubble_bound(plan),
        run=str(run_folder.path),
    )
