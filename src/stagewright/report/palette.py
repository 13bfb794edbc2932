"""Colours that people with any colour vision can tell apart; a stage has the same one in every figure.

The eight of Okabe and Ito (2008), those that stand out most from each other first.
"""

from __future__ import annotations

__all__ = ["GRID", "INK", "MUTED", "stage_color", "tint"]

_STAGES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#7F7F7F")

# Text and lines that carry meaning, text beside them, lines in the background.
INK = "#222222"
MUTED = "#666666"
GRID = "#E3E3E3"


def stage_color(stage: int) -> str:
    """The colour of that stage; from the ninth on they come again, a little darker each round."""
    rounds, index = divmod(stage, len(_STAGES))
    return _mix(_STAGES[index], "#000000", 1 - 0.72**rounds)


def tint(color: str, share: float = 0.55) -> str:
    """The colour mixed with that share of white."""
    return _mix(color, "#FFFFFF", share)


def _mix(color: str, other: str, share: float) -> str:
    pairs = [(int(color[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(one + (two - one) * share):02X}" for one, two in pairs)
