"""Progress of a verb: notes, and tasks with a known number of steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

Update: TypeAlias = Callable[[int, int, str], None]
"""``update(done, total, name)``: how many steps of a task are done, and which one comes next."""


class Progress:
    """Shows nothing; a subclass shows notes and tasks."""

    def note(self, text: str) -> None:
        """Show one line."""

    def task(self, name: str) -> AbstractContextManager[Update]:
        """Show a task while it runs."""
        return nullcontext(lambda done, total, name: None)


SILENT = Progress()
