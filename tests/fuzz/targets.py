"""What reads files and bytes of others: each target takes a damaged one and must end in a clear error."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from made_profiles import equal_units
from made_runs import make_run, make_training
from stagewright import codecs
from stagewright.analytic.torchtitan import read_torchtitan
from stagewright.cluster.file import read_cluster
from stagewright.engine.state.checkpoint import Checkpoint, latest, write_checkpoint
from stagewright.engine.worker.process import ProcessMark
from stagewright.fabric.traffic.chakra import from_chakra, to_chakra
from stagewright.fabric.traffic.workload import from_sizes
from stagewright.partition.split import split
from stagewright.profiler.cache import ProfileCache
from stagewright.report.live import tail as live_tail
from stagewright.report.live.replay import read_replay
from stagewright.report.live.snapshot import snapshot
from stagewright.report.live.tail import RunTail
from stagewright.report.live.terminal import live_view
from stagewright.report.page.build import build_report
from stagewright.report.page.html import page_html
from stagewright.runs.index import INDEX_NAME, RunIndex
from stagewright.runs.journal import Journal, RecordedStep, read_journal, rows_of
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.spec.plan_file import plan_to_toml, read_plan
from stagewright.trace.breakdown import breakdown
from stagewright.trace.flight_recorder import compare_dumps
from stagewright.trace.kineto.read import read_profiles
from stagewright.trace.memory import peak_sentence, read_memory
from stagewright.trace.read import read_trace
from stagewright.trace.stragglers.blame import find_culprit
from stagewright.trace.stragglers.from_trace import job_of_trace
from stagewright.trace.waterfall import explain_trace

Read = Callable[[bytes], object]
"""Read a damaged sample; a clear error is a StagewrightError."""


@dataclass(frozen=True)
class Target:
    """One reader."""

    name: str
    samples: list[tuple[bytes, bool, Read]]
    """Valid content, whether it is text, and what reads a damaged variant of it."""
    share: float = 1.0
    """Share of the cases, for a slow target."""


def _file(path: Path, read: Callable[[], object]) -> tuple[bytes, bool, Read]:
    """A sample that is a file: write the variant, read, put the valid content back."""
    content = path.read_bytes()

    def damage(variant: bytes) -> object:
        path.write_bytes(variant)
        try:
            return read()
        finally:
            path.write_bytes(content)

    return content, path.suffix in (".toml", ".json", ".jsonl", ".txt"), damage


def plan(folder: Path) -> Target:
    file = folder / "plan.toml"
    file.write_text(plan_to_toml(Plan.of("digits-vit", 32, "data=2,pipeline=2", microbatches=4, codec="block4")))
    return Target("plan", [_file(file, lambda: plan_to_toml(read_plan(file)))])


def profiler_trace(folder: Path) -> Target:
    """Traces of the PyTorch profiler, on a GPU and of a pipeline on CPUs."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "trace" / "kineto"))
    from kineto_files import gpu_rank, pipeline_rank, write

    def sample(name: str, make: Callable[[int], list[dict[str, Any]]]) -> tuple[bytes, bool, Read]:
        paths = [write(folder / f"{name}{rank}.json", rank, make(rank)) for rank in (0, 1)]

        def read() -> object:
            trace = read_profiles(paths)
            return explain_trace(trace).to_dict(), find_culprit(job_of_trace(trace))

        return _file(paths[0], read)

    samples = [sample("gpu", lambda rank: gpu_rank()), sample("pipeline", pipeline_rank)]
    return Target("profiler trace", samples, share=0.1)


def flight_recorder(folder: Path) -> Target:
    frames = [{"filename": "train.py", "line": 7}]
    entries = [
        {
            "collective_seq_id": number,
            "profiling_name": "nccl:all_reduce",
            "process_group": ["0", "default_pg"],
            "time_created_ns": number * 1000,
            "input_sizes": [[4]],
            "frames": frames,
        }
        for number in range(1, 6)
    ]
    paths = [folder / "rank_0.json", folder / "rank_1", folder / "rank_2"]
    paths[0].write_text(json.dumps({"entries": entries}))
    for path in paths[1:]:
        path.write_bytes(pickle.dumps({"entries": entries[:-1]}))
    return Target("flight recorder", [_file(path, lambda: compare_dumps(paths)) for path in paths], share=0.2)


def torchtitan(folder: Path) -> Target:
    file = folder / "job.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nglobal_batch_size = 64\n'
        'seq_len = 4096\n[parallelism]\ntensor_parallel_degree = 4\n[activation_checkpoint]\nmode = "full"\n'
    )
    return Target("torchtitan", [_file(file, lambda: read_torchtitan(file, 64))])


def cluster(folder: Path) -> Target:
    file = folder / "cluster.toml"
    file.write_text(
        '[[devices]]\nkind = "cuda"\ncount = 8\nmemory = "80GiB"\nspeed = 1.0\nhosts = 2\nhost = "a"\n'
        '[links.intra_host]\nbandwidth = "50GB/s"\nlatency = "10us"\n[links.inter_host]\nbandwidth = 1e9\n'
    )
    return Target("cluster", [_file(file, lambda: read_cluster(file).to_dict())])


def journal(folder: Path) -> Target:
    writer = Journal(folder)
    event = ("forward", "compute", 0, 1, 0.1, 0.2, 4096, None, "note")
    for step in range(4):
        writer.append(RecordedStep(step=step, note=None, begin_s=0.0, end_s=1.0, events=[event] * 5))
    writer.close()
    return Target(
        "journal", [_file(folder / "events.journal", lambda: [list(rows_of(step)) for step in read_journal(folder)])]
    )


def events(folder: Path) -> Target:
    run = make_run(folder, "pipeline=2")
    worker = run.worker(0)

    def read() -> None:
        trace = read_trace(run, unfinished=True)
        breakdown(trace, trace.median_step)

    def memory() -> None:
        for one in read_memory(run):
            peak_sentence(one)

    samples = [
        _file(worker.path / "events.parquet", read),
        _file(worker.path / "memory.parquet", memory),
        _file(worker.path / "clock.json", read),
    ]
    lines = make_run(folder / "lines", "pipeline=2")
    rows = lines.worker(0).events()
    lines.worker(0).write_events(rows, quickly=True)
    samples.append(_file(lines.worker(0).path / "events.jsonl", lambda: breakdown(read_trace(lines), 1)))
    return Target("events", samples)


def replay(folder: Path) -> Target:
    run = make_run(folder, "pipeline=2")

    def read() -> None:
        shown = read_replay(run)
        for share in (0.0, 0.5, 1.0):
            json.dumps(snapshot(shown.state_at(share * shown.length_s), 1e9), allow_nan=False)

    names = ("plan.toml", "result.json", "workers/0/metrics.jsonl", "workers/1/events.parquet")
    return Target("replay", [_file(run.path / name, read) for name in names], share=0.5)


def runs(folder: Path) -> Target:
    root = folder / "runs"
    run, training = make_run(root, "pipeline=2"), make_training(root)

    def read() -> None:
        with RunIndex(root) as index:
            assert len(index.rows()) == 2
        (root / INDEX_NAME).unlink(missing_ok=True)

    files = [run.path / name for name in ("plan.toml", "result.json", "environment.json")]
    return Target("runs", [_file(file, read) for file in (*files, training.path / "result.json")], share=0.3)


def index(folder: Path) -> Target:
    root = folder / "runs"
    make_run(root, "pipeline=2")

    def read() -> None:
        with RunIndex(root) as rows:
            assert len(rows.rows()) == 1

    read()
    return Target("run index", [_file(root / INDEX_NAME, read)], share=0.3)


def result(folder: Path) -> Target:
    run, training = make_run(folder, "data=2"), make_training(folder)

    def read(one: RunFolder) -> None:
        found = one.result()
        assert found is not None
        json.dumps(found.to_dict())
        _ = found.sent_bytes, found.axis_bytes

    return Target(
        "result",
        [_file(one.path / "result.json", lambda one=one: read(one)) for one in (run, training)],  # type: ignore[misc]
    )


def watch(folder: Path) -> Target:
    run = make_training(folder, "pipeline=2")
    live_tail.SLOW_S = 0.0
    for rank in range(2):
        ProcessMark.of_this_process().write(run.worker(rank).path / "process.json")
    fault = {"worker": 1, "kind": "raised", "message": "ValueError: x", "doing": {"count": 3, "action": "forward"}}
    (run.path / "fault.json").write_text(json.dumps(fault))
    (run.worker(0).path / "activity.txt").write_bytes(b"12\t3\t0\t1\tforward\t(2, 4) float32\n".ljust(1024, b"\0"))

    def read() -> None:
        tail = RunTail(run.path)
        for _ in range(2):
            shown = {**snapshot(tail.poll(), 1e9), "replay": None}
        tail.close()
        json.dumps(shown, allow_nan=False)
        live_view(shown)

    names = ("plan.toml", "result.json", "environment.json", "fault.json", "workers/0/activity.txt")
    more = ("workers/1/metrics.jsonl", "workers/1/process.json")
    return Target("watch", [_file(run.path / name, read) for name in (*names, *more)], share=0.5)


def report(folder: Path) -> Target:
    make_run(folder, "serial")
    run, training = make_run(folder, "pipeline=2", number=1), make_training(folder)
    (training.path / "training.json").write_text('{"data_dir": null, "checkpoint": "/x", "keep": 2}')

    def read() -> None:
        page_html(build_report([folder]).page)

    names = ("plan.toml", "result.json", "environment.json", "workers/0/events.parquet", "workers/0/metrics.jsonl")
    files = [run.path / name for name in (*names, "workers/1/memory.parquet", "workers/0/clock.json")]
    more = [training.path / name for name in ("result.json", "training.json", "workers/0/metrics.jsonl")]
    return Target("report", [_file(file, read) for file in (*files, *more)], share=0.04)


def checkpoint(folder: Path) -> Target:
    path = folder / "step-00000010"
    tensors = {f"layer.{index}": torch.arange(6.0).reshape(2, 3) for index in range(3)}
    states = {"exp_avg/layer.0": torch.ones(2, 3)}
    content = {"seed": 0, "caller": {"trained": {"batch": 8}, "progress": {"step": 10}}, "mesh": "serial"}
    write_checkpoint(
        path,
        rank=0,
        barrier=lambda: None,
        model=tensors,
        optimizer=states,
        scalars={"step/layer.0": 10},
        content=content,
    )

    def read() -> None:
        found = Checkpoint.open(path)
        found.verify()
        for name in found.model_names():
            found.model_tensor(name)
            found.optimizer_state(name)
        latest(folder)

    files = ("index.json", "model/worker-00000.safetensors", "optimizer/worker-00000.safetensors")
    return Target("checkpoint", [_file(path / name, read) for name in files])


def profile(folder: Path) -> Target:
    cache = ProfileCache(folder)
    names = ("model", "mode", "inputs", "device", "threads", "training", "units", "weights", "part", "repeats")
    key = dict.fromkeys(names, "5")
    file = cache.save_profile(key, equal_units(4))

    def read() -> None:
        found, reason = cache.profile(key)
        assert (found is None) == bool(reason)
        if found is not None:
            split(found, num_stages=2, policy="optimal")

    return Target("profile", [_file(file, read)])


def codec(folder: Path) -> Target:
    values = torch.linspace(-1, 1, 96).reshape(4, 24)
    samples = []
    for name in ("bf16", "topk:10", "sort3+1", "lowrank:2", "block4", "bf16"):
        try:
            chosen = codecs.get(name)
        except Exception:
            continue

        def read(variant: bytes, chosen: Any = chosen) -> None:
            chosen.decode(torch.frombuffer(bytearray(variant or b"\0"), dtype=torch.uint8), (4, 24), torch.float32)

        samples.append((bytes(chosen.encode(values).tolist()), False, read))
    assert len(samples) == 6
    return Target("codec", samples)


def chakra(folder: Path) -> Target:
    workload = from_sizes([1024, 2048], 2, algorithm="ring", trials=1)
    files = to_chakra(workload, folder / "trace")
    return Target("Chakra", [_file(file, lambda: from_chakra(folder / "trace", trials=1).to_dict()) for file in files])


TARGETS = (
    profiler_trace,
    flight_recorder,
    torchtitan,
    *(plan, cluster, journal, events, replay, runs, index, result, watch, report, checkpoint, profile, codec),
    chakra,
)
