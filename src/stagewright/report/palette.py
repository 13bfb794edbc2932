"""Colorblind-safe colors; a stage or strategy has the same color in every figure.

The eight colors of Okabe and Ito (2008), most distinct first. Pages refer to them by name (`stage-0`, `strategy-data`,
`memory-activations`), because each has one value for light and one for dark mode.
"""

from __future__ import annotations

_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _RED, _YELLOW, _GRAY = _STAGES = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#7F7F7F",
)

_DIM = "#5A5A5A"  # a gray that is distinct from the pink

# Text and main lines, secondary text, grid lines.
INK = "#222222"
MUTED = "#666666"
GRID = "#E3E3E3"

_NUM_STAGES = 16  # on a page; colors repeat after these
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
# Light mode, dark mode.
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
    """Return the color of a stage; from the ninth on colors repeat, darker in each round."""
    rounds, index = divmod(stage, len(_STAGES))
    return _mix(_STAGES[index], "#000000", 1 - 0.72**rounds)


def strategy_paint(strategy: str) -> str:
    """Return the color name of a strategy; several axes are joined by ×. Expert parallel replicas have data's color,
    context parallel workers have tensor's.
    """
    like = {"expert": "data", "context": "tensor"}
    axes = dict.fromkeys(like.get(axis, axis) for axis in strategy.split("×"))
    return f"strategy-{'-'.join(axes)}"


def color(name: str, *, dark: bool = False) -> str:
    """Return the value of a color name."""
    if name in _PLAIN:
        return _PLAIN[name][dark]
    kind, _, rest = name.partition("-")
    if kind == "stage":
        number, _, pale = rest.partition("-")
        value = stage_color(int(number) % _NUM_STAGES)
        if pale:
            return _mix(value, _NIGHT, 0.45) if dark else tint(value)
    else:
        value = _NAMED[kind][rest]
    # Deep colors are hard to see on black.
    return _mix(value, "#FFFFFF", 0.2) if dark else value


def color_names() -> list[str]:
    """Return every color name."""
    stages = [f"stage-{index}{pale}" for index in range(_NUM_STAGES) for pale in ("", "-pale")]
    return [*_PLAIN, *stages, *(f"{kind}-{name}" for kind, names in _NAMED.items() for name in names)]


def tint(color: str, share: float = 0.55) -> str:
    """Mix a color with white."""
    return _mix(color, "#FFFFFF", share)


def readable_on(color: str) -> str:
    """Return white or dark text, whichever has more contrast with a background color."""
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#FFFFFF" if luminance < 0.3 else INK


def _mix(color: str, other: str, share: float) -> str:
    channels = [(int(color[start : start + 2], 16), int(other[start : start + 2], 16)) for start in (1, 3, 5)]
    return "#" + "".join(f"{round(first + (second - first) * share):02X}" for first, second in channels)
