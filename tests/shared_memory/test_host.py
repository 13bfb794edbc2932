"""Memory of the host for other processes: mapped again, without a name, in buffers of a few sizes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from stagewright.shared_memory.host import HostMemory, memory_id


def test_a_buffer_is_the_same_memory_when_opened() -> None:
    memory = HostMemory()
    buffer = memory.allocate(100_000)
    assert buffer.nbytes == 1 << 17, "a power of two"
    opened = memory.open(memory.export(buffer))
    buffer.fill_(7)
    assert opened.sum() == 7 * buffer.nbytes
    memory.close()
    assert opened[-1] == 7, "mapped memory outlives its descriptor"


def test_nothing_is_left_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    memory = HostMemory()
    memory.open(memory.export(memory.allocate(1)))
    memory.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_buffer_of_a_process_that_has_ended_is_not_opened() -> None:
    with pytest.raises(RuntimeError, match="unable to open file"):
        HostMemory().open({"process": 2**22 + 1, "descriptor": 3, "size": 8})


def test_processes_of_one_host_have_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    own = memory_id()
    assert own == memory_id() > 0
    assert torch.tensor([own]).item() == own, "it fits an integer of torch"
    monkeypatch.setattr(os, "readlink", lambda path: f"other {path}")
    assert memory_id() not in (0, own), "another namespace"

    def unknown(path: Path, **options: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", unknown)
    assert memory_id() == 0, "not Linux"
