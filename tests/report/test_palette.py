from __future__ import annotations

from stagewright.report.palette import stage_color, tint


def test_stages_differ_and_keep_their_colour() -> None:
    colors = [stage_color(stage) for stage in range(64)]
    assert colors[0] == "#0072B2"
    assert len(set(colors)) == 64
    assert colors == [stage_color(stage) for stage in range(64)]


def test_tint_is_lighter() -> None:
    assert tint("#000000", 0.5) == "#808080"
    assert tint("#0072B2", 0.0) == "#0072B2"
    assert tint("#0072B2", 1.0) == "#FFFFFF"
