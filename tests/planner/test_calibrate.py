"""A machine's calibration: the line through its points, and the file that keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stagewright.cluster.cluster import Link
from stagewright.cluster.machine import default_devices
from stagewright.forecast.collective import Group, all_reduce_s
from stagewright.forecast.terms import EngineTerms
from stagewright.planner.calibrate import Calibration, _chunks, _fit, _hardware, load_calibration


def made(hardware: str = "made") -> Calibration:
    return Calibration(
        link=Link(bandwidth_bytes_per_s=1e9, latency_s=5e-5),
        collective=Link(bandwidth_bytes_per_s=5e8, latency_s=3e-4),
        terms=EngineTerms(action_s=1e-5, step_s=1e-3, chunk_s=1e-4, collective_share=0.5, crowding=0.1),
        kind="cpu",
        hardware=hardware,
    )


def test_a_line_is_found_again() -> None:
    sizes = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
    found = _fit({str(size): 2e-4 + size / 1e9 for size in sizes})
    assert found.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert found.latency_s == pytest.approx(2e-4, rel=0.05)
    # An all-reduce of two workers as the forecast counts it gives the link back that it was made with.
    link = Link(bandwidth_bytes_per_s=5e8, latency_s=3e-4)
    pair = Group(num_workers=2, num_on_host=2, inside=link)
    again = _fit({str(size): all_reduce_s(pair, size) for size in sizes}, steps=2)
    assert again.bandwidth_bytes_per_s == pytest.approx(5e8, rel=0.01)
    assert again.latency_s == pytest.approx(3e-4, rel=0.05)


def test_it_is_kept(tmp_path: Path) -> None:
    calibration = made(_hardware(default_devices(2, share=True)[0]))
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration
    (tmp_path / "calibration.json").write_text(json.dumps(calibration.to_dict()))
    told: list[str] = []
    assert load_calibration(tmp_path, progress=told.append) == calibration
    assert not told, "nothing is measured"


def test_a_cluster_of_such_devices() -> None:
    cluster = made().cluster(3, memory_bytes=1000)
    assert cluster.num_devices == 3
    assert (cluster.devices[0].memory_bytes, cluster.devices[0].kind) == (1000, "cpu")
    assert cluster.links.intra_host == made().link
    assert cluster.links.collective == made().collective


def test_steps_are_cut_evenly() -> None:
    assert _chunks(range(7), 3) == [range(3), range(3, 6)]
