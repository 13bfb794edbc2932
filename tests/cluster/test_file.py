from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from stagewright.cluster import Cluster, DeviceGroup, Link, Links, read_cluster, write_cluster
from stagewright.errors import UsageError

EXAMPLE = """
[[devices]]
kind = "cuda"
count = 2
memory = "80GiB"
host = "a"

[[devices]]
kind = "cpu"
count = 1
cores = 4
speed = 0.05
host = "b"

[links.intra_host]
bandwidth = "50GB/s"
latency = "10us"

[links.inter_host]
bandwidth = "100Gbit/s"
latency = "0.05ms"
"""


def read(tmp_path: Path, content: str) -> Cluster:
    (tmp_path / "cluster.toml").write_text(content)
    return read_cluster(tmp_path / "cluster.toml")


def test_example(tmp_path: Path) -> None:
    cluster = read(tmp_path, EXAMPLE)
    assert cluster.num_devices == 3
    assert [device.kind for device in cluster.members] == ["cuda", "cuda", "cpu"]
    assert cluster.members[1].memory_bytes == 80 * 2**30
    assert cluster.members[2] == DeviceGroup(kind="cpu", count=1, cores=4, speed=0.05, host="b")
    assert cluster.link(0, 1) == Link(bandwidth_bytes_per_s=50e9, latency_s=1e-5)
    assert cluster.link(2, 0).message_s(12.5e9) == pytest.approx(1.00005)
    assert cluster.link(1, 1).message_s(10**12) == 0.0


links = st.builds(Link, bandwidth_bytes_per_s=st.floats(1, 1e15), latency_s=st.floats(0, 10))
groups = st.builds(
    DeviceGroup,
    kind=st.sampled_from(["cpu", "cuda"]),
    count=st.integers(1, 10**6),
    memory_bytes=st.none() | st.integers(1, 2**60),
    speed=st.floats(1e-9, 1e9),
    cores=st.integers(1, 64),
    host=st.text(max_size=9),
    hardware=st.none() | st.text(max_size=9),
)
clusters = st.builds(
    Cluster,
    devices=st.lists(groups, min_size=1, max_size=4).map(tuple),
    links=st.builds(Links, intra_host=links, inter_host=links),
)


@given(clusters)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> None:
    path = tmp_path_factory.getbasetemp() / "cluster.toml"
    write_cluster(cluster, path, "Two lines\nof comment.")
    assert read_cluster(path) == cluster
    assert path.read_text().startswith("# Two lines\n# of comment.\n[[devices]]\n")


def test_without_links_they_are_free(tmp_path: Path) -> None:
    cluster = read(tmp_path, '[[devices]]\nkind = "cpu"\ncount = 2')
    assert cluster.link(0, 1) == Link(bandwidth_bytes_per_s=math.inf, latency_s=0.0)
    write_cluster(cluster, tmp_path / "again.toml")
    assert read_cluster(tmp_path / "again.toml") == cluster


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "{path}: devices is missing"),
        ("devices = []", "{path}: a cluster needs at least one device"),
        ('[[devices]]\nkind = "cpu"', "{path}: devices[0]: count is missing"),
        ('[[devices]]\nkind = "gpu"\ncount = 1', "unknown kind 'gpu'; did you mean 'cpu'"),
        ('[[devices]]\nkind = "cpu"\ncuont = 1', "unknown key 'cuont'; did you mean 'count'? (in {path}: devices[0])"),
        ('[[devices]]\nkind = "cpu"\ncount = 0', "{path}: devices[0]: count = 0, but a device needs at least 1"),
        ('[[devices]]\nkind = "cpu"\ncount = 1\nspeed = 0', "{path}: devices[0]: speed = 0.0, but must be above 0"),
        ('[links.intra_host]\nbandwidth = "fast"', "{path}: links: intra_host: bandwidth: 'fast' is not a rate"),
        (
            "[links.intra_host]\nbandwidth = 0",
            "{path}: links: intra_host: bandwidth = 0.0 bytes/s, but must be above 0",
        ),
        ("[links.intrahost]\nbandwidth = 1", "unknown key 'intrahost'; did you mean 'intra_host'"),
        (
            '[[devices]]\nkind = "cpu"\ncount = 1\nhost = "a"\n[[devices]]\nkind = "cpu"\ncount = 1\nhost = "b"',
            "{path}: the devices are on 2 hosts (a, b), but no link between hosts is given: add [links.inter_host]",
        ),
    ],
)
def test_wrong_files(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, content)
    assert message.format(path=tmp_path / "cluster.toml") in str(caught.value)
