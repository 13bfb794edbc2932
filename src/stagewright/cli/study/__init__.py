"""``stagewright study``: a whole study from profile to report, with answers in sentences.

Each command is generated from the options that its study declares (`stagewright.studies.NAME.options`).
"""

from __future__ import annotations

import typer

from stagewright.cli.study.command import study_command
from stagewright.studies.runner.load import STUDIES

__all__ = ["study"]

study = typer.Typer(
    name="study",
    help="Run a whole study from profile to report: tables, figures, and answers in sentences.",
    no_args_is_help=True,
)
for name in STUDIES:
    study.command(name)(study_command(name))
