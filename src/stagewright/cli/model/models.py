"""``stagewright models``: what can be named."""

from __future__ import annotations

from stagewright.cli.options import Json
from stagewright.cli.screen import print_json, screen

__all__ = ["models"]


def models(json: Json = False) -> None:
    """List the models and tasks that have a name."""
    from stagewright import zoo
    from stagewright.zoo import tasks

    if json:
        print_json({"models": zoo.describe(), "tasks": tasks.describe()})
        return
    from stagewright.report.tables.names import name_table

    console = screen()
    console.print(name_table("model", zoo.describe()))
    console.print(name_table("task", tasks.describe()))
    console.print(
        "Also: hf:ORG/NAME or hf:FOLDER (through transformers, remote code off), package.module:factory (your own).",
        markup=False,
    )
