"""``stagewright attach``: measure a training command that was written without us."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import Json
from stagewright.cli.screen import note, print_json, print_table
from stagewright.errors import UsageError


def attach(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND",
            help="The training command, as in -- torchrun --nproc-per-node 2 train.py",
            show_default=False,
        ),
    ],
    root: Annotated[Path, typer.Option(metavar="DIR", help="Where results go; a folder for each run.")] = Path("runs"),
    profile_steps: Annotated[
        str | None,
        typer.Option(
            metavar="N,…",
            help="From which steps on three are profiled. \\[default: 5,50,500,5000,50000]",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Run a training command unchanged and measure it: step time and where it goes, throughput, MFU, memory, skew.

    `watch` follows its run folder; `trace`, `explain` and `report` show it. The exit code is that of COMMAND.
    """
    from stagewright.attachment.launch import launch
    from stagewright.runs.run_folder import check_root

    check_root(root)
    done = launch(command, root, _steps(profile_steps))
    if done.folder is None:
        note("nothing was recorded here: no optimizer stepped in the command, or rank 0 is on another host")
        raise typer.Exit(done.code)
    from stagewright.attachment.summary import summarize
    from stagewright.errors import UsageError as Missing
    from stagewright.trace.attached import read_attached

    try:
        summary = summarize(done.folder)
        trace = read_attached(done.folder)
    except Missing as error:
        note(str(error))
        raise typer.Exit(done.code) from None
    if json:
        from stagewright.trace.waterfall import explain_trace

        print_json({"run": str(done.folder.path), **summary.to_dict(), "step": explain_trace(trace).to_dict()})
        raise typer.Exit(done.code)
    from stagewright.cli.planning.recorded import show_recorded
    from stagewright.report.tables.attached import attached_table

    print_table(attached_table(summary, done.folder.name))
    show_recorded(trace, None, as_json=False)
    note(f"run: {done.folder.path}; stagewright report {done.folder.path} -o job.html draws it")
    raise typer.Exit(done.code)


def _steps(text: str | None) -> list[int]:
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) >= 2 for word in words):
        raise UsageError(f"--profile-steps {text!r} must be step numbers from 2 on, like 5,50,500")
    return [int(word) for word in words]
