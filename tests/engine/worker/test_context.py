"""Networks and NCCL host ids of a worker's process group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest

from stagewright.cluster.device import Device
from stagewright.engine.worker import context
from stagewright.engine.worker.context import join_group
from stagewright.engine.worker.placement import RankPlacement


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Arguments of torch's init_process_group, which is not called; environment variables are restored."""
    calls: list[tuple[str, dict[str, Any]]] = []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_HOSTID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(context.dist, "init_process_group", lambda kind, **rest: calls.append((kind, rest)))
    monkeypatch.setattr(context.torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Device, "torch_device", lambda self: None)
    return calls


def placed(rank: int, num_machines: int = 1) -> RankPlacement:
    return RankPlacement(rank=rank, num_workers=2, num_machines=num_machines, store=("127.0.0.1", 1))


def test_cpu_workers_on_one_machine_use_the_loopback(backends: list[tuple[str, dict[str, Any]]]) -> None:
    join_group(Device.parse("cpu:0"), placed(0), ("cpu:0", "cpu:0"), hang_s=300.0)
    assert backends == [("gloo", {"timeout": timedelta(seconds=600)})]
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert "NCCL_HOSTID" not in os.environ


def test_a_single_process_needs_no_store_of_an_agent(backends: list[tuple[str, dict[str, Any]]]) -> None:
    join_group(Device.parse("cpu:0"), RankPlacement(), (), hang_s=1.0)
    ((_, options),) = backends
    assert (options["rank"], options["world_size"], options["timeout"]) == (0, 1, timedelta(seconds=240))


def test_workers_on_one_gpu_have_different_nccl_host_ids(backends: list[tuple[str, dict[str, Any]]]) -> None:
    join_group(Device.parse("cuda:0"), placed(1), ("cuda:0", "cuda"), hang_s=300.0)
    assert [backend for backend, _ in backends] == ["cpu:gloo,cuda:nccl"]
    assert os.environ["NCCL_HOSTID"].endswith("-worker-1")
    assert os.environ["NCCL_SOCKET_IFNAME"] in ("lo", "lo0")


@pytest.mark.parametrize(("devices", "num_machines"), [(("cuda:0", "cuda:1"), 1), ((), 1), (("cuda:0", "cuda:0"), 2)])
@pytest.mark.usefixtures("backends")
def test_workers_on_separate_gpus_keep_their_fast_links(devices: tuple[str, ...], num_machines: int) -> None:
    """Two machines may give their GPUs the same index."""
    join_group(Device.parse("cuda:0"), placed(0, num_machines), devices, hang_s=300.0)
    assert "NCCL_HOSTID" not in os.environ
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_tensor_groups_share_memory_where_all_workers_can() -> None:
    assert context.backend_in_memory([5, 5, 5]) == "stagewright_host"
    assert context.backend_in_memory([5, 5, 7]) is None, "another host, container or emulated network"
    assert context.backend_in_memory([0, 0]) is None, "GPUs, or a system without such memory"
