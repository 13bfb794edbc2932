"""Axes and legends of the figures of studies: everything that is drawn is named."""

from __future__ import annotations

import re
from pathlib import Path

from stagewright.report.figures.accuracy import AccuracyPoint, draw_accuracy
from stagewright.report.figures.stages import SpeedupPoint, draw_speedups
from stagewright.report.figures.strategies import StrategyBar, draw_strategies


def texts(path: Path) -> list[str]:
    return re.findall(r">([^<>]+)</text>", path.read_text(encoding="utf-8"))


def point(num_stages: int, *, is_measured: bool = True) -> SpeedupPoint:
    return SpeedupPoint(policy="time", num_stages=num_stages, speedup=1.4, low=1.4, high=1.4, is_measured=is_measured)


def test_published_speedups_have_their_place_on_the_axis(tmp_path: Path) -> None:
    published = {2: 1.94, 3: 3.07, 4: 4.09}
    drawn = texts(draw_speedups({"inference": [point(2)]}, published, tmp_path / "a.svg", title="Speed-up"))
    assert {"1", "2", "3", "4"} <= set(drawn)
    assert "ideal: n stages, n ×" in drawn
    assert not any("rings" in text for text in drawn)  # nothing is forecast
    forecast = draw_speedups({"training": [point(6, is_measured=False)]}, published, tmp_path / "b.svg", title="S")
    assert "speed-up over one device (rings: forecast)" in texts(forecast)
    assert "published, 4 machines" not in texts(forecast)


def test_the_line_of_one_device_and_only_what_is_drawn_are_in_the_legend(tmp_path: Path) -> None:
    bars = [
        StrategyBar(label=label, strategy=label, speedup=1.5, is_measured=True, accuracy="95.9 ± 0.1")
        for label in ("data", "pipeline")
    ]
    drawn = texts(draw_strategies({"CIFAR-10": bars}, tmp_path / "a.svg", title="Strategies"))
    assert {"measured", "one device"} <= set(drawn)
    assert "forecast" not in drawn


def test_the_band_of_the_deviation_is_in_the_legend(tmp_path: Path) -> None:
    points = [
        AccuracyPoint(label="none", ratio=1.0, accuracy=84.0, deviation=3.0, is_baseline=True),
        AccuracyPoint(label="bf16", ratio=0.5, accuracy=84.5, deviation=3.2),
    ]
    assert "± its standard deviation" in texts(draw_accuracy({"digits": points}, tmp_path / "a.svg", title="Codecs"))
