"""``stagewright study``: a whole study from profile to report, with answers in sentences. One file a study."""

from __future__ import annotations

import typer

from stagewright.cli.study.codecs import codecs
from stagewright.cli.study.fabric import fabric
from stagewright.cli.study.memory import memory
from stagewright.cli.study.stages import stages
from stagewright.cli.study.strategies import strategies

__all__ = ["study"]

study = typer.Typer(
    name="study",
    help="A whole study from profile to report: tables, figures, and answers in sentences.",
    no_args_is_help=True,
)
study.command()(stages)
study.command()(strategies)
study.command()(codecs)
study.command()(memory)
study.command()(fabric)
