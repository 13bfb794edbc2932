from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stagewright.fabric.ranks.probe import PairProbe
from stagewright.fabric.results.diagnosis import diagnose, find_symptoms
from stagewright.fabric.trials import TrialTable, row_type

RANKS = 4


def trials(duration_s: float = 0.01, waits: dict[int, float] | None = None) -> TrialTable:
    """Ranks that wait nearly all of the time for their left neighbour, but for those named, which wait that long."""
    rows = np.zeros((20, 1, RANKS), dtype=row_type(RANKS))
    rows["took_part"] = 1
    rows["duration_s"] = duration_s
    for rank in range(RANKS):
        rows["receive_wait_s"][:, 0, rank, (rank - 1) % RANKS] = (waits or {}).get(rank, duration_s - 0.0005)
    return TrialTable(rows, np.zeros(20, dtype=np.bool_))


def pairs(slow: dict[tuple[int, int], float] | None = None, far: int | None = None) -> list[PairProbe]:
    return [
        PairProbe(
            source=one,
            destination=two,
            latency_s=5e-3 if far in (one, two) else 1e-5,
            bytes_per_s=(slow or {}).get((one, two), 118e6 + one),
            retransmits=0,
            segments=1000,
        )
        for one in range(RANKS)
        for two in range(RANKS)
        if one != two
    ]


def links(lost: dict[tuple[int, int], int] | None = None) -> list[dict[str, int]]:
    return [
        {"source": one, "destination": two, "retransmits": (lost or {}).get((one, two), 1), "segments": 10_000}
        for one in range(RANKS)
        for two in range(RANKS)
        if one != two
    ]


def of_host(host: int, value: float) -> dict[tuple[int, int], float]:
    return {(one, two): value for one in range(RANKS) for two in range(RANKS) if one != two and host in (one, two)}


def test_nothing_stands_out() -> None:
    assert diagnose(trials(), pairs(), links(), same_host=False).kind == "none"


@pytest.mark.parametrize("host", range(RANKS))
def test_each_cause_and_host(host: int) -> None:
    late = diagnose(trials(0.03, waits={host: 0.001}), pairs(), links(), same_host=False)
    assert (late.kind, late.rank) == ("late-host", host)
    slow = diagnose(trials(), pairs(of_host(host, 12e6)), links(), same_host=False)
    assert (slow.kind, slow.rank) == ("slow-link", host)
    lossy = diagnose(trials(), pairs(), links(dict.fromkeys(of_host(host, 0), 100)), same_host=False)
    assert (lossy.kind, lossy.rank) == ("lossy-link", host)
    far = diagnose(trials(), pairs(far=host), links(), same_host=False)
    assert (far.kind, far.rank) == ("far-link", host)


def test_one_direction_is_enough_for_a_host() -> None:
    sends = {(2, two): 12e6 for two in range(RANKS) if two != 2}
    assert diagnose(trials(), pairs(sends), links(), same_host=False).rank == 2
    lost = {(one, 3): 100 for one in range(3)}
    assert diagnose(trials(), pairs(), links(lost), same_host=False).rank == 3


def test_one_pair_is_not_a_host() -> None:
    slow = diagnose(trials(), pairs({(1, 3): 12e6, (3, 1): 12e6}), links(), same_host=False)
    assert (slow.kind, slow.rank) == ("slow-link", None)
    assert slow.pair is not None
    assert set(slow.pair) == {1, 3}
    lossy = diagnose(trials(), pairs(), links({(0, 2): 300}), same_host=False)
    assert (lossy.kind, lossy.pair) == ("lossy-link", (0, 2))


def test_memory_is_no_link() -> None:
    assert diagnose(trials(), pairs(of_host(1, 12e6)), links(), same_host=True).kind == "none"


def test_symptoms() -> None:
    none = diagnose(trials(), pairs(), links(), same_host=False)
    times = np.array([0.01] * 90 + [0.21] * 8 + [0.41] * 2)
    again = np.array([0] * 90 + [2] * 10)
    more = {"ideal_bytes_s": None, "ideal_latency_s": None, "floor_s": None, "diagnosis": none}
    (timeout,) = find_symptoms(times, again, **more)
    assert timeout.kind == "retransmission-timeout"
    assert "10 of 100 trials" in timeout.sentence
    assert "200 ms, 400 ms" in timeout.sentence
    assert "rto_min" in timeout.sentence
    assert find_symptoms(times, np.zeros(100, dtype=np.int64), **more) == [], "slow, but nothing was sent again"
    flat = np.full(50, 0.1)
    nothing = np.zeros(50, dtype=np.int64)
    kinds = [
        [
            mode.kind
            for mode in find_symptoms(flat, nothing, ideal_bytes_s=a, ideal_latency_s=b, floor_s=c, diagnosis=none)
        ]
        for a, b, c in [(0.09, 0.001, 0.01), (0.001, 0.09, 0.01), (0.01, 0.01, 0.01), (0.09, 0.001, 0.08)]
    ]
    assert kinds == [["rate"], ["latency"], [], ["host"]]


def test_loss_everywhere_is_the_networks() -> None:
    everywhere = links({(one, two): 100 for one in range(RANKS) for two in range(RANKS)})
    hit = pairs({(1, 0): 1e6})
    hit = [replace(pair, retransmits=2) if (pair.source, pair.destination) == (1, 0) else pair for pair in hit]
    assert diagnose(trials(), hit, everywhere, same_host=False).kind == "lossy-network"
    assert diagnose(trials(), hit, links(), same_host=False).kind == "none", "one lost segment is no slow link"


def test_bursts_on_clean_links_do_not_hide_the_lossy_one() -> None:
    """As seen in a lab: a ring stalls on host 2's loss, and what follows overflows every link of the ring."""
    probes = [replace(pair, segments=9700, retransmits=90 * (2 in (pair.source, pair.destination))) for pair in pairs()]
    ring = {(rank, (rank + 1) % RANKS) for rank in range(RANKS)}
    carried = [
        {
            "source": pair.source,
            "destination": pair.destination,
            "retransmits": 2200 if (pair.source, pair.destination) in ring else pair.retransmits,
            "segments": 139_000 if (pair.source, pair.destination) in ring else pair.segments,
        }
        for pair in probes
    ]
    found = diagnose(trials(), probes, carried, same_host=False)
    assert (found.kind, found.rank) == ("lossy-link", 2)
    blind = [replace(pair, retransmits=0) for pair in probes]
    everywhere = [{**one, "retransmits": one["segments"] // 60} for one in carried]
    assert diagnose(trials(), blind, everywhere, same_host=False).kind == "lossy-network"


def test_an_engine_without_waits_knows_who_was_late() -> None:
    table = trials(0.03, waits=dict.fromkeys(range(RANKS), 0.0))
    assert diagnose(table, [], [], same_host=False).kind == "none"
    table.rows["late_s"][:, :, 3] = 0.02
    assert diagnose(table, [], [], same_host=False).rank == 3


def test_who_has_more_to_do_is_not_late() -> None:
    table = trials(0.03, waits={1: 0.015, **dict.fromkeys((0, 2, 3), 0.0225)})  # own times 15 ms and 7.5 ms
    assert diagnose(table, [], [], same_host=True).rank == 1
    assert diagnose(table, [], [], same_host=True, work=[100, 200, 100, 100]).kind == "none"
    table.rows["late_s"][:, :, 2] = 0.015
    assert diagnose(table, [], [], same_host=True, work=[100, 200, 100, 100]).rank == 2
