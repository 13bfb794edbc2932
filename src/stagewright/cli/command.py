"""The class of every verb: it accepts the former names of options, with a note, and shows help that fits a screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer.core

from stagewright.cli.help import verb_help
from stagewright.cli.screen import note

FORMER_NAMES = {
    "--batch": ("--micro-batch-size",),
    "--chakra": ("--chakra-out",),
    "--check": ("--verify",),
    "--cuts": ("--cut", "--policies"),
    "--data": ("--data-dir",),
    "--dtype": ("--precision",),
    "--export": ("--save-weights",),
    "--fresh": ("--restart",),
    "--hang-s": ("--timeout",),
    "--hosts": ("--num-hosts",),
    "--memory": ("--show-memory",),
    "--mesh": ("--strategy",),
    "--no-cache": ("--fresh",),
    "--picture": ("--plot",),
    "--resume": ("--continue",),
    "--strategies": ("--strategy",),
    "--timeout": ("--time-limit",),
    "--trace": ("--perfetto",),
}
"""Former name of an option → its name, which may differ between verbs. A former name is accepted where a verb has a new
one and not the former."""

FORMER_VALUES: dict[str, Callable[[str], str]] = {
    "--dtype": lambda value: {"bfloat16": "bf16"}.get(value, value),
    "--timeout": lambda value: f"{value}s",
}
"""Former name of an option → what a value of it is now."""


class Verb(typer.core.TyperCommand):
    """A verb of the command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments after replacing former names of options."""
        known = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        end = args.index("--") if "--" in args else len(args)
        words = [_current(word, known) for word in args[:end]]
        for index, word in enumerate(args[: max(0, end - 1)]):
            if words[index] != word:
                words[index + 1] = FORMER_VALUES.get(word, str)(words[index + 1])
        return super().parse_args(ctx, [*words, *args[end:]])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(verb_help(self, ctx))


def _current(word: str, known: set[str]) -> str:
    """Return an argument with the current name of its option; note a former name."""
    name, equals, value = word.partition("=")
    new = next((new for new in FORMER_NAMES.get(name, ()) if new in known), None)
    if new is None or name in known:
        return word
    note(f"note: {name} is now {new}; the former name will be removed")
    return f"{new}={FORMER_VALUES.get(name, str)(value)}" if equals else new
