from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from stagewright.errors import UsageError
from stagewright.partition import Conditions, Split, compare, split
from stagewright.profiler.profile import Amount, Profile, Time, UnitProfile
from stagewright.report.figures.split import draw_split, split_figure
from stagewright.report.palette import stage_color


def _profile(num_units: int) -> Profile:
    nothing = Amount(total=0)
    units = tuple(
        UnitProfile(
            name=f"block.{index}",
            kind="Block",
            block=f"block.{index}",
            parameters=Amount(total=10),
            parameter_bytes=Amount(total=40),
            buffer_bytes=0,
            macs=5,
            forward=Time(median_s=0.001, spread_s=0.0),
            backward_input=Time(median_s=0.001, spread_s=0.0),
            backward_weight=Time(median_s=0.001, spread_s=0.0),
            output_bytes=100,
            saved_bytes=nothing,
            recompute_saved_bytes=0,
            crossing_bytes=100 if index < num_units - 1 else 0,
        )
        for index in range(num_units)
    )
    whole = Time(median_s=0.001 * num_units, spread_s=0.0)
    return Profile(
        model="handmade",
        device="cpu:0",
        dtype="float32",
        batch_size=2,
        training=True,
        units=units,
        whole_forward=whole,
        whole_backward=whole,
        whole_macs=5 * num_units,
        versions={},
    )


def _bars(splits: list[Split]) -> list[Rectangle]:
    figure = split_figure(splits)
    return [bar for axes in figure.axes for bars in axes.containers for bar in bars]


def test_bars_add_up_to_the_stage_times_in_milliseconds() -> None:
    one = split(_profile(6), 3, conditions=Conditions(bandwidth_bytes_per_s=1e5))
    bars = _bars([one])
    heights: dict[float, float] = {}
    for bar in bars:
        middle = round(bar.get_x() + bar.get_width() / 2, 6)
        heights[middle] = heights.get(middle, 0.0) + bar.get_height()
    assert list(heights.values()) == pytest.approx([stage.time_s * 1e3 for stage in one.stages])
    line = split_figure([one]).axes[0].lines[-1]
    assert line.get_ydata()[0] == pytest.approx(one.bottleneck_s * 1e3)


def test_a_stage_keeps_its_colour_in_every_group() -> None:
    profile = _profile(8)
    comparison = compare(profile, 4, ["macs", "time", "optimal"])
    # Without links there are two bars a stage, forward in the full colour and backward.
    full = [to_hex(bar.get_facecolor()).upper() for bar in _bars(list(comparison))[::2]]
    assert full == [stage_color(stage) for stage in range(4)] * 3


def test_stages_on_one_device_share_a_bar() -> None:
    one = split(_profile(6), 2, "client-server")
    figure = split_figure([one])
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["0 + 2", "1"]


def test_labels_say_what_is_drawn() -> None:
    comparison = compare(_profile(8), 4)
    figure = split_figure(tuple(comparison))
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    for one in comparison:
        assert one.policy in texts
        assert f"{one.speedup_bound:.2f}×" in texts
    assert "bold: speed-up bound over one device with 8 micro-batches" in texts
    assert figure.axes[0].get_title(loc="left") == "handmade on 4 devices, training"
    assert figure.axes[0].get_ylabel() == "time of one micro-batch (ms)"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "backward", "bottleneck"]


@pytest.mark.parametrize(("num_stages", "num_rows"), [(2, 1), (4, 2), (8, 2)])
def test_many_groups_stand_in_rows(num_stages: int, num_rows: int) -> None:
    figure = split_figure(tuple(compare(_profile(8), num_stages)))
    assert len(figure.axes) == num_rows
    width, height = figure.get_size_inches()
    assert 6 <= width <= 14
    assert 4 <= height <= 9


def test_what_does_not_fit_is_marked() -> None:
    one = split(_profile(4), 2, "time", Conditions(memory_limit_bytes=1))
    texts = [text.get_text() for text in split_figure([one]).axes[0].texts]
    assert "time\nexceeds the memory limit" in texts


def test_draws_into_a_file(tmp_path: Path) -> None:
    comparison = compare(_profile(6), 3, conditions=Conditions(bandwidth_bytes_per_s=1e6, overlap_links=True))
    path = draw_split(comparison, tmp_path / "split.svg", title="A title")
    assert "A title" in path.read_text(encoding="utf-8")


def test_wrong_input_is_refused_before_drawing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no split to draw"):
        draw_split([], tmp_path / "split.png")
    with pytest.raises(UsageError, match="suffix"):
        draw_split([], tmp_path / "split.jpeg")
