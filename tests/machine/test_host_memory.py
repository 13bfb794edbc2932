"""How much memory the machine, or the container, has left; models that have no room there."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.errors import UsageError
from stagewright.machine import host_memory, memory_cgroup

GIB = 2**30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """8 GiB available and 1 of swap."""
    monkeypatch.setattr(host_memory, "_PROC", tmp_path)
    monkeypatch.setattr(memory_cgroup, "_PROC", tmp_path)
    monkeypatch.setattr(memory_cgroup, "_CGROUP", tmp_path)
    lines = f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\nHugePages_Total: 0\nSwapFree: {2**20} kB\n"
    (tmp_path / "meminfo").write_text(lines)
    return tmp_path


def test_what_is_available(system: Path) -> None:
    assert host_memory.available_bytes() == 9 * GIB
    (system / "memory.max").write_text(f"{4 * GIB}\n")
    (system / "memory.current").write_text(f"{3 * GIB}\n")
    assert host_memory.available_bytes() == GIB
    (system / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    assert host_memory.available_bytes() == 2 * GIB, "the container's cached files can go"
    (system / "memory.max").write_text("max\n")
    assert host_memory.available_bytes() == 9 * GIB
    (system / "meminfo").unlink()
    assert host_memory.available_bytes() is None


def test_this_machine_tells() -> None:
    assert (host_memory.available_bytes() or GIB) > 2**20


def test_models_without_room() -> None:
    host_memory.check_model_memory("m", 9 * GIB // 2, 2, 9 * GIB)
    with pytest.raises(
        UsageError, match=r"^each of 4 workers here builds m .*: 4 × 3.00 GiB = 12.0 GiB needed, "
    ) as few:
        host_memory.check_model_memory("m", 3 * GIB, 4, 9 * GIB)
    assert str(few.value).endswith("9.00 GiB available; use at most 3 of them here or more machines")
    with pytest.raises(UsageError, match=r"9.00 GiB available; use a smaller model or more machines$"):
        host_memory.check_model_memory("m", 10 * GIB, 2, 9 * GIB)
    with pytest.raises(UsageError, match=r"m takes 10.0 GiB to build, but this machine has 9.00 GiB of memory"):
        host_memory.check_model_memory("m", 10 * GIB, 1, 9 * GIB)


def test_without_numbers_nothing_is_refused() -> None:
    host_memory.check_model_memory("m", 2**60, 4, None)


def test_processes_that_the_system_killed(system: Path) -> None:
    assert host_memory.oom_kills() == 0
    (system / "vmstat").write_text("pgfault 12\noom_kill 3\n")
    assert host_memory.oom_kills() == 3


def test_parts_that_workers_read_count_once() -> None:
    host_memory.check_model_memory("m", 9 * GIB, 4, 9 * GIB, num_parts=4)
    with pytest.raises(UsageError, match="each of 4 workers here reads 1/2 of m"):
        host_memory.check_model_memory("m", 10 * GIB, 4, 9 * GIB, num_parts=2)
