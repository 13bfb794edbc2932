"""The run that a verb shows: the newest by default; names complete by prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.screen import note

if TYPE_CHECKING:
    from stagewright.runs.run_folder import RunFolder

RunName = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="A run folder, or the beginning of a name in runs/. \\[default: the newest run]",
        show_default=False,
    ),
]


def open_run(typed: str | None) -> RunFolder:
    """Open the run that was meant; say which one it is unless it was named in full."""
    from stagewright.runs.choose import choose_run
    from stagewright.runs.run_folder import RunFolder

    path = choose_run(typed)
    if str(path) != typed:
        note(f"run: {path}")
    return RunFolder.open(path)
