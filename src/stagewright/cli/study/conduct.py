"""Run, resume and print a study."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from stagewright.cli.screen import note, print_json, screen
from stagewright.engine.launch.fork_server import start_fork_server, wait_for_fork_server
from stagewright.errors import RunTerminated, UsageError

SLOW_CORES = 2.5  # a slow core takes this many times the expected duration


def conduct(
    context: typer.Context,
    options: Any,
    parse: Callable[[], dict[str, Any]],
    *,
    quick: bool,
    resume: Path | None,
    restart: bool,
    root: Path,
    json: bool,
) -> None:
    """Run the study named by the command, in a new folder or where it was interrupted, and print its findings."""
    from stagewright.machine.machine import probe_machine
    from stagewright.studies.runner.check import check_study_inputs
    from stagewright.studies.runner.folder import StudyFolder
    from stagewright.studies.runner.load import choose_study, load_study_of_folder
    from stagewright.studies.runner.run import run_study

    name = str(context.info_name)
    command = shlex.join(["stagewright", *sys.argv[1:]])
    if resume is not None:
        _refuse_other_options(context)
        folder = StudyFolder.open(resume)
        saved_name = folder.about()["study"]
        if saved_name != name:
            raise UsageError(
                f"{resume} is of the study {saved_name!r}, not {name!r}: "
                f"use stagewright study {saved_name} --continue {resume}"
            )
        study = load_study_of_folder(folder)
        check_study_inputs(study)
        folder.resumed(folder.about()["command"])
    else:
        given = parse()
        given |= options.machine_defaults(given, quick=quick, note=note)
        study = choose_study(name, given, quick=quick)
        check_study_inputs(study)
        unfinished = None if restart else StudyFolder.unfinished(root, study)
        if unfinished is not None:
            note(f"continuing in {unfinished.path}, where this study was interrupted (--restart starts a new one)")
        folder = unfinished or StudyFolder.create(root, study, command=command, environment=probe_machine().to_dict())
    remaining = [part for part in study.parts if "data" not in (folder.part(part.name) or {})]
    expected_s = sum(part.expected_s for part in remaining)
    if expected_s > 60:
        least, most = expected_s / 60, SLOW_CORES * expected_s / 60
        note(f"{len(remaining)} parts, {least:.0f} to {most:.0f} minutes; an interrupted study can be continued")
    if remaining and any(field.name == "devices" for field in fields(options)):
        start_fork_server()
        wait_for_fork_server()
    numbers = {part.name: number for number, part in enumerate(study.parts, start=1)}
    try:
        outcome = run_study(
            study,
            folder,
            note=lambda part, text: note(f"[{numbers[part.name]}/{len(numbers)}] {part.name}: {text}"),
            fresh=restart,
        )
    except (KeyboardInterrupt, RunTerminated):
        note(f"finished parts are saved: the same command continues in {folder.path}")
        raise
    if json:
        print_json(outcome.to_dict())
    else:
        from rich.text import Text

        from stagewright.report.render.terminal import draw_table

        console = screen()
        for name, text in outcome.findings.summary.rows if outcome.findings.summary is not None else ():
            console.print(Text.assemble((f"{name}: ", "bold"), text), soft_wrap=True)
        for table in outcome.findings.tables:
            console.print(draw_table(table))
        for answer in outcome.findings.answers:
            console.print(f"\n{answer.question}", style="bold", markup=False)
            for sentence in answer.sentences:
                console.print(f"  {sentence}", markup=False, soft_wrap=True)
    note(f"written: {outcome.folder}")
    if not outcome.is_complete:
        raise typer.Exit(1)


def _refuse_other_options(context: typer.Context) -> None:
    """Raise UsageError for options next to --continue: the folder has the options of its study."""
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in ("resume", "json") and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--continue takes all options from its folder: leave {parameter.opts[0]} out")
