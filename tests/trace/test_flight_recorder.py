"""Dumps of the Flight Recorder: who did not join, who differs, who is late; no code of a file runs."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from stagewright.errors import UsageError
from stagewright.trace.flight_recorder import compare_dumps, is_flight_recorder, read_dump


def entry(number: int, name: str = "all_reduce", size: int = 4, at_ms: float = 0.0) -> dict[str, Any]:
    frames = [{"filename": "/x/torch/distributed/c10d.py", "line": 1}, {"filename": "/home/me/train.py", "line": 7}]
    return {
        "frames": frames,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": round((number * 100 + at_ms) * 1e6),
        "input_sizes": [[size]],
        "is_p2p": False,
    }


def dump(folder: Path, rank: int, entries: list[dict[str, Any]]) -> Path:
    path = folder / f"nccl_trace_rank_{rank}"
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": entries}))
    return path


def test_a_rank_that_did_not_join_is_named_with_both_lines(tmp_path: Path) -> None:
    paths = [dump(tmp_path, rank, [entry(n) for n in range(1, 4 - (rank == 1))]) for rank in range(3)]

    calls, (finding,) = compare_dumps(paths)

    assert [len(own) for own in calls.values()] == [3, 2, 3]
    assert (finding.kind, finding.ranks) == ("missing", (1,))
    assert "Rank 1 did not join call 3, all_reduce [[4]] of group default_pg (train.py:7)" in finding.sentence


def test_different_calls_of_one_number_are_a_mismatch(tmp_path: Path) -> None:
    paths = [dump(tmp_path, rank, [entry(1), entry(2, size=8 if rank == 2 else 4)]) for rank in range(3)]

    _, (finding,) = compare_dumps(paths)

    assert (finding.kind, finding.ranks) == ("mismatch", (2,))
    assert "[[8]]" in finding.sentence


def test_the_rank_that_calls_last_is_late(tmp_path: Path) -> None:
    paths = [dump(tmp_path, rank, [entry(n, at_ms=5.0 * (rank == 1)) for n in range(1, 9)]) for rank in range(2)]

    _, (finding,) = compare_dumps(paths)

    assert (finding.kind, finding.ranks) == ("late", (1,))
    assert "5.00 ms" in finding.sentence


def test_equal_dumps_have_no_findings(tmp_path: Path) -> None:
    paths = [dump(tmp_path, rank, [entry(n) for n in range(1, 9)]) for rank in range(2)]

    assert compare_dumps(paths)[1] == []


def test_json_is_read_like_a_pickle(tmp_path: Path) -> None:
    path = tmp_path / "dump_0.json"
    path.write_text(json.dumps({"entries": [entry(1)]}))

    assert is_flight_recorder(path)
    assert read_dump(path) == read_dump(dump(tmp_path, 0, [entry(1)]))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"entries": [Evil()]}))

    with pytest.raises(UsageError, match="plain values only"):
        read_dump(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\x80", b"\x80\x04.", b"{}", b'{"entries": 3}', b"\x80\x04N."])
def test_a_damaged_dump_is_refused_with_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank_0"
    path.write_bytes(content)

    with pytest.raises(UsageError, match="no dump of the Flight Recorder"):
        read_dump(path)
