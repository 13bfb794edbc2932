"""One log of NCCL Inspector: a JSON object in each line, one for each collective, send or receive of one process.

    {"header":   {"id": "0x7f8c496ae9f661", "comm_name": "DP Group 0", "rank": 2, "n_ranks": 8, "nnodes": 1},
     "metadata": {"inspector_output_format_version": "v4.0", "dump_timestamp_us": …, "hostname": "a", "pid": 7, …},
     "coll_perf": {"coll": "AllReduce", "coll_sn": 1407, "coll_msg_size_bytes": 17179869184, "coll_exec_time_us": 61974,
                   "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 277.2, "coll_busbw_gbs": 485.1}}

With ``p2p_perf``, names begin with ``p2p_`` and there is a ``p2p_peer``. The plug-in writes files ``HOST-pidPID.log``.
The last line of a job that was killed may be incomplete; it is left out.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stagewright.errors import UsageError
from stagewright.files.json_values import MAX_FILE_BYTES, parse_json

MAX_LOG_BYTES = 2 * MAX_FILE_BYTES
"""Size, unpacked, above which a log is refused: about a million operations."""
SUFFIXES = (".log", ".jsonl", ".json", ".log.gz", ".jsonl.gz")

_MARK = b'"inspector_output_format_version"'
_MAX_LINE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A collective, send or receive as one rank executed it."""

    communicator: str
    """Its hash, the same on all ranks."""
    name: str
    """The communicator's name; empty if it has none."""
    rank: int
    """In the communicator."""
    num_ranks: int
    num_nodes: int
    host: str
    pid: int
    kind: str
    """AllReduce, ReduceScatter, …, Send, Recv."""
    number: int
    """Sequence number in the communicator."""
    peer: int | None
    """Of a send or receive: rank in the communicator."""
    bytes: int
    seconds: float
    """From the start of its kernel to its end, waiting for late ranks included."""
    bus_bandwidth: float
    """Bytes/s, as NCCL's tests count it."""
    is_kernel_time: bool
    """Whether the kernel was timed, and not only its launch."""


def is_inspector_log(path: Path) -> bool:
    """Whether a file looks like a log of the Inspector."""
    if not path.name.endswith(SUFFIXES):
        return False
    try:
        with _open(path) as file:
            return _MARK in file.read(2000)
    except (OSError, EOFError, zlib.error):
        return False


def inspector_logs(target: Path) -> list[Path]:
    """Return the logs in a folder, or the file itself; empty if there are none. A run folder has none."""
    if (target / "plan.toml").exists():
        return []
    if target.is_dir():
        files = (path for path in sorted(target.rglob("*")) if path.is_file())
        return [path for path in files if is_inspector_log(path)]
    return [target] if is_inspector_log(target) else []


def read_log(path: Path) -> list[Operation]:
    """Read the operations of one process."""
    try:
        return list(_operations(path))
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from None


def _operations(path: Path) -> Iterator[Operation]:
    total = 0
    with _open(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
            total += len(line)
            if total > MAX_LOG_BYTES:
                raise UsageError(f"{path} has more than {MAX_LOG_BYTES} bytes; keep its last lines: tail -n 100000")
            if not line.strip():
                continue
            try:
                yield _operation(parse_json(line))
            except ValueError as error:
                if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
                    return  # the job ended while the line was written
                raise UsageError(f"line {number} of {path} is no record of NCCL Inspector: {error}") from None


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path))
    return open(path, "rb")


def _operation(record: object) -> Operation:
    header, metadata = _object(record, "header"), _object(record, "metadata")
    prefix = "p2p" if isinstance(record, dict) and "p2p_perf" in record else "coll"
    values = _object(record, f"{prefix}_perf")
    name = header.get("comm_name")
    rank, num_ranks = _count(header, "rank"), _count(header, "n_ranks")
    peer = _count(values, "p2p_peer") if prefix == "p2p" else None
    if max(rank, peer or 0) >= num_ranks:
        raise ValueError(f"rank {rank}, peer {peer} of {num_ranks} ranks")
    return Operation(
        communicator=_text(header, "id"),
        name=name if isinstance(name, str) and name != "unknown" else "",
        rank=rank,
        num_ranks=num_ranks,
        num_nodes=_count(header, "nnodes"),
        host=_text(metadata, "hostname"),
        pid=_count(metadata, "pid"),
        kind=_text(values, prefix),
        number=_count(values, f"{prefix}_sn"),
        peer=peer,
        bytes=_count(values, f"{prefix}_msg_size_bytes"),
        seconds=_count(values, f"{prefix}_exec_time_us") * 1e-6,
        bus_bandwidth=1e9 * _number(values, f"{prefix}_busbw_gbs"),
        is_kernel_time=values.get(f"{prefix}_timing_source", "kernel_gpu") != "collective_cpu",
    )


def _object(record: object, name: str) -> Mapping[str, Any]:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, dict):
        raise ValueError(f"it has no {name}")
    return value


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}")
    return value[:200]


def _count(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{name} is {str(value)[:80]}")
    return value


def _number(values: Mapping[str, Any], name: str) -> float:
    """Return a number; the plug-in writes NaN as a string, which is 0 here."""
    value = values.get(name)
    if value == "nan":
        return 0.0
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {str(value)[:80]}")
    return float(value)
