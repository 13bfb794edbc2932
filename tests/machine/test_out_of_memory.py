"""Memory that is not there, told in one sentence."""

from __future__ import annotations

import pytest
import torch

from stagewright.errors import RunError
from stagewright.machine import out_of_memory as refusal
from stagewright.machine.out_of_memory import explain_oom, oom_error

GIB = 2**30
OF_TORCH = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.15 GiB is "
    "free. Of the allocated memory 70.00 GiB is allocated by PyTorch."
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GiB, 1 of them free, 71 taken by this process (70 by tensors), 8 by others."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 70 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 71 * GIB)


@pytest.mark.usefixtures("gpu")
def test_a_device_that_is_full() -> None:
    with pytest.raises(RunError) as caught, explain_oom("worker 3", lambda: "serial reference", 40 * GIB):
        raise torch.OutOfMemoryError(OF_TORCH)
    assert str(caught.value) == (
        "worker 3 is out of memory during serial reference: 2.50 GiB more wanted on cuda:1, of whose 80.0 GiB this "
        "process holds 70.0 GiB and others 8.00 GiB (40.0 GiB allowed); use a smaller batch, more micro-batches, "
        "activation checkpointing (--recompute always) or shorter samples, or a device with more memory"
    )
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_device_that_tells_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def broken(index: int) -> tuple[int, int]:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    told = oom_error(torch.OutOfMemoryError("out of memory"), who="worker 0", doing="capture")
    assert str(told).startswith("worker 0 is out of memory during capture: more wanted on cuda:0; use a smaller batch")


def test_a_host_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own words of a CPU's allocator."""
    monkeypatch.setattr(refusal, "available_bytes", lambda: 3 * GIB)
    with (
        pytest.raises(
            RunError, match=r"worker 0 .* during load model: 364 TiB more wanted on the host, where 3.00 GiB are"
        ),
        explain_oom("worker 0", lambda: "load model"),
    ):
        torch.empty(10**14)


def test_other_errors_stay_what_they_are() -> None:
    assert oom_error(RuntimeError("shapes can't be multiplied"), who="worker 0", doing="capture") is None
    with pytest.raises(ValueError, match="no"), explain_oom("worker 0", lambda: "capture"):
        raise ValueError("no")
