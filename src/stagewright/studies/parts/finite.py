"""Make data fit for JSON, which has neither infinity nor NaN."""

from __future__ import annotations

import math
from typing import Any


def finite(content: Any) -> Any:
    """Replace infinity and NaN by None, in nested dicts and lists."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
