from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from stagewright.cluster import Device, device as device_module
from stagewright.cluster.device import keep_freed_memory
from stagewright.errors import UsageError

pins = pytest.mark.skipif(not device_module.can_pin(), reason="this system has no affinity")
CORES = sorted(device_module.available_cores())


def test_parse() -> None:
    everything = Device.parse("cpu")
    assert everything.cores == tuple(CORES)
    assert everything.num_threads == len(CORES)
    one = Device.parse(f"cpu:{CORES[0]}")
    assert (one.kind, one.cores, one.num_threads, str(one)) == ("cpu", (CORES[0],), 1, f"cpu:{CORES[0]}")
    assert one.torch_device() == torch.device("cpu")
    assert Device.parse(f"cpu:{CORES[0]}-{CORES[0]},{CORES[-1]}").cores == tuple(sorted({CORES[0], CORES[-1]}))
    gpu = Device.parse("cuda:3")
    assert (gpu.kind, gpu.index, gpu.cores, gpu.num_threads) == ("cuda", 3, (), 1)
    assert Device.parse("cuda").index == 0


@pytest.mark.parametrize("text", ["", "gpu", "cuda:x", "cuda:0-1", "cpu:", "cpu:a", "cpu:1-0", "cpu:0,", "cpu:-1"])
def test_wrong_text(text: str) -> None:
    with pytest.raises(UsageError):
        Device.parse(text)


def test_cores_that_are_not_there() -> None:
    with pytest.raises(UsageError, match=r"asks for core 4095-4096, but the cores here are .*; try cpu:"):
        Device.parse("cpu:4095-4096")


def test_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="the plan uses cuda:7, but torch sees no GPU here; use another device"):
        Device.parse("cuda:7").torch_device()


def test_hardware_has_a_name() -> None:
    assert Device.parse("cpu").hardware_name()


@pins
def test_pinned_pins_every_thread_and_restores() -> None:
    before, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    released = threading.Event()
    other = threading.Thread(target=released.wait)
    other.start()
    late: threading.Thread | None = None
    try:
        with Device.parse(f"cpu:{CORES[-1]}").pinned() as pinned:
            assert pinned
            assert os.sched_getaffinity(0) == {CORES[-1]}
            assert os.sched_getaffinity(other.native_id or 0) == {CORES[-1]}
            assert torch.get_num_threads() == 1
            late = threading.Thread(target=released.wait)
            late.start()
            assert os.sched_getaffinity(late.native_id or 0) == {CORES[-1]}
        assert os.sched_getaffinity(0) == before
        assert os.sched_getaffinity(other.native_id or 0) == before
        assert os.sched_getaffinity(late.native_id or 0) == before
        assert torch.get_num_threads() == num_threads
    finally:
        released.set()
        other.join()
        if late:
            late.join()


@pins
def test_restores_after_an_error() -> None:
    before, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), Device.parse(f"cpu:{CORES[0]}").pinned():
        _ = 1 / 0
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (before, num_threads)


@pins
def test_one_core_is_computed_on_by_one_thread() -> None:
    """Also where a library under torch took its number of threads when it was loaded, as on Arm processors."""
    values, weights = torch.randn(4, 128, 384), torch.randn(384, 384)
    with Device.parse(f"cpu:{CORES[0]}").pinned(), torch.no_grad():
        torch.nn.functional.linear(values, weights)
        own_s, all_s = time.thread_time(), time.process_time()
        for _ in range(20):
            torch.nn.functional.linear(values, weights)
        own_s, all_s = time.thread_time() - own_s, time.process_time() - all_s
    assert all_s < 1.2 * own_s + 0.02


@pins
def test_a_pinned_process_still_reaches_other_cores() -> None:
    with Device.parse(f"cpu:{CORES[0]}").pinned():
        assert device_module.usable_cores() >= set(CORES)
        assert Device.parse("cpu").cores == (CORES[0],)


def test_without_affinity_threads_alone_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "can_pin", lambda: False)
    with Device.parse("cpu:0").pinned() as pinned:
        assert not pinned
        assert torch.get_num_threads() == 1


def test_pin_process_before_torch() -> None:
    code = (
        "import os, sys\n"
        "from stagewright.cluster import Device, pin_process\n"
        f"pin_process(Device.parse('cpu:{CORES[0]}'))\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])\n"
        "if hasattr(os, 'sched_getaffinity'): print(os.sched_getaffinity(0))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "1 1 1"
    if device_module.can_pin():
        assert lines[1] == str({CORES[0]})


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU @ 2GHz\n", "Some CPU @ 2GHz"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "Arm Neoverse-N1"),
        ("processor\t: 0\nCPU implementer\t: 0x99\nCPU part\t: 0x123\n", "0x99 0x123"),
    ],
)
def test_processors_have_names(cpuinfo: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, **options: cpuinfo)
    assert Device.parse("cpu").hardware_name().endswith(name)


@pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux counts")
def test_memory_that_tensors_give_back_is_kept() -> None:
    code = (
        "import stagewright, time, resource\n"
        "from stagewright.cluster.device import Device\n"
        "import torch\n"
        "with Device.parse('cpu').pinned():\n"
        "    for turn in range(8):\n"
        "        tensors = [torch.zeros(1 << 18) for _ in range(16)]\n"
        "        for one in tensors: time.sleep(0.01)  # torch's own allocator on Arm gives back after a while\n"
        "        while tensors: tensors.pop(); time.sleep(0.002)\n"
        "        if turn == 1: before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MIMALLOC")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) < 1000  # six times 16 tensors of 1 MiB have 24,576 pages


def test_measuring_in_a_worker_leaves_its_freed_memory_kept() -> None:
    before = keep_freed_memory()
    try:
        with Device.parse("cpu").pinned():
            pass
        assert keep_freed_memory()
    finally:
        keep_freed_memory(before)
    with Device.parse("cpu").pinned():
        pass
    assert keep_freed_memory(before) == before
