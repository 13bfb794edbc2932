"""Standard output and standard error: tables and data on the first, progress and notes on the second."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from rich import progress as bars
from rich.console import Console

from stagewright.api.progress import Progress
from stagewright.display import printable

if TYPE_CHECKING:
    from stagewright.table import Table

LEAST_WIDTH = 112  # a narrow terminal wraps lines, but no cell is cut
PLAIN_WIDTH = 200  # where output is not a terminal: wide enough that no cell of a table is cut


def screen() -> Console:
    """Return standard output; where it is not a terminal, wide enough for whole tables (COLUMNS overrides)."""
    plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(width=PLAIN_WIDTH if plain else None, highlight=False)
    console.width = max(console.width, LEAST_WIDTH)
    return console


def note(text: str) -> None:
    """Print a line on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(printable(text), style="dim", markup=False)


def note_coverage(coverage: float) -> None:
    """Warn where the times of the units do not add up to the model's."""
    if abs(coverage - 1) > 0.1:
        note(
            f"warning: the units and the operations between them add up to {coverage:.0%} of the whole model's time, "
            "so times are uncertain; measure again on a quiet machine, with more --repeats, or with a larger batch "
            "where units take less than 100 µs"
        )


def print_json(data: Any) -> None:
    """Print data for programs, exact and without colors."""
    print(json.dumps(data, indent=2))


def print_table(table: Table) -> None:
    """Print a table; where the terminal is too narrow for its cells, the terminal wraps lines and nothing is cut."""
    from stagewright.report.render.terminal import draw_table, min_table_width

    console = screen()
    console.width = max(console.width, min_table_width(table, console))
    console.print(draw_table(table))


def print_lines(*lines: str) -> None:
    """Print sentences as they are."""
    console = screen()
    for line in lines:
        console.print(printable(line), markup=False)


@contextmanager
def progress(name: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar on a terminal, otherwise one plain line."""
    console = Console(stderr=True)
    if not console.is_terminal:
        begun = False

        def plain(done: int, total: int, step: str) -> None:
            nonlocal begun
            if not begun:
                print(f"{name} ({total} steps) …", file=sys.stderr)
                begun = True

        yield plain
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total, step: bar.update(task, completed=done, total=total, description=f"{name}: {step}")


class _ScreenProgress(Progress):
    """Notes and bars on standard error."""

    def note(self, text: str) -> None:
        note(text)

    def task(self, name: str) -> AbstractContextManager[Callable[[int, int, str], None]]:
        return progress(name)


SCREEN = _ScreenProgress()
