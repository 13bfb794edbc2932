"""Former names of options, help that fits a screen, verbs in groups, one meaning an option."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stagewright.cli.app import GROUPS, app
from stagewright.cli.command import FORMER_NAMES, Verb

SCREEN = 50  # lines, at 100 columns
PROGRAM: Any = typer.main.get_command(app)
PAGE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "make_cli_page.py"))


def _verbs() -> list[tuple[str, ...]]:
    verbs = []
    for name, command in PROGRAM.commands.items():
        verbs += [(name, sub) for sub in command.commands] if hasattr(command, "commands") else [(name,)]
    return verbs


@pytest.mark.parametrize("verb", _verbs(), ids=" ".join)
def test_help_fits_a_screen_and_says_first_what_the_verb_is_for(verb: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*verb, "--help"], env={"COLUMNS": "100"}, prog_name="stagewright")
    lines = result.output.splitlines()
    assert len(lines) <= SCREEN
    assert max(len(line.rstrip()) for line in lines) <= 100
    assert lines[0].startswith(f"Usage: stagewright {' '.join(verb)}")
    assert lines[1][0].isupper()
    assert lines[1 : lines.index("", 1)][-1].strip().endswith(".")


def test_verbs_are_in_four_groups() -> None:
    assert len(GROUPS) == 4
    output = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    assert all(title in output for title in GROUPS)
    assert sum(len(verbs) for verbs in GROUPS.values()) == len(PROGRAM.commands)


def test_an_option_is_a_switch_or_takes_a_value_in_every_verb() -> None:
    kinds = {name: {bool(own.is_flag) for own in verbs.values()} for name, verbs in PAGE["options"]().items()}
    assert {name for name, kind in kinds.items() if len(kind) > 1} == set()
    assert {"--batch", "--strategy", "--micro-batch-size", "--perfetto", "--verify", "--data-dir"} <= set(kinds)
    assert not {"--strategies", "--mesh", "--picture", "--check", "--data", "--no-cache"} & set(kinds)


def test_an_option_has_one_meaning_in_every_verb() -> None:
    """Help up to a semicolon says what it means; after it, a verb may add what is special."""
    meanings = {name: {PAGE["meaning"](own) for own in verbs.values()} for name, verbs in PAGE["options"]().items()}
    assert {name: texts for name, texts in meanings.items() if len(texts) > 1} == {}
    assert all(text for texts in meanings.values() for text in texts)


def test_a_former_name_is_accepted_with_a_note() -> None:
    seen: list[object] = []
    small = typer.Typer(add_completion=False)

    @small.command(cls=Verb)
    def draw(plot: str = "", batch: int = 0) -> None:
        """Draw it."""
        seen.append((plot, batch))

    for words in (["--picture", "a.svg"], ["--picture=a.svg"], ["--plot", "a.svg"]):
        result = CliRunner().invoke(small, [*words, "--batch", "2"])
        assert result.exit_code == 0, result.output
        assert ("--picture is now --plot" in result.stderr) == (words[0] != "--plot")
    assert seen == [("a.svg", 2)] * 3
    assert CliRunner().invoke(small, ["--trace", "a.json"]).exit_code == 2  # it has no --perfetto


def test_former_names_have_a_verb_with_the_new_one() -> None:
    known = {name for verbs in PAGE["options"]().values() for own in verbs.values() for name in own.opts}
    assert {new for names in FORMER_NAMES.values() for new in names} <= known


@pytest.mark.parametrize(
    ("new", "words", "value"),
    [
        ("cut", ["--cuts", "a"], "a"),
        ("policies", ["--cuts", "even"], "even"),
        ("time-limit", ["--timeout", "600"], "600s"),
        ("time-limit", ["--timeout=600"], "600s"),
        ("timeout", ["--hang-s", "5"], "5"),
        ("precision", ["--dtype=bfloat16"], "bf16"),
    ],
)
def test_a_former_name_is_the_new_one_of_its_verb(new: str, words: list[str], value: str) -> None:
    seen: list[str] = []
    small = typer.Typer(add_completion=False)

    @small.command(cls=Verb)
    def work(option: str = typer.Option("", f"--{new}")) -> None:
        """Work."""
        seen.append(option)

    result = CliRunner().invoke(small, words)
    assert result.exit_code == 0, result.output
    assert seen == [value]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "mlp-mnist", "--schedule", "1fb1"], "unknown schedule '1fb1'; did you mean '1f1b'"),
        (["plan", "mlp-mnist", "--recompute", "none,allways"], "did you mean 'always'"),
        (["train", "digits-vit", "digits", "--log", "wandbb"], "did you mean 'wandb'"),
        (["compare", "mlp-mnist", "--microbatches", "4", "--micro-batch-size", "8"], "exclude each other"),
        (["fit", "mlp-mnist", "--memory", "1GiB", "--optimizer", "adan"], "did you mean 'adam'"),
    ],
)
def test_a_wrong_choice_offers_the_nearest(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, words)
    assert message in str(result.exception)
