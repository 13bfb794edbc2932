"""Every command and every Python block in README and docs runs; what is left out is counted."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from program import run_script

ROOT = Path(__file__).resolve().parents[2]
RUNNER = Path(__file__).with_name("run_page.py")
PAGES = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
LANGUAGES = {"console", "python", "text", "json", "toml"}

# Blocks that are not run, with the reasons that their pages give. Think twice before adding one.
NOT_RUN = [
    ("README.md", "installs into your environment"),
    ("docs/fabric.md", "needs root"),
    ("docs/how-to/extend.md", "part of another package's pyproject.toml"),
    ("docs/how-to/multi-node.md", "needs Kubernetes"),
    ("docs/how-to/multi-node.md", "needs Kubernetes"),
    ("docs/how-to/multi-node.md", "needs Slurm"),
    ("docs/how-to/multi-node.md", "needs two machines"),
    ("docs/install.md", "the tests install the wheel with tools/smoke_wheel.sh"),
    ("docs/reliability.md", "takes minutes on 16 cores, an hour on two"),
    ("docs/reliability.md", "takes minutes"),
    ("docs/faults.md", "trains for minutes"),
    ("docs/tutorial.md", "installs into your environment"),
    ("docs/studies/codecs.md", "needs a GPU and the data"),
]

# Pages whose commands take a while; continuous integration runs them, `make test` leaves them to `make test-long`.
LONG = {
    "README.md",
    "docs/index.md",
    "docs/codecs.md",
    "docs/compare.md",
    "docs/comparison.md",
    "docs/how-to/my-own-model.md",
    "docs/python.md",
    "docs/results.md",
    "docs/split.md",
    "docs/studies/stages.md",
    "docs/forecast.md",
    "docs/fabric.md",
    "docs/faults.md",
    "docs/how-to/extend.md",
    "docs/how-to/mixed-precision.md",
    "docs/how-to/multi-node.md",
    "docs/how-to/slow-job.md",
    "docs/how-to/too-large.md",
    "docs/how-to/wrong-loss.md",
    "docs/plans.md",
    "docs/studies/codecs.md",
    "docs/studies/fabric.md",
    "docs/studies/memory.md",
    "docs/studies/strategies.md",
    "docs/train.md",
    "docs/tutorial.md",
}

_runner = runpy.run_path(str(RUNNER))
blocks, commands = _runner["blocks"], _runner["commands"]


def has_code(page: Path) -> bool:
    return any(block.language in ("console", "python") and block.not_run is None for block in blocks(page))


def marked(name: str) -> Any:
    """A page, or one that takes long."""
    return pytest.param(name, marks=pytest.mark.long) if name in LONG else name


@pytest.mark.slow
@pytest.mark.parametrize("name", [marked(name) for name, page in PAGES.items() if has_code(page)])
def test_page_runs(name: str, tmp_path: Path, shared_cache: Path) -> None:
    environment = {**os.environ, "STAGEWRIGHT_CACHE": str(shared_cache), "HF_HUB_OFFLINE": "1"}
    done = run_script(RUNNER, PAGES[name], cwd=tmp_path, env=environment, timeout_s=1500)
    assert done.returncode == 0, done.stdout + done.stderr


def test_long_pages_are_there() -> None:
    assert set(PAGES) >= LONG


def test_blocks_that_are_not_run_are_known() -> None:
    marked = [(name, block.not_run) for name, page in PAGES.items() for block in blocks(page) if block.not_run]
    assert sorted(marked) == sorted(NOT_RUN)


@pytest.mark.parametrize("name", PAGES)
def test_blocks_say_what_they_are(name: str) -> None:
    for block in blocks(PAGES[name]):
        assert block.language in LANGUAGES, f"{name}:{block.line}: a block of {block.language or 'no language'}"
        assert block.language != "console" or commands(block), f"{name}:{block.line}: a console block without commands"


@pytest.mark.parametrize("name", PAGES)
def test_commands_stand_in_console_blocks(name: str) -> None:
    lines = PAGES[name].read_text(encoding="utf-8").splitlines()
    shown = {number for number, line in enumerate(lines, start=1) if line.lstrip().startswith("$ ")}
    run = {command.line for block in blocks(PAGES[name]) if block.language == "console" for command in commands(block)}
    assert shown == run


def test_a_page_is_cut_into_blocks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n```console\n$ echo one \\\n    two\none two\n$ true\n```\n\n"
        "<!-- not run: why -->\n```console\n$ false\n```\n\n<!-- not run: stray -->\ntext\n```python\nx = 1\n```\n"
        '\n=== "A tab"\n\n    ```python\n    if x:\n        y = 2\n    ```\n'
    )
    first, second, third, in_tab = blocks(page)
    assert [(one.line, one.text, one.shown) for one in commands(first)] == [
        (4, "echo one \\\n    two", ["one two"]),
        (7, "true", []),
    ]
    assert (second.not_run, second.line) == ("why", 12)
    assert (third.not_run, third.language, third.text) == (None, "python", "x = 1")
    assert (in_tab.language, in_tab.text) == ("python", "if x:\n    y = 2")


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("```console\n$ false\n```\n", "ended with 1"),
        ("```console\n$ echo 'stagewright: no' >&2; false\nstagewright: yes\n```\n", "was to say"),
        ("```console\n$ true\nstagewright: yes\n```\n", "ended with 0"),
        ("```console\n$ false | true\n```\n", "ended with 1"),
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", "line 6"),
        ("```python\n# made.py\nassert False\n```\n\n```console\n$ python made.py\n```\n", "ended with 1"),
    ],
)
def test_a_page_that_does_not_work_is_found(text: str, failure: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    done = run_script(RUNNER, page, cwd=tmp_path)
    assert done.returncode == 1
    assert failure in done.stderr
