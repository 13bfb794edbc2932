"""Collectives by shared memory; workers of real plans on shares of a GPU are in benchmarks/gpu_shares.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _start(size: int, folder: Path, meeting: str = "meet") -> list[subprocess.Popen[str]]:
    words = [[str(HERE / "collectives_worker.py"), str(rank), str(size), str(folder / meeting)] for rank in range(size)]
    return _run(words, folder)


def _run(words: list[list[str]], folder: Path) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}
    return [
        subprocess.Popen(
            [sys.executable, *worker], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for worker in words
    ]


@pytest.mark.slow
@pytest.mark.parametrize("size", [3])
def test_every_collective_equals_its_definition(size: int, tmp_path: Path) -> None:
    workers = _start(size, tmp_path)
    for worker in workers:
        output, error = worker.communicate(timeout=120)
        assert output.startswith("equal"), error
        assert int(output.split()[1]) <= 40  # slots are reused: there are hundreds of messages


@pytest.mark.slow
def test_worker_that_ends_is_noticed(tmp_path: Path) -> None:
    begun = time.monotonic()
    first, second = _start(2, tmp_path, "meet-lost")
    output, error = first.communicate(timeout=60)
    second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (3, 0), error
    assert "closed by peer: worker 1" in output
    assert time.monotonic() - begun < 60  # the group's timeout


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "shard"), [("pipeline=2", False), ("data=2", False), ("data=2", True)])
def test_training_by_shared_memory_equals_a_plain_loop(mesh: str, shard: bool, tmp_path: Path) -> None:
    script = str(HERE / "training_worker.py")
    for worker in _run([[script, str(rank), mesh, str(shard), str(tmp_path / "meet")] for rank in range(2)], tmp_path):
        output, error = worker.communicate(timeout=120)
        assert output, error
        losses, expected = json.loads(output)
        assert losses == pytest.approx(expected, rel=1e-6)
