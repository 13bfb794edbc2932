"""A machine's calibration: the line through its points, and the file that keeps it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from stagewright.cluster.cluster import Link
from stagewright.cluster.device import Device
from stagewright.machine.machine import default_devices
from stagewright.planner.calibration import calibrate as calibrate_module
from stagewright.planner.calibration.calibrate import (
    Calibration,
    _allreduce_by_size,
    _batched,
    _contention,
    _fit_allreduce,
    _fit_p2p,
    _fsdp_overhead,
    _hardware,
    _make_monotonic,
    _noise,
    _overlap,
    _speed,
    load_calibration,
)
from stagewright.planner.calibration.job import shape_of_compute
from stagewright.planner.calibration.pace import age_text
from stagewright.simulator.collective import Group, all_reduce_s
from stagewright.simulator.costs.overheads import EngineOverheads


def made(hardware: str = "made") -> Calibration:
    return Calibration(
        link=Link(bandwidth_bytes_per_s=1e9, latency_s=5e-5),
        collective=Link(bandwidth_bytes_per_s=5e8, latency_s=3e-4),
        overheads=EngineOverheads(action_s=1e-5, step_s=1e-3, chunk_s=1e-4, collective_share=0.5, contention=0.1),
        kind="cpu",
        hardware=hardware,
        speeds=(1.0, 1.0),
        allreduce_points=((8, 1e-4), (1 << 20, 2e-3)),
        tensor=Link(bandwidth_bytes_per_s=2e9, latency_s=1e-4),
        tensor_points=((8, 5e-5), (1 << 20, 5e-4)),
    )


def test_a_line_is_found_again() -> None:
    sizes = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
    found = _fit_p2p({str(size): 2e-4 + size / 1e9 for size in sizes})
    assert found.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert found.latency_s == pytest.approx(2e-4, rel=0.05)


def test_a_collective_is_found_again() -> None:
    """An all-reduce of two workers as the forecast counts it gives the link back that it was made with."""
    link = Link(bandwidth_bytes_per_s=5e8, latency_s=3e-4)
    pair = Group(num_workers=2, num_on_host=2, inside=link)
    times = {size: all_reduce_s(pair, size) for size in (8, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)}
    assert _fit_allreduce(times) == link
    assert _fit_allreduce({**times, 8: 1.0, 1 << 18: 3 * times[1 << 18]}) == link, "one that is far off bends nothing"
    falling = _fit_allreduce({1 << 16: 2e-3, 1 << 20: 1e-3})
    assert falling.latency_s == 0, "more bytes never take less"
    assert falling.bandwidth_bytes_per_s == pytest.approx(2**20 / 1e-3, rel=1e-3)


def test_who_comes_last_to_a_sum_has_not_waited() -> None:
    rounds = [({"sums": {"8": [5.0, 1.0, 9.0]}}, {"sums": {"8": [2.0, 7.0, 3.0]}})] * 3
    assert _allreduce_by_size(rounds, "sums") == {8: 2.0}, "of 2, 1 and 3"
    stalled = [({"sums": {"8": [one]}}, {"sums": {"8": [one]}}) for one in (1.0,) * 5 + (4.0,) * 4 + (1000.0,)]
    assert _allreduce_by_size(stalled, "sums") == {8: pytest.approx((4 * 1 + 4 * 4) / 8)}, (
        "of both kinds; what is far off is left out"
    )


def test_more_bytes_never_take_less() -> None:
    assert _make_monotonic({8: 1.0, 32: 2.0, 16: 4.0, 64: 5.0}) == ((8, 1.0), (16, 3.0), (32, 3.0), (64, 5.0))
    assert _make_monotonic({1: 3.0, 2: 2.0, 4: 1.0}) == ((1, 2.0), (2, 2.0), (4, 2.0))


def test_a_device_is_slower_where_rounds_agree() -> None:
    assert _speed([(1.0, 1.25)] * 5) == 0.8
    assert _speed([(1.0, 1.25), (1.25, 1.0), (1.0, 1.0), (1.0, 1.3), (1.3, 1.0)]) == 1.0


def test_contention_is_until_both_are_done() -> None:
    """They take turns in being slow, so that the pair always is; for one that is always slow there is its speed."""
    turns = [({"alone_s": 1.0, "together_s": one}, {"alone_s": 1.0, "together_s": 2.2 - one}) for one in (1.0, 1.2) * 4]
    assert _contention(turns, (1.0, 1.0)) == pytest.approx(0.2)
    either = [({"alone_s": one, "together_s": one}, {"alone_s": one, "together_s": one}) for one in (1.0, 1.0, 1.5)] * 3
    assert _contention(either, (1.0, 1.0)) == pytest.approx(0.0, abs=0.03), "at two speeds, but both at the same"
    slow = [({"alone_s": 1.0, "together_s": 1.1}, {"alone_s": 2.0, "together_s": 2.2})] * 4
    assert _contention(slow, (1.0, 0.5)) == pytest.approx(0.1)


def test_sums_beside_work() -> None:
    """Work of 2 × 10 s; sums that alone take 6 s."""

    def beside(worked: float, done: float) -> tuple[float, float]:
        one = {"together_s": 10.0, "beside_s": 6.0, "with_sums_s": worked, "sums_done_s": done}
        return _overlap([(one, one)])

    assert beside(20.0, 6.0) == (0.0, 1.0), "as if each were alone"
    assert beside(24.0, 8.0) == (0.5, 0.75), "for 8 s they took turns"
    assert beside(24.0, 26.0) == (pytest.approx(4 / 24), pytest.approx(4 / 24)), "2 s of them came after the work"


def test_fsdp_takes_more_than_its_collectives() -> None:
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4)

    def added_s(size: int) -> float:
        return 3e-3 + 2e-9 * size + 1.5 * (2e-4 + size / 1e9)

    entry = {"fsdp": {str(size): added_s(size) for size in (1000, 10**6)}}
    faster = {"fsdp": {size: 0.9 * seconds for size, seconds in entry["fsdp"].items()}}
    assert _fsdp_overhead([(entry, faster)] * 3, link) == (pytest.approx(3e-3), pytest.approx(2e-9))
    assert _fsdp_overhead([({}, {})] * 3, link) == (0.0, 0.0), "on GPUs it is not measured"


def test_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_module, "probe_pace", lambda device: 2e-3)
    calibration = replace(made(_hardware(default_devices(2, share=True)[0])), pace_s=2e-3)
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
    assert (cluster.links.collective, cluster.links.sums) == (made().collective, made().allreduce_points)
    assert (cluster.links.tensor, cluster.links.tensor_sums) == (made().tensor, made().tensor_points)
    uneven = replace(made(), speeds=(1.0, 0.8)).cluster(4)
    assert [one.speed for one in uneven.members] == [1.0, 0.8, 1.0, 1.0]
    assert len(set(uneven.places)) == 1, "all of them on one host"
    assert replace(made(), speeds=(1.0, 0.8)).cluster(1).devices == made().cluster(1).devices


def test_steps_are_cut_evenly() -> None:
    assert _batched(range(7), 3) == [range(3), range(3, 6)]


def test_it_is_measured_again_when_the_pace_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = _hardware(default_devices(2, share=True)[0])
    busy = replace(made(hardware), pace_s=3e-3, noise=0.3, measured_at="2026-11-01T10:00:00+00:00")
    calm = replace(made(hardware), pace_s=2e-3)
    (tmp_path / "calibration.json").write_text(json.dumps(busy.to_dict()))
    monkeypatch.setattr(calibrate_module, "calibrate", lambda devices: calm)
    told: list[str] = []
    monkeypatch.setattr(calibrate_module, "probe_pace", lambda device: 2.9e-3)
    assert load_calibration(tmp_path, progress=told.append) == busy
    monkeypatch.setattr(calibrate_module, "probe_pace", lambda device: 2e-3)
    assert load_calibration(tmp_path, progress=told.append) == calm, "it was measured under load"
    assert "its pace has changed by -33%" in told[0]
    monkeypatch.setattr(calibrate_module, "probe_pace", lambda device: 4e-3)
    assert load_calibration(tmp_path, progress=told.append) == calm, "a calm calibration survives a busy moment"
    assert len(told) == 1
    load_calibration(tmp_path, if_slower=True, progress=told.append)
    assert "its pace has changed by +100%" in told[1]


def test_noise_is_the_variation_of_the_same_work() -> None:
    rounds = [{"alone_s": seconds} for seconds in (1.0, 1.0, 1.0, 1.0, 1.0)]
    varied = [{"alone_s": seconds} for seconds in (0.9, 1.0, 1.0, 1.1, 1.2)]
    assert _noise([rounds, rounds]) == 0
    assert _noise([rounds, varied]) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    ("seconds", "text"), [(30, "a minute"), (150, "2 minutes"), (7200, "2 hours"), (200_000, "2 days")]
)
def test_age(seconds: float, text: str) -> None:
    now = datetime(2026, 11, 1, 12).astimezone()
    assert age_text((now - timedelta(seconds=seconds)).isoformat(), now) == text


def test_a_share_of_a_gpu_computes_a_share_of_the_rows() -> None:
    assert shape_of_compute(Device.parse("cpu:0")) == (128, 512)
    assert shape_of_compute(Device.parse("cuda:0")) == (4096, 4096)
    assert shape_of_compute(Device.parse("cuda:0/8")) == (512, 4096), "otherwise a calibration takes 8 times as long"
