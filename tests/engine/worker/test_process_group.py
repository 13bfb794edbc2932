"""Which networks and which names the workers of a machine take."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stagewright.cluster.device import Device
from stagewright.engine.worker import process_group
from stagewright.engine.worker.process_group import join_group


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What torch was asked for; variables are put back."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_HOSTID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda kind, **rest: found.append((kind, rest)))
    monkeypatch.setattr(process_group.torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Device, "torch_device", lambda self: None)
    return found


def test_cpus_of_one_machine_talk_over_its_loopback(joined: list[tuple[str, dict[str, Any]]]) -> None:
    join_group(Device.parse("cpu:0"), worker=0, devices=("cpu:0", "cpu:0"), one_machine=True, world_size=1)
    assert joined == [("gloo", {"world_size": 1})]
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert "NCCL_HOSTID" not in os.environ


def test_workers_that_share_a_gpu_are_machines_of_their_own_to_nccl(joined: list[tuple[str, dict[str, Any]]]) -> None:
    join_group(Device.parse("cuda:0"), worker=1, devices=("cuda:0", "cuda"), one_machine=True)
    assert joined == [("cpu:gloo,cuda:nccl", {})]
    assert os.environ["NCCL_HOSTID"].endswith("-worker-1")
    assert os.environ["NCCL_SOCKET_IFNAME"] in ("lo", "lo0")


@pytest.mark.parametrize(
    ("devices", "one_machine"), [(("cuda:0", "cuda:1"), True), ((), True), (("cuda:0", "cuda:0"), False)]
)
def test_gpus_of_their_own_keep_their_fast_links(
    joined: list[tuple[str, dict[str, Any]]], devices: tuple[str, ...], one_machine: bool
) -> None:
    """Two machines name the same numbers; they share nothing."""
    join_group(Device.parse("cuda:0"), worker=0, devices=devices, one_machine=one_machine)
    assert "NCCL_HOSTID" not in os.environ
    assert "NCCL_SOCKET_IFNAME" not in os.environ
