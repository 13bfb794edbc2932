"""The sentence about a plan that is not equal to serial."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["DIFFERENCES", "unequal_sentence"]

DIFFERENCES = ("loss", "gradients", "outputs", "buffers", "updates")
"""What a proof tells of; runs of before may lack the last."""


def unequal_sentence(name: str, equality: Mapping[str, Any]) -> str:
    """What differs most, by how much, and what is allowed; without a full stop."""
    differences = [equality.get(kind, 0.0) for kind in DIFFERENCES]
    if any(math.isnan(one) for one in differences):
        return f"{name} is NOT equal to serial: a value is NaN, which equals nothing; look for it in the plain model"
    if math.isinf(max(differences)):
        how = "has another shape, is missing, or is no number on one side"
        return f"{name} is NOT equal to serial: {equality['worst']} {how}"
    allowed = f"(allowed {equality['tolerance']:.0e})"
    return f"{name} is NOT equal to serial: {equality['worst']} is off by {max(differences):.0e} {allowed}"
