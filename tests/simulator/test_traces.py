"""Traces that other programs read."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from made_profiles import equal_units, make_costs, profile_of, unit
from stagewright.cluster.cluster import Link, Links
from stagewright.files.chakra import Collective, NodeType, read_nodes
from stagewright.profiler.profile import Amount
from stagewright.schedules.rules import FIXED_SCHEDULES, SCHEDULES
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.simulator.costs.tensor_traffic import SequenceTraffic, TensorTraffic
from stagewright.simulator.export.chakra import write_chakra
from stagewright.simulator.export.chrome import write_chrome_trace
from stagewright.simulator.simulate import optimizer_s, predict
from stagewright.spec.plan import Mesh

LINKS = Links(intra_host=Link(bandwidth_bytes_per_s=100.0, latency_s=0.0))


@pytest.mark.parametrize("schedule", FIXED_SCHEDULES)
def test_chrome_events_of_a_thread_never_overlap(tmp_path: Path, schedule: str) -> None:
    """Slow links: under schedules that place stages as a V a worker sends to two peers at the same time."""
    stages = 3 * SCHEDULES[schedule].stages_per_worker
    mesh = Mesh(pipeline=3, data=2)
    slow = Links(intra_host=Link(bandwidth_bytes_per_s=5.0, latency_s=0.0))
    traffic = [TensorTraffic(forward_bytes=(10,), backward_bytes=(10,))] * 6
    costs = make_costs(
        equal_units(6),
        mesh=mesh,
        microbatches=6,
        schedule=schedule,
        stages=stages,
        links=slow,
        terms={"tensor": traffic},
    )
    write_chrome_trace(predict(costs), tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for one in events:
        if one["ph"] == "X":
            start_ns = round(one["ts"] * 1e3)
            rows.setdefault((one["pid"], one["tid"]), []).append((start_ns, start_ns + round(one["dur"] * 1e3)))
    named = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert {worker for worker, _ in rows} == {0, 1, 2}
    assert {named[row] for row in rows if row[0] == 1} >= {"send gradient to 0", "receive message from 0"}
    for row, spans in rows.items():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans))), named[row]
    assert any(one["ph"] == "C" and one["args"]["bytes"] > 0 for one in events)


def test_chakra(tmp_path: Path) -> None:
    costs = make_costs(equal_units(2), mesh=Mesh(pipeline=2, data=2), microbatches=3, links=LINKS)
    paths = write_chakra(costs, tmp_path / "step")
    assert [path.name for path in paths] == [f"step.{rank}.et" for rank in range(4)]
    first = list(read_nodes(paths[0]))
    kinds = [NodeType(node.type).name for node in first]
    assert kinds.count("COMP_NODE") == 6 + 1, "the optimiser's too"
    assert kinds.count("COMM_SEND_NODE") == kinds.count("COMM_RECV_NODE") == 3
    assert kinds.count("COMM_COLL_NODE") == 1
    sent = next(node for node in first if node.type == NodeType.COMM_SEND_NODE)
    values = sent.attributes
    assert values["comm_size"] == 10
    assert (values["comm_src"], values["comm_dst"]) == (0, 1)
    known: set[int] = set()
    for node in first:
        assert set(node.data_dependencies) <= known, "a node depends on earlier ones alone"
        known.add(node.id)
    tags = {node.attributes.get("comm_tag") for node in read_nodes(paths[1])}
    assert values["comm_tag"] in tags, "both ends have the same tag"


TRAFFIC = [TensorTraffic(forward_bytes=(100, 60), backward_bytes=(40,))] * 8


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": Mesh(tensor=2)},
        {"mesh": Mesh(tensor=2, pipeline=2)},
        {"mesh": Mesh(tensor=2, pipeline=4)},
        {"mesh": Mesh(tensor=2, pipeline=4), "training": False, "schedule": "gpipe", "steps": 3},
        {"mesh": Mesh(tensor=2, pipeline=2), "recompute": "always"},
        {"mesh": Mesh(tensor=2, pipeline=2), "recompute": "except-last"},
        {"mesh": Mesh(tensor=2, pipeline=2), "schedule": "zbv", "stages": 4},
        {"mesh": Mesh(tensor=2, pipeline=2), "schedule": "zbv", "stages": 4, "recompute": "always"},
    ],
)
def test_chakra_has_the_tensor_axis_bytes_of_the_forecast(tmp_path: Path, fields: dict[str, Any]) -> None:
    costs = make_costs(equal_units(8), microbatches=4, links=LINKS, terms={"tensor": TRAFFIC}, **fields)
    forecast = predict(costs)
    found = [
        sum(one["comm_size"] for one in collectives(path) if one["pg_name"].startswith("tensor"))
        for path in write_chakra(costs, tmp_path / "step")
    ]
    streamed = 1 if costs.plan.training else costs.plan.steps
    assert max(found) == streamed * forecast.tensor_bytes > 0


def test_divided_sequences_are_joined_at_the_ends_of_stages(tmp_path: Path) -> None:
    """Units of one stage pass shards on; backward has the transposes; gradients of norms are summed once."""
    block = SequenceTraffic(
        gathered_bytes=(100,),
        scattered_bytes=(60,),
        joined_bytes=(40,),
        divided_bytes=(40,),
        partial_bytes=8,
        continues=True,
    )
    traffic = [TensorTraffic(sequence=block)] * 3 + [TensorTraffic(sequence=replace(block, continues=False))]
    for pipeline, ends in ((1, 1), (2, 2)):
        mesh = Mesh(tensor=2, pipeline=pipeline)
        costs = make_costs(equal_units(4), mesh=mesh, microbatches=3, links=LINKS, terms={"tensor": traffic})
        reduced, exchanged = zip(*(costs.tensor_bytes(worker) for worker in range(pipeline)), strict=True)
        assert (sum(reduced), sum(exchanged)) == (4 * 8, 3 * (4 * 2 * (100 + 60) + ends * 2 * 40))
        paths = write_chakra(costs, tmp_path / "step")
        found = [sum(one["comm_size"] for one in collectives(path)) for path in paths[:pipeline]]
        # An all-gather has the bytes of one worker's part.
        assert sum(found) == 4 * 8 + 3 * (4 * (100 + 60) + 4 * (100 + 60) // 2 + ends * 40)


def test_chakra_has_each_stage_its_own_tensor_traffic(tmp_path: Path) -> None:
    traffic = [TensorTraffic(forward_bytes=(size,), backward_bytes=(2 * size,)) for size in (100, 50, 300, 7)]
    costs = make_costs(
        equal_units(4), mesh=Mesh(tensor=2, pipeline=2), microbatches=3, links=LINKS, terms={"tensor": traffic}
    )
    paths = write_chakra(costs, tmp_path / "step")
    found = [sum(one["comm_size"] for one in collectives(path)) for path in paths]
    assert found[:2] == [3 * 450, 3 * 921]


def test_chakra_gathers_logits_and_reduces_losses_of_a_divided_vocabulary(tmp_path: Path) -> None:
    """A recomputed stage gathers again; a loss after the last unit is not recomputed."""
    traffic = [TensorTraffic(forward_bytes=(100,)), TensorTraffic(gathered_bytes=(80,), loss_bytes=(7,))]
    costs = make_costs(
        equal_units(2), mesh=Mesh(tensor=2), microbatches=3, links=LINKS, terms={"tensor": traffic}, recompute="always"
    )
    (path, _) = write_chakra(costs, tmp_path / "step")
    assert sum(one["comm_size"] for one in collectives(path)) == 3 * (2 * 100 + 2 * 40 + 7)
    found = predict(costs).collectives[0]
    assert found.num_bytes == 3 * (2 * 100 + 2 * 80 + 7)
    assert found.sent_bytes == 3 * (2 * 100 + 80 + 7)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_chakra_gathers_and_scatters_what_is_sharded(tmp_path: Path, microbatches: int) -> None:
    costs = make_costs(equal_units(4), mesh=Mesh(data=2), microbatches=microbatches, links=LINKS, shard=True)
    nodes = list(read_nodes(write_chakra(costs, tmp_path / "step")[0]))
    found = [(one["comm_type"], one["comm_size"]) for one in (node.attributes for node in nodes) if "comm_type" in one]
    # A rank puts its half of the 400 bytes into each gather, and all gradients into the scatter.
    assert found == [(Collective.ALL_GATHER, 200)] * (2 * microbatches) + [(Collective.REDUCE_SCATTER, 400)]
    computing = sum(node.duration_us for node in nodes if node.type == NodeType.COMP_NODE)
    assert computing == microbatches * 3 * 4 * 10**6, "gathering is no part of computing"


def test_chakra_ends_with_the_optimiser_of_each_worker(tmp_path: Path) -> None:
    tied = unit("head", 1.0, (1.0, 1.0), parameter_bytes=Amount(total=150, shares=((0, 100),)))
    profile = profile_of([*equal_units(3, buffer_bytes=8).units, tied])
    terms = {"model_overheads": ModelOverheads(optimizer_s_per_byte=0.01, statistics_bytes=64)}
    costs = make_costs(profile, mesh=Mesh(data=2, pipeline=2), microbatches=2, links=LINKS, terms=terms)
    for worker, path in enumerate(write_chakra(costs, tmp_path / "step")[:2]):
        nodes = list(read_nodes(path))
        names = [node.name for node in nodes]
        assert names[-4:] == [f"gradients of stage {worker}", "statistics", "tied weights", "optimizer"]
        assert nodes[-3].attributes["comm_size"] == (42, 21)[worker], "two thirds and one third of 64"
        assert nodes[-2].attributes["comm_size"] == costs.tied_bytes == 100
        assert nodes[-1].data_dependencies == [nodes[-2].id]
        assert nodes[-1].duration_us == round(optimizer_s(costs, worker) * 1e6) > 0
    still = make_costs(equal_units(2), mesh=Mesh(pipeline=2), schedule="gpipe", training=False, steps=1)
    (first, *_) = write_chakra(still, tmp_path / "still")
    assert [node.name for node in read_nodes(first)] == ["F0.0", "message 0.0"]


def collectives(path: Path) -> list[dict[str, Any]]:
    return [node.attributes for node in read_nodes(path) if node.type == NodeType.COMM_COLL_NODE]
