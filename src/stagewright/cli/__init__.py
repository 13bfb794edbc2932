"""The command line: one file a verb, nothing but arguments and printing.

Nothing here imports torch before a verb needs it, so that ``stagewright --help`` is quick and a CPU device can be
pinned before torch starts its threads.
"""

from __future__ import annotations

from stagewright.cli.app import main

__all__ = ["main"]
