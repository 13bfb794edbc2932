"""Plug-ins of installed packages: names that their entry points define.

    [project.entry-points."stagewright.models"]        # or .codecs, .policies, .tasks
    tagger = "shop.models:tagger"                      # `stagewright compare tagger` is `… compare shop.models:tagger`

A built-in name wins over a plug-in's. Looking a name up imports nothing of the package.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points
from typing import Literal

Kind = Literal["models", "codecs", "policies", "tasks"]


@lru_cache(maxsize=8)
def plugins(kind: Kind) -> dict[str, str]:
    """Map the names of the installed plug-ins of a kind to `package.module:name`."""
    return {entry.name: entry.value for entry in sorted(entry_points(group=f"stagewright.{kind}"))}
