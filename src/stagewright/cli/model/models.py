"""``stagewright models``: list the built-in models and tasks."""

from __future__ import annotations

from stagewright.cli.options import Json
from stagewright.cli.screen import print_json, print_lines, print_table


def models(json: Json = False) -> None:
    """List the built-in models and tasks."""
    from stagewright import zoo
    from stagewright.zoo import tasks

    if json:
        print_json({"models": zoo.describe(), "tasks": tasks.describe()})
        return
    from stagewright.report.tables.cluster import name_table

    print_table(name_table("model", zoo.describe()))
    print_table(name_table("task", tasks.describe()))
    print_lines(
        "Also: hf:ORG/NAME or hf:FOLDER (transformers, remote code off), package.module:factory (your own code)."
    )
