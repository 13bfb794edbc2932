"""Chakra's file format, read and written without its package."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stagewright.errors import UsageError
from stagewright.files.chakra import Node, NodeType, read_nodes, write_ranks

# Written by mlc-chakra 1.0.0: metadata and one node with attributes of every scalar type, bytes and a list.
OFFICIAL = bytes.fromhex(
    "070a05302e302e34d3010805120772c3a96475636518072201022a0301ac0238f0a204520e0a0969735f6370755f6f70d80100520d0a0963"
    "6f6d6d5f747970654807520f0a09636f6d6d5f73697a6548808831520f0a0770675f6e616d65ea0103302d3152150a08636f6d6d5f746167"
    "38fdffffffffffffffff01520e0a0175688080808080808080800152060a0173880109520c0a016419000000000000f83f52080a01662d00"
    "00803e52090a01789d0109000000520d0a0179c901f7ffffffffffffff52080a0162fa01026162520c0a046c69737452040a020102"
)


def test_reads_what_the_official_package_wrote(tmp_path: Path) -> None:
    (tmp_path / "t.0.et").write_bytes(OFFICIAL)
    (node,) = read_nodes(tmp_path / "t.0.et")
    assert (node.id, node.name, node.type, node.duration_us) == (5, "réduce", NodeType.COMM_COLL_NODE, 70_000)
    assert (node.control_dependencies, node.data_dependencies) == ([2], [1, 300])
    assert node.attributes == {
        "is_cpu_op": False,
        "comm_type": 7,
        "comm_size": 803_840,
        "pg_name": "0-1",
        "comm_tag": -3,
        "u": 2**63,
        "s": -5,
        "d": 1.5,
        "f": 0.25,
        "x": 9,
        "y": -9,
    }


def test_official_package_reads_what_is_written(tmp_path: Path) -> None:
    proto = pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    attributes = {"is_cpu_op": False, "comm_size": 2**40, "comm_type": 7, "comm_tag": -1, "pg_name": "ü", "load": 0.5}
    node = Node(id=2**40, name="réduce", type=7, data_dependencies=[0, 300], duration_us=9, attributes=attributes)
    (path,) = write_ranks(tmp_path / "t", 1, lambda rank: [node])
    content = path.read_bytes()
    metadata, rest = content[1 : 1 + content[0]], content[1 + content[0] :]
    assert proto.GlobalMetadata.FromString(metadata).version == "0.0.4"
    read = proto.Node.FromString(rest[2:])  # its length takes two bytes
    assert (read.id, read.name, read.type, list(read.data_deps)) == (2**40, "réduce", 7, [0, 300])
    kinds = {attr.name: attr.WhichOneof("value") for attr in read.attr}
    assert {attr.name: getattr(attr, kinds[attr.name]) for attr in read.attr} == attributes
    assert (kinds["comm_size"], kinds["comm_tag"]) == ("int64_val", "int32_val")


def test_round_trip(tmp_path: Path) -> None:
    nodes = [
        Node(id=number, name=f"n{number}", type=4, data_dependencies=list(range(number)), attributes={"k": number - 2})
        for number in range(4)
    ]
    (path,) = write_ranks(tmp_path / "t", 1, lambda rank: nodes)
    assert list(read_nodes(path)) == nodes


@pytest.mark.parametrize("length", range(1, len(OFFICIAL), 7))
def test_truncated_files_are_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "t.0.et").write_bytes(OFFICIAL[:length])
    if length == 8:  # exactly the metadata
        assert list(read_nodes(tmp_path / "t.0.et")) == []
        return
    with pytest.raises(UsageError, match="is not a Chakra trace, or was cut off"):
        list(read_nodes(tmp_path / "t.0.et"))


@pytest.mark.parametrize("place", ["length", "field"])
def test_an_endless_number_is_refused_at_once(tmp_path: Path, place: str) -> None:
    """Two hundred thousand bytes of one varint took minutes: each byte shifted a longer number."""
    number = b"\x80" * 200_000 + b"\x01"
    body = b"\x08" + number  # a node whose id never ends
    length = bytes([len(body) & 0x7F | 0x80, len(body) >> 7 & 0x7F | 0x80, len(body) >> 14])
    (tmp_path / "t.0.et").write_bytes(OFFICIAL[:8] + (number if place == "length" else length + body))
    begun_s = time.process_time()
    with pytest.raises(UsageError, match="is not a Chakra trace"):
        list(read_nodes(tmp_path / "t.0.et"))
    assert time.process_time() - begun_s < 1
