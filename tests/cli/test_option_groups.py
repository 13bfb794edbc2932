"""A dataclass among a verb's parameters becomes options, in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from stagewright.cli.option_groups import with_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    width: Annotated[int, typer.Option(min=1, help="In pixels.")] = 3
    dark: Annotated[bool, typer.Option("--dark")] = False


def _app(seen: list[object]) -> typer.Typer:
    app = typer.Typer(add_completion=False)

    @app.command()
    @with_groups
    def draw(name: str, size: _Size, last: int = 1) -> None:
        """Draw it."""
        seen.append((name, size, last))

    return app


def test_the_options_arrive_as_one_value() -> None:
    seen: list[object] = []
    result = CliRunner().invoke(_app(seen), ["a", "--width", "7", "--dark", "--last", "2"])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(_app(seen), ["b"]).exit_code == 0
    assert seen == [("a", _Size(width=7, dark=True), 2), ("b", _Size(), 1)]


def test_limits_help_and_order_are_the_fields() -> None:
    command = typer.main.get_command(_app([]))
    assert command.help == "Draw it."
    assert [option.name for option in command.params] == ["name", "width", "dark", "last"]
    assert CliRunner().invoke(_app([]), ["a", "--width", "0"]).exit_code == 2
