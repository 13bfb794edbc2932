"""Two pinned processes, a real link; and that none of them is left whatever happens."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from stagewright.cluster.device import available_cores
from stagewright.errors import RunError
from stagewright.machine import probe_links as probe
from stagewright.machine.link_fit import LinkPoint, fit_link
from stagewright.machine.machine import Gpu, Machine, default_devices, probe_machine, separate_cores

CORES = sorted(available_cores())


def children() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"stagewright.machine.link_worker" in words and parent == os.getpid():
            found.add(path.parent.name)
    return found


def test_a_real_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    measured = probe.measure_link((f"cpu:{CORES[0]}", f"cpu:{CORES[-1]}"), budget_s=0.3)
    assert [point.num_bytes for point in measured.points] == [8, 4096, 2**16, 2**18, 2**20, 2**22, 2**24]
    assert all(point.num_messages >= 6 for point in measured.points)
    assert 1e-6 < measured.link.latency_s < 0.1
    assert 1e7 < measured.link.bandwidth_bytes_per_s < 1e12
    assert measured.backend == "gloo"
    assert not children()


def test_an_end_that_fails_ends_both() -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match=r"the link could not be measured: end [01] ended with code 1: .*core 4095"):
        probe.measure_link((f"cpu:{CORES[0]}", "cpu:4095"))
    assert time.monotonic() - start < 90
    assert not children()


def test_a_measurement_that_hangs_is_ended() -> None:
    with pytest.raises(RunError, match=r"end 0 had not ended after 0.2 s: no message"):
        probe.measure_link((f"cpu:{CORES[0]}", f"cpu:{CORES[-1]}"), limit_s=0.2)
    assert not children()


def test_this_machine() -> None:
    machine = probe_machine()
    assert machine.processor
    assert set(machine.separate_cores) <= set(machine.cores)
    assert machine.memory_bytes is None or machine.memory_bytes > 2**27
    assert "gloo" in machine.backends
    assert machine.versions["torch"].startswith("2.")
    assert machine.to_dict()["versions"]["python"].startswith("3.")


MACHINE = Machine(
    system="Linux",
    processor="A processor",
    cores=(0, 1, 2, 3),
    separate_cores=(0, 1, 2, 3),
    core_quota=None,
    can_pin=True,
    memory_bytes=8 * 2**30 + 1,
    gpus=(),
    backends=("gloo",),
    versions={"pyarrow": "1"},
)


def test_a_machine_as_a_cluster() -> None:
    link = fit_link([LinkPoint(num_bytes=n, median_s=1e-5 + n / 1e9, spread_s=0.0, num_messages=1) for n in (8, 2**20)])
    (group,) = probe.cluster_of(MACHINE, link).devices
    assert (group.kind, group.count, group.memory_bytes, group.hardware) == ("cpu", 4, 2 * 2**30, "A processor")
    assert probe.cluster_of(MACHINE, link).links.intra_host == link.link
    limited = dataclasses.replace(MACHINE, core_quota=2.5)
    assert probe.cluster_of(limited).devices[0].count == 2
    gpus = tuple(Gpu(index=index, name="G", memory_bytes=80 * 2**30) for index in range(2))
    (group,) = probe.cluster_of(dataclasses.replace(MACHINE, gpus=gpus)).devices
    assert (group.kind, group.count, group.memory_bytes) == ("cuda", 2, 80 * 2**30)


def test_remarks() -> None:
    assert MACHINE.remarks == ()
    threads = dataclasses.replace(MACHINE, separate_cores=(0, 2))
    assert threads.remarks == ("4 hyper-threads are 2 cores: use one CPU device a core (cpu:0, cpu:2 …).",)
    assert "may use 2.5 of 4 cores' time" in dataclasses.replace(MACHINE, core_quota=2.5).remarks[0]
    worst = dataclasses.replace(MACHINE, cores=(0,), separate_cores=(0,), can_pin=False, backends=(), versions={})
    assert [remark.split(":")[0] for remark in worst.remarks] == [
        "This system can't pin processes to cores",
        "There is one core",
        "This torch has no Gloo",
        "pyarrow is not installed, so events are written as JSON lines; install it with",
    ]


def test_hyper_threads_are_told_by_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stagewright.machine import machine

    for core in range(4):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{core % 2}\n")
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    assert separate_cores(range(4)) == (0, 1)
    assert separate_cores(range(1, 6)) == (1, 2, 4, 5)


def test_devices_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from stagewright.machine import machine

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "usable_cores", lambda: frozenset({0, 1, 2}))
    monkeypatch.setattr(machine, "separate_cores", lambda: (0, 2))
    assert default_devices(2) == ("cpu:0", "cpu:2")
    assert default_devices(5, share=True) == ("cpu:0", "cpu:2", "cpu:1", "cpu:0", "cpu:2")
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert default_devices(2) == ("cuda:0", "cuda:1")
    assert default_devices(3) == ("cuda:0", "cuda:1", "cuda:0")
    assert default_devices(3, share=True)[0] == "cpu:0"
