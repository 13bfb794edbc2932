"""Memory limits of control groups of both versions, read from a tree of files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.machine import host_memory, machine, memory_cgroup

GIB = 2**30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 16 GiB available."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable: {16 * 2**20} kB\n")
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory_cgroup, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory_cgroup, "_CGROUP", tmp_path / "cgroup")
    return tmp_path


def join_group(system: Path, line: str) -> None:
    """Let this process be in a group, as /proc/self/cgroup says."""
    with open(system / "proc" / "self" / "cgroup", "a", encoding="ascii") as file:
        file.write(line + "\n")


def write_group(system: Path, folder: str, limit: str, used: int, cache: int = 0) -> None:
    """Write a group's files: those of version 1 below ``memory``."""
    path = system / "cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    first = folder.startswith("memory")
    (path / ("memory.limit_in_bytes" if first else "memory.max")).write_text(f"{limit}\n")
    (path / ("memory.usage_in_bytes" if first else "memory.current")).write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 1\n{'total_' if first else ''}inactive_file {cache}\n")


def test_version_2(system: Path) -> None:
    join_group(system, "0::/jobs/one")
    write_group(system, "jobs/one", "max", 5)
    write_group(system, "jobs", str(4 * GIB), 3 * GIB)
    write_group(system, "jobs/other", "1", 1)
    assert host_memory.available_bytes() == GIB, "a group is limited by its parents"
    write_group(system, "jobs/one", str(2 * GIB), 2 * GIB - 100, cache=50)
    assert host_memory.available_bytes() == 150, "cached files can go"


def test_version_1(system: Path) -> None:
    join_group(system, "9:name=systemd:/")
    join_group(system, "4:memory:/jobs/one")
    join_group(system, "0::/")
    write_group(system, "memory", str(2**63 - 4096), 9 * GIB)
    write_group(system, "memory/jobs", str(2**63 - 4096), 9 * GIB)
    assert host_memory.available_bytes() == 16 * GIB, "no limit"
    write_group(system, "memory/jobs/one", str(3 * GIB), 3 * GIB, cache=GIB)
    assert host_memory.available_bytes() == GIB, "cached files can go"
    assert machine._memory_bytes() <= 3 * GIB  # type: ignore[operator]


def test_a_container_sees_its_group_as_the_root(system: Path) -> None:
    """The path is that of the host, which the container does not see."""
    join_group(system, "4:cpu,memory:/docker/0123")
    write_group(system, "memory", str(2 * GIB), GIB)
    assert host_memory.available_bytes() == GIB


@pytest.mark.parametrize("line", ["", "nonsense", "0::/../..", "4:memory:/a"])
def test_without_limits_the_machine_counts(system: Path, line: str) -> None:
    join_group(system, line)
    assert memory_cgroup.memory_limits() == []
    assert host_memory.available_bytes() == 16 * GIB


def test_more_used_than_allowed(system: Path) -> None:
    join_group(system, "0::/a")
    write_group(system, "a", "100", 200)
    assert host_memory.available_bytes() == 0
