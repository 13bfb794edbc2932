"""Where things appear: tables and data on standard output, progress and notes on standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["note", "note_coverage", "print_json", "progress", "screen"]

LEAST_WIDTH = 112  # a narrow terminal wraps lines, but no cell is cut
PLAIN_WIDTH = 200  # where output is not a terminal: wide enough that no cell of a table is cut


def screen() -> Console:
    """Standard output; where it is not a terminal, wide enough for whole tables (COLUMNS overrides)."""
    plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(width=PLAIN_WIDTH if plain else None, highlight=False)
    console.width = max(console.width, LEAST_WIDTH)
    return console


def note(text: str) -> None:
    """A line beside the results."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="dim", markup=False)


def note_coverage(coverage: float) -> None:
    """Warn where the units' times do not explain the whole model's."""
    if abs(coverage - 1) > 0.1:
        note(
            f"beware: the units and what lies between them sum to {coverage:.0%} of the whole model's time, so times "
            "are uncertain; measure again on a quiet machine, with more --repeats, or with a larger batch where units "
            "take less than 100 µs"
        )


def print_json(data: Any) -> None:
    """Data for programs, exact and without colours."""
    print(json.dumps(data, indent=2))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal; otherwise one plain line at the start and one at the end."""
    console = Console(stderr=True)
    if not console.is_terminal:
        begun = False

        def plain(done: int, total: int, name: str) -> None:
            nonlocal begun
            if not begun:
                print(f"{what} ({total} steps) …", file=sys.stderr)
                begun = True

        yield plain
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=f"{what}: {name}")
