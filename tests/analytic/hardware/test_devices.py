"""Hardware and clusters by name."""

from __future__ import annotations

import pytest

from stagewright.analytic.hardware.devices import accelerator_of, accelerators, find_accelerator
from stagewright.analytic.hardware.named_cluster import is_cluster_name, named_cluster, network_of
from stagewright.cluster.cluster import DeviceGroup
from stagewright.errors import UsageError


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe 16GB"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H20", "H20"),
        ("h800", "H800"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_known_hardware(hardware: str, name: str) -> None:
    found = find_accelerator(hardware)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("hardware", ["NVIDIA RTX A1000", "GTX 480", ""])
def test_unknown_hardware_matches_nothing(hardware: str) -> None:
    assert find_accelerator(hardware) is None
    with pytest.raises(UsageError, match=r"state peak_flops = 300e12 and memory_bandwidth"):
        accelerator_of(DeviceGroup(kind="cuda", count=1, hardware=hardware))


def test_a_device_states_its_own_peak() -> None:
    own = accelerator_of(
        DeviceGroup(kind="cuda", count=1, hardware="NPU 9", peak_flops=4e14, memory_bandwidth=3e12, num_sms=64)
    )
    assert (own.flops_16, own.bandwidth_bytes_per_s, own.num_sms, own.source) == (4e14, 3e12, 64, "formulas")
    faster = accelerator_of(DeviceGroup(kind="cuda", count=1, hardware="A100", peak_flops=4e14))
    assert faster.flops_16 == 4e14
    assert faster.flops_32 == accelerators()["A100"].flops_32


def test_float32_is_not_at_the_16_bit_peak() -> None:
    assert accelerators()["A100"].flops("float32") == 19.5e12
    assert accelerators()["A100"].flops("bfloat16") == 312e12


def test_clusters_by_name() -> None:
    one, many = named_cluster("8xh100"), named_cluster("32x8xa100")
    assert (one.num_devices, many.num_devices, many.devices[0].hosts) == (8, 256, 32)
    assert one.links.inter_host is None
    assert network_of(many).group(8, 1).num_hosts == 1
    assert network_of(many).group(16, 1).num_hosts == 2
    assert network_of(many).group(4, 8).num_hosts == 4, "eight apart: each on its own host"
    assert is_cluster_name("8xrtx4090")
    assert not is_cluster_name("cluster.toml")
    assert named_cluster("8xa100-pcie-40gb").devices[0].memory_bytes == 40 << 30
    with pytest.raises(UsageError, match="hardware 'abacus' is unknown"):
        named_cluster("8xabacus")
