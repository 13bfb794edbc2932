"""Traces that other programs read."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from made_profiles import equal_units, make_costs
from stagewright.cluster.cluster import Link, Links
from stagewright.forecast.chakra_trace import write_chakra
from stagewright.forecast.chrome_trace import write_chrome_trace
from stagewright.forecast.predict import predict
from stagewright.plan.value import Mesh

LINKS = Links(intra_host=Link(bandwidth_bytes_per_s=100.0, latency_s=0.0))


def test_chrome(tmp_path: Path) -> None:
    costs = make_costs(equal_units(4), mesh=Mesh(pipeline=2, data=2), microbatches=4, links=LINKS)
    forecast = predict(costs)
    write_chrome_trace(forecast, tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in events:
        if one["ph"] == "X":
            rows.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    assert {worker for worker, _ in rows} == {0, 1}
    for spans in rows.values():
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(sorted(spans))), "strictly nested"
    assert any(one["ph"] == "C" and one["args"]["bytes"] > 0 for one in events)


def test_chakra(tmp_path: Path) -> None:
    proto = pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    costs = make_costs(equal_units(2), mesh=Mesh(pipeline=2, data=2), microbatches=3, links=LINKS)
    paths = write_chakra(costs, tmp_path / "step")
    assert [path.name for path in paths] == [f"step.{rank}.et" for rank in range(4)]
    first = read(proto, paths[0].read_bytes())
    kinds = [proto.NodeType.Name(node.type) for node in first]
    assert kinds.count("COMP_NODE") == 6
    assert kinds.count("COMM_SEND_NODE") == kinds.count("COMM_RECV_NODE") == 3
    assert kinds.count("COMM_COLL_NODE") == 1
    sent = next(node for node in first if node.type == proto.COMM_SEND_NODE)
    values = {one.name: one for one in sent.attr}
    assert values["comm_size"].int64_val == 10
    assert (values["comm_src"].int32_val, values["comm_dst"].int32_val) == (0, 1)
    known: set[int] = set()
    for node in first:
        assert set(node.data_deps) <= known, "a node depends on earlier ones alone"
        known.add(node.id)
    tags = {(one.name, one.int32_val) for node in read(proto, paths[1].read_bytes()) for one in node.attr}
    assert ("comm_tag", values["comm_tag"].int32_val) in tags, "both ends have the same tag"


def read(proto, content: bytes):  # type: ignore[no-untyped-def]
    """The nodes of a file: messages behind their lengths."""
    at, found = 0, []
    while at < len(content):
        length = shift = 0
        while True:
            byte = content[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        found.append(content[at : at + length])
        at += length
    assert proto.GlobalMetadata.FromString(found[0]).version == "0.0.4"
    return [proto.Node.FromString(one) for one in found[1:]]
