from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagewright.errors import UsageError
from stagewright.report.figures.fabric import draw_fabric, fabric_figure
from stagewright.report.tables.fabric import nccl_lines


def result(sizes: list[int]) -> dict[str, Any]:
    layers = [{"name": f"layer{at}", "bytes": size} for at, size in enumerate(sizes)]
    return {"workload": "mlp", "ranks": 4, "trials": 50, "engine": "sockets", "layers": layers}


def times(num: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.exponential(0.001 * (at + 1), 50) + 1e-4 for at in range(num)]


def test_a_line_and_points_for_every_layer() -> None:
    given = times(3)
    figure = fabric_figure(result([8, 16, 32]), given)
    spread, over = figure.axes
    assert len(spread.lines) == len(over.lines) == 3
    for line, points, own in zip(spread.lines, over.lines, given, strict=True):
        assert np.allclose(line.get_xdata(), np.sort(own) * 1e3)
        assert np.max(line.get_ydata()) == 1.0
        assert np.allclose(points.get_ydata(), own * 1e3), "in the order of trials"
    assert [text.get_text() for text in figure.legends[0].texts] == ["layer0 (8 B)", "layer1 (16 B)", "layer2 (32 B)"]


def test_a_legend_of_long_names_stays_within_the_figure() -> None:
    """Buckets of a large model are named by their first and last parameters."""
    given = result([27 << 20] * 4)
    for at, layer in enumerate(given["layers"]):
        layer["name"] = f"deit.layers.{at}.layernorm_after … deit.layers.{at}.mlp.fc1"
    figure = fabric_figure(given, times(4))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert len(legend.texts) == 4


def test_no_more_lines_than_can_be_told_apart() -> None:
    figure = fabric_figure(result([2**power for power in range(20)]), times(20))
    assert len(figure.axes[0].lines) == 8


def test_it_is_written(tmp_path: Path) -> None:
    path = draw_fabric(result([8]), times(1), tmp_path / "a.svg")
    assert "share of trials" in path.read_text()
    with pytest.raises(UsageError, match="nothing to draw"):
        draw_fabric(result([8]), [np.zeros(0)], tmp_path / "b.svg")


def test_columns_of_nccl_tests() -> None:
    layer = {
        "bytes": 1024,
        "algorithm": "ring",
        "p50_s": 1e-3,
        "algbw_bytes_per_s": 1.024e6,
        "busbw_bytes_per_s": 1.536e6,
        "wrong": 0,
    }
    lines = nccl_lines({"ranks": 4, "engine": "sockets", "layers": [layer]})
    (row,) = [line.split() for line in lines if not line.startswith("#")]
    assert row == ["1024", "256", "float", "sum", "-1", "1000.0", "0.001", "0.002", "0"]
    assert "# Avg bus bandwidth    : 0.001536" in lines


def test_a_single_trial_has_a_whole_number_on_its_axis() -> None:
    figure = fabric_figure(result([8]), [np.array([0.002])])
    axes = figure.axes[1]
    figure.canvas.draw()
    assert all(float(tick) == int(tick) for tick in axes.get_xticks())
