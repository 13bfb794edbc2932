"""A job's operations as a table, one row for each: the Parquet format of ByteDance-Seed/StragglerAnalysis.

    dp_rank  stage  rank  step  optype           start_ts  duration  seq_id
    0        0      0     16    forward-compute  0.10      0.85      0

Dependencies follow from the kinds, as in Megatron's schedules without virtual stages: a rank computes one operation
after the other; receive → compute → send; the parameters' all-gather before the first forward; after the last backward
the reductions of gradients, clipping and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stagewright.errors import UsageError
from stagewright.extras import require
from stagewright.trace.stragglers.job import Job, Op, Times

MAX_ROWS = 20_000_000
_COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
_KINDS = {"forward-compute": "forward", "backward-compute": "backward"}
_TAIL = (
    *("gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "grads-reduce-scatter"),
    *("separate-grads-all-reduce", "optimizer-clip-main-grad", "optimizer"),
)
_SYNCED = ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce", "optimizer-clip-main-grad")
_MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
_COMMUNICATION = frozenset((*_SYNCED, *_MESSAGES, "layernorm-grads-all-reduce", "embedding-grads-all-reduce"))


def read_operation_table(path: Path) -> Job:
    """Read a table of operations."""
    require("pyarrow", f"reading {path}")
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, thrift_string_size_limit=2**24, thrift_container_size_limit=2**20) as file:
            names = set(file.schema_arrow.names)
            missing = [name for name in _COLUMNS if name not in names]
            if missing:
                raise UsageError(f"{path} is no table of operations: it has no column {', '.join(missing)}")
            if file.metadata.num_rows > MAX_ROWS:
                raise UsageError(f"{path} has {file.metadata.num_rows} rows, but at most {MAX_ROWS} are read")
            table = file.read(columns=list(_COLUMNS), use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None
    return job_of_columns({name: table[name].to_pylist() for name in _COLUMNS}, str(path))


def job_of_columns(columns: dict[str, list[Any]], source: str) -> Job:
    """Return the job of a table's columns; every replica and step must have the same operations."""
    if not columns["step"]:
        raise UsageError(f"{source} has no operations")
    steps = {step: index for index, step in enumerate(sorted(set(columns["step"])))}
    num_replicas = 1 + max(columns["dp_rank"])
    shape = (num_replicas, len(steps))
    starts: dict[Op, Times] = {}
    ends: dict[Op, Times] = {}
    ranks: dict[tuple[int, int], int] = {}
    rows = zip(*(columns[name] for name in _COLUMNS), strict=True)
    for replica, stage, rank, step, kind, start, duration, number in rows:
        op = Op(int(stage), _KINDS.get(kind, kind), int(number))
        if op not in starts:
            starts[op], ends[op] = np.full(shape, np.nan), np.full(shape, np.nan)
        starts[op][replica, steps[step]] = start
        ends[op][replica, steps[step]] = start + duration
        ranks[replica, op.stage] = int(rank)
    incomplete = [op for op, times in starts.items() if np.isnan(times).any()]
    if incomplete:
        op = incomplete[0]
        raise UsageError(
            f"{source}: {op.kind} {op.number} of stage {op.stage} is missing in some steps or replicas; leave out "
            "incomplete steps"
        )
    num_stages = 1 + max(op.stage for op in starts)
    groups = _groups(starts, num_stages)
    synced = frozenset(op for op in starts if op.kind in _SYNCED and num_replicas > 1)
    durations = {op: ends[op] - starts[op] for op in starts}
    for group in [*groups, *((op,) for op in synced if not any(op in group for group in groups))]:
        common = starts[group[0]]
        for op in group[1:]:
            common = np.maximum(common, starts[op])
        if group[0] in synced:
            common = np.broadcast_to(common.max(axis=0), common.shape)
        durations |= {op: np.maximum(0.0, ends[op] - common) for op in group}
    return Job(
        durations=durations,
        depends=_depends(starts, num_stages),
        groups=groups,
        synced=synced,
        communication=_COMMUNICATION,
        ranks=ranks,
    )


def _groups(starts: dict[Op, Times], num_stages: int) -> list[tuple[Op, ...]]:
    groups: list[tuple[Op, ...]] = []
    for op in starts:
        peer = {"forward-send": op.stage + 1, "backward-send": op.stage - 1}.get(op.kind)
        if peer is not None:
            received = Op(peer, op.kind.replace("send", "recv"), op.number)
            if received in starts:
                groups.append((op, received))
    for kind, stages in (("embedding-grads-all-reduce", {0, num_stages - 1}), ("optimizer-clip-main-grad", None)):
        members = tuple(op for op in starts if op.kind == kind and (stages is None or op.stage in stages))
        if members:
            groups.append(members)
    return groups


def _depends(starts: dict[Op, Times], num_stages: int) -> dict[Op, list[Op]]:
    depends: dict[Op, list[Op]] = {op: [] for op in starts}

    def chain(ops: Sequence[Op], first: Sequence[Op] = ()) -> None:
        before = list(first)
        for op in ops:
            depends[op] += before
            before = [op]

    for stage in range(num_stages):
        own = [op for op in starts if op.stage == stage]

        def ordered(*kinds: str, own: list[Op] = own) -> list[Op]:
            return sorted(
                (op for op in own if op.kind in kinds), key=lambda op: (float(starts[op][0, 0]), op.number, op.kind)
            )

        compute = ordered("forward", "backward")
        chain(compute)
        for kind in _MESSAGES:
            chain(ordered(kind))
        for op in compute:
            received, sent = Op(stage, f"{op.kind}-recv", op.number), Op(stage, f"{op.kind}-send", op.number)
            if received in depends:
                depends[op].append(received)
                if op.number > 0:  # a receive is posted after the computation before it
                    depends[received].append(Op(stage, op.kind, op.number - 1))
            if sent in depends:
                depends[sent].append(op)
        _post_first_backward(compute, depends, stage)
        shared = ordered("params-all-gather", "grads-reduce-scatter")
        chain(shared)
        gathers = [op for op in shared if op.kind == "params-all-gather"]
        forward = [op for op in compute if op.kind == "forward"]
        if gathers and forward:
            depends[forward[0]].append(gathers[-1])
        chain([op for kind in _TAIL for op in ordered(kind)], compute[-1:])
    return depends


def _post_first_backward(compute: Sequence[Op], depends: dict[Op, list[Op]], stage: int) -> None:
    """Post the first backward message after the last but one forward before it."""
    index = next((i for i, op in enumerate(compute) if op.kind == "backward"), 0)
    if index < 2:
        return
    for kind in ("backward-recv", "backward-send"):
        op = Op(stage, kind, 0)
        if op in depends:
            depends[op].append(compute[index - 2])
