from __future__ import annotations

import itertools
import math
import re

import pytest

from stagewright.report.palette import color, color_names, readable_on, stage_color, strategy_paint, tint


def test_stages_differ_and_keep_their_colour() -> None:
    colors = [stage_color(stage) for stage in range(64)]
    assert colors[0] == "#0072B2"
    assert len(set(colors)) == 64
    assert colors == [stage_color(stage) for stage in range(64)]


def test_tint_is_lighter() -> None:
    assert tint("#000000", 0.5) == "#808080"
    assert tint("#0072B2", 0.0) == "#0072B2"
    assert tint("#0072B2", 1.0) == "#FFFFFF"


def _luminance(value: str) -> float:
    red, green, blue = _linear(value)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(value: str) -> list[float]:
    parts = [int(value[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _lab(red: float, green: float, blue: float) -> tuple[float, float, float]:
    """CIE L*a*b* of linear sRGB, white D65."""
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = ((max(one, 0.0)) ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116 for one in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


# How people without red, green or blue cones see linear RGB (Machado, Oliveira and Fernandes, 2009).
SIGHTS = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def test_numbers_in_bars_can_be_read() -> None:
    faces = [stage_color(stage) for stage in range(16)]
    for face in [*faces, *(tint(one) for one in faces), *(tint(one, 0.8) for one in faces)]:
        assert _contrast(face, readable_on(face)) >= 3, face
    assert (readable_on("#0072B2"), readable_on("#F0E442")) == ("#FFFFFF", "#222222")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(
    "names",
    [
        [f"stage-{index}" for index in range(4)],
        [f"strategy-{name}" for name in ("serial", "data", "tensor", "pipeline")],
        [f"share-{name}" for name in ("compute", "transfer", "collective", "wait", "bubble", "overhead")],
        [f"memory-{name}" for name in ("parameters", "gradients", "optimizer", "activations")],
        ["tone-good", "tone-bad"],
    ],
    ids=["stages", "strategies", "shares", "memory", "tones"],
)
def test_colours_of_one_chart_are_told_apart_by_everybody(names: list[str], sight: str, dark: bool) -> None:
    seen = {}
    for name in names:
        linear = _linear(color(name, dark=dark))
        seen[name] = _lab(*(sum(a * b for a, b in zip(row, linear, strict=True)) for row in SIGHTS[sight]))
    close = {
        (one, other): round(math.dist(seen[one], seen[other]), 1) for one, other in itertools.combinations(names, 2)
    }
    assert min(close.values()) > 10, min(close, key=lambda pair: close[pair])


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(dark: bool) -> None:
    for paper in ("paper", "card", "mark"):
        for ink in ("ink", "muted") if paper != "mark" else ("ink",):
            assert _contrast(color(ink, dark=dark), color(paper, dark=dark)) >= 4.5, (ink, paper)
    assert _contrast(color("link", dark=dark), color("paper", dark=dark)) >= 4.5


def test_every_name_has_a_value() -> None:
    for name in color_names():
        for dark in (False, True):
            assert re.fullmatch("#[0-9A-F]{6}", color(name, dark=dark)), name
    assert color("stage-0") == stage_color(0)
    assert color(strategy_paint("data×pipeline")) == "#009E73"
    assert color(strategy_paint("data×expert×pipeline")) == color(strategy_paint("data×pipeline"))
