"""Files as the PyTorch profiler writes them, with times that are easy to add up; times in microseconds."""

import json
from pathlib import Path
from typing import Any


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: float, dur: float, correlation: int, **args: Any) -> dict[str, Any]:
    return event(name, ts, dur, "kernel", tid=7, correlation=correlation, **args)


def launch(ts: float, correlation: int, tid: int = 1) -> dict[str, Any]:
    return event("cudaLaunchKernel", ts, 5, "cuda_runtime", tid=tid, correlation=correlation)


def write(path: Path, rank: int, events: list[dict[str, Any]], world_size: int = 2, **about: Any) -> Path:
    content = {"distributedInfo": {"rank": rank, "world_size": world_size}, "host_name": "a", **about}
    path.write_text(json.dumps({**content, "traceEvents": events}))
    return path


def gpu_rank(late_us: float = 0.0) -> list[dict[str, Any]]:
    """One step of 1000 µs: load 100, forward 300 with a gap of 20 and an idle 30, backward 200, all-reduce, optimizer.

    The all-reduce takes 200 µs from 600 on, of which 100 are overlapped with backward; `late_us` delays everything
    from forward on.
    """
    reduce: dict[str, Any] = {
        "Collective name": "allreduce",
        "Process Group Name": "3",
        "Process Group Description": "mesh_dp",
        "Process Group Ranks": "[0, 1]",
        "In msg nelems": 1000,
        "dtype": "BFloat16",
    }
    shifted = [
        launch(101, 1),
        kernel("gemm", 100, 150, 1),
        event("aten::mm", 250, 20),
        launch(265, 2),
        kernel("gemm", 270, 100, 2),
        kernel("gemm", 400, 100, 3),
        launch(390, 3),
        event("autograd::engine::evaluate_function: MmBackward0", 400, 60, tid=2),
        launch(410, 4, tid=2),
        kernel("gemm", 500, 200, 4),
        launch(420, 5, tid=2),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 600, 200, 5, **reduce),
        event("Optimizer.step#AdamW.step", 700, 90, "user_annotation"),
        launch(750, 6),
        kernel("multi_tensor_apply", 800, 200, 6),
    ]
    whole = [
        event("ProfilerStep#7", 0, 900 + late_us, "user_annotation"),
        event("enumerate(DataLoader)#_Iter.__next__", 0, 100, "user_annotation"),
    ]
    return [*whole, *({**found, "ts": found["ts"] + late_us} for found in shifted)]


def pipeline_rank(rank: int, num_microbatches: int = 3) -> list[dict[str, Any]]:
    """One step of a CPU pipeline with two stages, GPipe: forward takes 100 µs, backward 200, a message 10.

    rank 0   F0 F1 F2 ──────────── B0  B1  B2
    rank 1      F0 F1 F2 B0  B1  B2
    """
    events = [event("ProfilerStep#2", 0, 1560, "user_annotation")]

    def message(kind: str, start: float, end: float) -> None:
        name = "c10d::send" if kind == "send" else "c10d::recv_"
        values = ["", "", str(1 - rank), "0"]
        events.append(event(name, start, 1, **{"Concrete Inputs": values}))
        events.append(event(f"gloo:{kind}", start + 0.5, end - start - 0.5, "user_annotation", tid=9))

    for number in range(num_microbatches):
        forward = number * 110 if rank == 0 else 110 + number * 110
        events.append(event("aten::mm", forward, 100))
        if rank == 0:
            message("send", forward + 100, forward + 110)
        else:
            message("recv", forward - 100 if number == 0 else forward - 10, forward)
    drain = 110 + num_microbatches * 110
    for number in range(num_microbatches):
        start = drain + number * 210 + (210 if rank == 0 else 0)
        events.append(event("autograd::engine::evaluate_function: MmBackward0", start, 200))
        if rank == 1:
            message("send", start + 200, start + 210)
        else:
            message("recv", start - 10 if number else num_microbatches * 110, start)
    return events
