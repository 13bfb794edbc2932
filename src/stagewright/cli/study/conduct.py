"""What all studies' commands share: their options, and how a study is run, resumed and shown."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from stagewright.cli import options
from stagewright.cli.screen import note, print_json, screen
from stagewright.errors import UsageError

__all__ = [
    "HOW",
    "WHAT",
    "Fresh",
    "Quick",
    "Resume",
    "Root",
    "StudyDevices",
    "StudySeed",
    "conduct",
    "devices_of",
    "whole_numbers",
    "words",
]

HOW = "How it runs"
WHAT = "What is studied"
SLOW_CORES = 2.5  # times as long as parts are expected to take, as seen on slow ones

Quick = Annotated[bool, typer.Option("--quick", help="Small sizes: under 3 minutes on 2 cores.", rich_help_panel=HOW)]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Go on in this study's folder, with its options; parts that failed are tried again.",
        rich_help_panel=HOW,
        show_default=False,
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Begin anew, even if this study was interrupted.", rich_help_panel=HOW)
]
Root = Annotated[Path, typer.Option(help="Where studies' folders go.", rich_help_panel=HOW)]
StudyDevices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        help="How many, or names: cpu:0,cpu:1. \\[default: all GPUs, or cores, that are of use]",
        rich_help_panel=HOW,
        show_default=False,
    ),
]
StudySeed = Annotated[int | None, typer.Option("--seed", help="Of random weights and samples.", rich_help_panel=HOW)]


def devices_of(text: str | None, most: int) -> tuple[str, ...]:
    """The devices that were named, or those that a study takes by itself."""
    from stagewright.studies.runner.load import default_devices_of_study

    return default_devices_of_study(most) if text is None else options.devices_of(text)


def whole_numbers(text: str | None, what: str) -> tuple[int, ...] | None:
    """Whole numbers with commas; None stays None."""
    if text is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise UsageError(f"{text!r} is not a list of {what}; write whole numbers with commas, like 2,4")
    return tuple(int(one) for one in text.replace(" ", "").split(","))


def words(text: str | None) -> tuple[str, ...] | None:
    """Words with commas; None stays None."""
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def conduct(
    context: typer.Context,
    given: Mapping[str, Any],
    *,
    quick: bool,
    resume: Path | None,
    fresh: bool,
    root: Path,
    json: bool,
) -> None:
    """Run the study that the command is named after, here or where it was interrupted, and show what it found."""
    from stagewright.machine.machine import probe_machine
    from stagewright.studies.runner.folder import StudyFolder
    from stagewright.studies.runner.load import choose_study, study_of_folder
    from stagewright.studies.runner.check import check_study
    from stagewright.studies.runner.run import run_study

    name = str(context.info_name)
    command = shlex.join(["stagewright", *sys.argv[1:]])
    if resume is not None:
        _refuse_others(context)
        folder = StudyFolder.open(resume)
        if folder.about()["study"] != name:
            raise UsageError(
                f"{resume} is of the study {folder.about()['study']!r}, not {name!r}: "
                f"use stagewright study {folder.about()['study']} --resume {resume}"
            )
        chosen = study_of_folder(folder)
        check_study(chosen)
        folder.resumed(folder.about()["command"])
    else:
        chosen = choose_study(name, given, quick=quick)
        check_study(chosen)
        unfinished = None if fresh else StudyFolder.unfinished(root, chosen)
        if unfinished is not None:
            note(f"going on in {unfinished.path}, where this study was interrupted (--fresh begins anew)")
        folder = unfinished or StudyFolder.create(root, chosen, command=command, environment=probe_machine().to_dict())
    left = [part for part in chosen.parts if "data" not in (folder.part(part.name) or {})]
    expected_s = sum(part.expected_s for part in left)
    if expected_s > 60:
        least, most = expected_s / 60, SLOW_CORES * expected_s / 60
        note(f"{len(left)} parts, {least:.0f} to {most:.0f} minutes by the cores' speed; ended early, it can go on")
    numbers = {part.name: at for at, part in enumerate(chosen.parts, start=1)}
    try:
        outcome = run_study(
            chosen, folder, tell=lambda part, text: note(f"[{numbers[part.name]}/{len(numbers)}] {part.name}: {text}")
        )
    except KeyboardInterrupt:
        note(f"the parts that are done are kept: the same command goes on in {folder.path}")
        raise
    if json:
        print_json(outcome.to_dict())
    else:
        from stagewright.report.tables.study import study_table

        console = screen()
        for table in outcome.findings.tables:
            console.print(study_table(table.title, table.columns, table.rows, table.note))
        for answer in outcome.findings.answers:
            console.print(f"\n{answer.question}", style="bold", markup=False)
            for sentence in answer.sentences:
                console.print(f"  {sentence}", markup=False, soft_wrap=True)
    note(f"written: {outcome.folder}")
    if not outcome.is_complete:
        raise typer.Exit(1)


def _refuse_others(context: typer.Context) -> None:
    """With --resume a study has the options of its folder."""
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in ("resume", "json") and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--resume takes all options from its folder: leave {parameter.opts[0]} out")
