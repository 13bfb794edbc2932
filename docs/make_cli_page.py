"""Write docs/cli.md from the real `--help` of every verb: `python docs/make_cli_page.py`.

The width, the encoding and the absence of colours are fixed, so that the page is the same on every machine.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import typer

from stagewright.cli.app import app

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 100

HEAD = """\
# The command line

What each verb's `--help` says. This page is made by `python docs/make_cli_page.py`.

Exit codes: 0 done, 1 the run failed, 2 wrong usage or file, 3 a plan is not equal to serial, 130 interrupted.
Results go to standard output, progress and notes to standard error. With `--json` standard output holds
data alone: [JSON](json.md).

| environment variable | what it does |
|---|---|
| `STAGEWRIGHT_CACHE` | the folder in which profiles are kept; otherwise `stagewright` in the user's cache folder |
| `STAGEWRIGHT_DATA` | a folder of data sets as parquet files (`mnist/`, `cifar10/`, `glue/rte/`, `glue/cola/`) |
"""


def cli_page() -> str:
    """The whole page."""
    parts = [HEAD, _section("stagewright", [])]
    for verb in verbs():
        parts.append(_section(f"stagewright {verb}", [verb]))
        parts += [_section(f"stagewright {verb} {one}", [verb, one]) for one in _below(verb)]
    return "\n".join(parts)


def verbs() -> list[str]:
    """Every verb, in the order of the program's own list."""
    return _names(app) + [group.name for group in _groups()]


def _groups() -> list[Any]:
    """Verbs that have verbs of their own."""
    return [group.typer_instance.info for group in app.registered_groups if group.typer_instance]


def _below(verb: str) -> list[str]:
    """The verbs of a verb."""
    inside = [group.typer_instance for group in app.registered_groups if group.typer_instance]
    return [name for group in inside if group.info.name == verb for name in _names(group)]


def _names(program: typer.Typer) -> list[str]:
    return [command.name or command.callback.__name__ for command in program.registered_commands if command.callback]


def _section(title: str, arguments: list[str]) -> str:
    return f"## {title}\n\n```text\n{_help(arguments)}\n```\n"


def _help(arguments: list[str]) -> str:
    """What the program prints, without trailing blanks."""
    program = Path(sys.executable).with_name("stagewright")
    environment = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"}
    done = subprocess.run(
        [program, *arguments, "--help"], env=environment, capture_output=True, encoding="utf-8", check=True
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines()).strip("\n")


if __name__ == "__main__":
    PAGE.write_text(cli_page(), encoding="utf-8")
