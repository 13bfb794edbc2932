"""The class of every verb: it accepts the former names of options, with a note, and shows help that fits a screen."""

from __future__ import annotations

from typing import Any

import typer.core

from stagewright.cli.help import verb_help
from stagewright.cli.screen import note

FORMER_NAMES = {
    "--batch": "--micro-batch-size",
    "--check": "--verify",
    "--cuts": "--cut",
    "--data": "--data-dir",
    "--dtype": "--precision",
    "--memory": "--show-memory",
    "--mesh": "--strategy",
    "--no-cache": "--fresh",
    "--picture": "--plot",
    "--resume": "--continue",
    "--strategies": "--strategy",
    "--trace": "--perfetto",
}
"""Former name of an option → its name. A former name is accepted where a verb has the new one and not the former."""

FORMER_VALUES = {"--dtype": {"bfloat16": "bf16"}}
"""Former name of an option → its former values and what they are called now."""


class Verb(typer.core.TyperCommand):
    """A verb of the command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments after replacing former names of options."""
        known = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        end = args.index("--") if "--" in args else len(args)
        words = [_current(word, known) for word in args[:end]]
        for index, word in enumerate(args[: max(0, end - 1)]):
            if words[index] != word:
                words[index + 1] = FORMER_VALUES.get(word, {}).get(words[index + 1], words[index + 1])
        return super().parse_args(ctx, [*words, *args[end:]])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(verb_help(self, ctx))


def _current(word: str, known: set[str]) -> str:
    """Return an argument with the current name of its option; note a former name."""
    name, equals, value = word.partition("=")
    new = FORMER_NAMES.get(name)
    if new is None or name in known or new not in known:
        return word
    note(f"note: {name} is now {new}; the former name will be removed")
    return f"{new}{equals}{FORMER_VALUES.get(name, {}).get(value, value)}"
