"""Logs of NCCL Inspector as its plug-in writes them: inspector_json.cc and json.cc of NCCL 2.30, format v4.0.

Keys, their order, number formats, `\\/` for a slash and the name of the file are those of the source. Bandwidths follow
inspectorComputeOpBw.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

FACTORS: dict[str, Callable[[int], tuple[float, float]]] = {
    "AllReduce": lambda n: (1.0, 2 * (n - 1) / n),
    "ReduceScatter": lambda n: (n, (n - 1) / n),
    "AllGather": lambda n: (n, (n - 1) / n),
    "Send": lambda n: (1.0, 1.0),
    "Recv": lambda n: (1.0, 1.0),
}


def line(
    rank: int,
    kind: str,
    number: int,
    size: int,
    time_us: int,
    *,
    num_ranks: int = 4,
    communicator: str = "0x7f8c496ae9f661",
    name: str = "DP Group 0",
    peer: int | None = None,
    timing: str = "kernel_gpu",
) -> str:
    """Return one record."""
    traffic, factor = FACTORS[kind](num_ranks)
    algorithm = size * traffic / 1e9 / (time_us * 1e-6) if time_us else 0.0
    prefix = "coll" if peer is None else "p2p"
    to = "" if peer is None else f'"p2p_peer":{peer},'
    escaped = name.replace("/", "\\/")
    return (
        f'{{"header":{{"id":"{communicator}","comm_name":"{escaped}","rank":{rank},"n_ranks":{num_ranks},"nnodes":2}},'
        '"metadata":{"inspector_output_format_version":"v4.0","git_rev":"0456df20","rec_mechanism":'
        f'"nccl_profiler_interface","dump_timestamp_us":{1752867229276385 + number},"hostname":"node{rank // 2}",'
        f'"pid":{438770 + rank}}},'
        f'"{prefix}_perf":{{"{prefix}":"{kind}","{prefix}_sn":{number},{to}"{prefix}_msg_size_bytes":{size},'
        f'"{prefix}_exec_time_us":{time_us},"{prefix}_timing_source":"{timing}","{prefix}_algobw_gbs":{algorithm:f},'
        f'"{prefix}_busbw_gbs":{algorithm * factor:f}}}}}\n'
    )


def write_log(folder: Path, rank: int, lines: list[str]) -> Path:
    """Write the log of one process, under the plug-in's name for it."""
    path = folder / f"node{rank // 2}-pid{438770 + rank}.log"
    path.write_text("".join(lines))
    return path


def late_rank(folder: Path, late: int, num_calls: int = 10) -> list[Path]:
    """Write a job of 4 ranks whose all-reduces take 1 ms, for one of which the others wait 0.5 ms."""
    return [
        write_log(
            folder,
            rank,
            [line(rank, "AllReduce", n, 2**20, 1000 + (n + rank) % 3 + 500 * (rank != late)) for n in range(num_calls)],
        )
        for rank in range(4)
    ]
