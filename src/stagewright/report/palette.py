"""Colours that people with any colour vision can tell apart; a stage or strategy has the same one in every figure.

The eight of Okabe and Ito (2008), those that stand out most from each other first. Pages ask for them by name
(`stage-0`, `strategy-data`, `memory-activations`), because each has one value on white and one on black.
"""

from __future__ import annotations

__all__ = ["GRID", "INK", "MUTED", "color", "color_names", "readable_on", "stage_color", "strategy_paint", "tint"]

_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _RED, _YELLOW, _GREY = _STAGES = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#7F7F7F",
)

_DIM = "#5A5A5A"  # a grey that nobody takes for the pink beside it

# Text and lines that carry meaning, text beside them, lines in the background.
INK = "#222222"
MUTED = "#666666"
GRID = "#E3E3E3"

_NUM_STAGES = 16  # on a page; later ones come again
_PAPER, _NIGHT = "#FFFFFF", "#14181D"
_STRATEGIES = {
    "serial": _DIM,
    "data": _ORANGE,
    "tensor": _PINK,
    "pipeline": _BLUE,
    "data-tensor": _RED,
    "data-pipeline": _GREEN,
    "tensor-pipeline": _SKY,
    "data-tensor-pipeline": _YELLOW,
}
_MEMORY = {
    "parameters": _BLUE,
    "gradients": _ORANGE,
    "optimizer": _GREEN,
    "activations": _PINK,
    "buffers": _SKY,
    "other": _DIM,
}
_SHARES = {
    "compute": _BLUE,
    "transfer": _SKY,
    "collective": _PINK,
    "wait": _ORANGE,
    "bubble": _YELLOW,
    "overhead": _DIM,
}
_TONES = {"good": _GREEN, "bad": _RED, "ideal": _SKY, "first": _BLUE, "second": _ORANGE}
_NAMED = {"strategy": _STRATEGIES, "memory": _MEMORY, "share": _SHARES, "tone": _TONES}
# On white, and on black.
_PLAIN = {
    "ink": (INK, "#ECECEC"),
    "muted": ("#5C5C5C", "#A9B1BA"),
    "grid": (GRID, "#343B44"),
    "paper": (_PAPER, _NIGHT),
    "card": ("#FAFAFA", "#1B2027"),
    "mark": ("#FFF3D1", "#3D3413"),
    "link": ("#005A8C", "#7CC7F5"),
}


def stage_color(stage: int) -> str:
    """The colour of that stage; from the ninth on they come again, a little darker each round."""
    rounds, index = divmod(stage, len(_STAGES))
    return _mix(_STAGES[index], "#000000", 1 - 0.72**rounds)


def strategy_paint(strategy: str) -> str:
    """The name of a strategy's colour; of several axes, their names with ×."""
    return f"strategy-{strategy.replace('×', '-')}"


def color(name: str, *, dark: bool = False) -> str:
    """The value of a colour by its name."""
    if name in _PLAIN:
        return _PLAIN[name][dark]
    kind, _, rest = name.partition("-")
    if kind == "stage":
        number, _, pale = rest.partition("-")
        found = stage_color(int(number) % _NUM_STAGES)
        if pale:
            return _mix(found, _NIGHT, 0.45) if dark else tint(found)
    else:
        found = _NAMED[kind][rest]
    # Deep colours are lost on black.
    return _mix(found, "#FFFFFF", 0.2) if dark else found


def color_names() -> list[str]:
    """Every name that a page may use."""
    stages = [f"stage-{index}{pale}" for index in range(_NUM_STAGES) for pale in ("", "-pale")]
    return [*_PLAIN, *stages, *(f"{kind}-{name}" for kind, names in _NAMED.items() for name in names)]


def tint(color: str, share: float = 0.55) -> str:
    """The colour mixed with that share of white."""
    return _mix(color, "#FFFFFF", share)


def readable_on(color: str) -> str:
    """White or ink, whichever stands out more from that colour; ink where they are near."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    light = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#FFFFFF" if light < 0.3 else INK


def _mix(color: str, other: str, share: float) -> str:
    pairs = [(int(color[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(one + (two - one) * share):02X}" for one, two in pairs)
