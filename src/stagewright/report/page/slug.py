"""File names and anchors from any text."""

from __future__ import annotations

import re


def slug(text: str) -> str:
    """Reduce text to lower-case letters, digits and dashes; never empty."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-") or "run"
