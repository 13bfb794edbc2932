"""The help of a verb: a line for each option, under the heading of its panel, so that it fits a screen.

Usage: stagewright report [OPTIONS] [RUN]…

Write one page about runs.

Options
  --output, -o FILE    Where to write the page. [report.html]
"""

from __future__ import annotations

import sys
import textwrap
from typing import Any

from rich.console import Console
from rich.text import Text

_COMMON = 2  # options that need no heading: --json and --help
_METAVARS = {"int": "N", "float": "X", "path": "PATH"}
_NAMES_WIDTH = 26  # longer names push their help to the right


def verb_help(command: Any, context: Any) -> str:
    """Return the help of a verb, with colors on a terminal."""
    console = Console(file=sys.stdout, highlight=False)
    with console.capture() as captured:
        _print(console, command, context)
    return captured.get().rstrip("\n")


def _print(console: Console, command: Any, context: Any) -> None:
    parameters = [parameter for parameter in command.get_params(context) if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    words = " ".join(_argument_name(argument) for argument in arguments)
    console.print(Text(f"Usage: {context.command_path} {words} [OPTIONS]".replace("  ", " ")))
    console.print(Text(" ".join((command.help or "").split())), "\n", sep="")
    panels: dict[str, list[Any]] = {"Arguments": arguments, "Options": []}
    for parameter in parameters:
        if parameter.param_type_name != "argument":
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(parameter)
    panels["Options"] = panels.pop("Options")  # last
    rows = {panel: [(_names(row), _help(row)) for row in own] for panel, own in panels.items() if own}
    indent = 4 + min(_NAMES_WIDTH, max(len(names) for own in rows.values() for names, _ in own))
    for panel, own in rows.items():
        if panel != "Options" or len(own) > _COMMON:
            console.print(Text(f"{panel}:", style="bold"))
        for names, text in own:
            for line in _lines(names, text, indent, console.width):
                console.print(line, no_wrap=True, soft_wrap=True)


def _lines(names: str, text: str, indent: int, width: int) -> list[Text]:
    """Return an option's lines: its names, and its help in a column, which long names push to the right."""
    head = f"  {names}".ljust(indent - 2) + "  "
    wrapped = textwrap.wrap(head + text, max(width, 60), subsequent_indent=" " * indent, break_on_hyphens=False)
    lines = [Text(line.rstrip()) for line in wrapped]
    lines[0].stylize("cyan", 0, len(names) + 2)
    return lines


def _argument_name(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return f"{name if argument.required else f'[{name}]'}{'…' if argument.nargs == -1 else ''}"


def _names(parameter: Any) -> str:
    """Return the names of an option and what it takes: "--output, -o FILE"."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    all_names = (*parameter.opts, *parameter.secondary_opts)
    names = ", ".join(sorted(all_names, key=lambda name: not name.startswith("--")))  # those of --help are in no order
    if parameter.is_flag or getattr(parameter, "count", False):
        return names
    # Typer describes types in different ways in its versions.
    described = getattr(parameter, "type_descriptor", None) or getattr(parameter, "type", "")
    kind = str(getattr(described, "annotation", getattr(described, "name", described))).lower()
    metavar = parameter.metavar or next((name for word, name in _METAVARS.items() if word in kind), "TEXT")
    return f"{names} {metavar}{' …' if parameter.multiple else ''}"


def _help(parameter: Any) -> str:
    """Return the help of a parameter with its default."""
    text = " ".join((getattr(parameter, "help", None) or "").replace("\\[", "[").split())
    shown = getattr(parameter, "show_default", False)
    default = shown if isinstance(shown, str) else parameter.default
    if callable(default) or default in (None, False, (), [], "") or not shown or "[default" in text:
        return text.replace("[default: ", "[")
    return f"{text} [{default}]".strip()
