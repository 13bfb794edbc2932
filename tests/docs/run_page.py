"""Run all commands and Python blocks of a page, in order, in the current folder: `python run_page.py docs/split.md`.

```console                              $ lines are commands for bash; the lines below them are output
$ stagewright split no-such-model       output is not compared (it contains times), except that
stagewright: unknown model …            a line that begins with "stagewright: " is an error: the command must
```                                     fail with exactly that line; measurements run once, DeiT at its smallest size

```python                               run in one namespace per page; if the first line is "# my_model.py",
# my_model.py                           the block is written into that file instead
```

```toml                                 the same: written into the file that its first line names
# plan.toml
```

<!-- not run: why -->                   before a block: it is skipped; test_pages.py lists all of these
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from program import TIME_LIMIT_S, run_program

_FENCE = re.compile(r"^( *)```(\w*)\s*$")
_NOT_RUN = re.compile(r"^ *<!-- not run: (.+) -->$")
_FILE = re.compile(r"^# ([\w./-]+\.(?:py|toml))$")
_QUOTED = re.compile(r"""\"(?:\$\([^()]*\)|[^"$`\\])*\"|'[^']*'""")
_SHELL = re.compile(r"[|&;<>$`*?\\]")
_ROOT = Path(__file__).resolve().parents[2]
_ONCE = {
    **{verb: {"--repeats": "1"} for verb in ("profile", "split", "plan", "forecast", "explain")},
    "compare": {"--steps": "2", "--warmup": "1"},
}


class Block(NamedTuple):
    """One fenced block of a page."""

    line: int  # of its first line within the fence, from 1
    language: str
    text: str
    not_run: str | None  # why it is not run


class Command(NamedTuple):
    """One command of a console block with what is shown below it."""

    line: int
    text: str
    shown: list[str]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    fenced: list[Block] = []
    opened: tuple[int, str] | None = None
    content: list[str] = []
    indent = ""  # of a block in a tab
    reason: str | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if opened is None:
            marker = _NOT_RUN.match(line)
            if fence:
                opened, content, indent = (number + 1, fence[2]), [], fence[1]
            elif marker:
                reason = marker[1]
            elif line.strip():
                reason = None  # a marker must be right before its block
        elif line == f"{indent}```":
            fenced.append(Block(*opened, "\n".join(content), reason))
            opened, reason = None, None
        else:
            content.append(line.removeprefix(indent))
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: the block is never closed")
    return fenced


def commands(block: Block) -> list[Command]:
    """Return the commands of a console block; a backslash at the end continues on the next line."""
    parsed: list[Command] = []
    continued = False
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if continued:
            parsed[-1] = parsed[-1]._replace(text=f"{parsed[-1].text}\n{line}")
            continued = line.endswith("\\")
        elif line.startswith("$ "):
            parsed.append(Command(number, line[2:], []))
            continued = line.endswith("\\")
        elif parsed:
            parsed[-1].shown.append(line)
        elif line.strip():
            raise ValueError(f"line {number}: output is shown before any command")
    return parsed


def run(page: Path) -> None:
    """Run the page's blocks; the first failure ends the program with its line number."""
    namespace: dict[str, Any] = {"__name__": "__page__"}
    sys.path.insert(0, os.getcwd())
    _link_environment()
    for block in blocks(page):
        if block.not_run is not None:
            continue
        if block.language == "console":
            for command in commands(block):
                _run_command(page, command)
        elif block.language in ("python", "toml"):
            first, _, _ = block.text.partition("\n")
            named = _FILE.match(first)
            if named:
                Path(named[1]).write_text(block.text + "\n", encoding="utf-8")
            elif block.language == "toml":
                sys.exit(f"{page}:{block.line}: the first line names no file, as in # plan.toml")
            else:
                # Padded with empty lines, so that a traceback names the line of the page.
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)


def _link_environment() -> None:
    """Make `.venv/bin` and `make` work as in a clone after set-up."""
    Path(".venv").mkdir()
    Path(".venv/bin").symlink_to(Path(sys.executable).parent)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints.lock"):
        Path(name).symlink_to(_ROOT / name)
    Path(".venv/.ready").touch()


def _run_command(page: Path, command: Command) -> None:
    folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": os.pathsep.join([folder, os.environ.get("PATH", "")]), "HF_HUB_OFFLINE": "1"}
    text = command.text
    if text == "make demo":
        text = _by_bash("make --no-print-directory --dry-run demo", environment).stdout.strip()
    text = text.removeprefix(".venv/bin/")  # a link to this environment
    # Bash removes quotes and expands "$(…)"; stagewright itself then runs without bash.
    is_stagewright = text.startswith("stagewright ") and not _SHELL.search(_QUOTED.sub("", text))
    done = (
        run_program(_once(_words(text, environment)), env=environment)
        if is_stagewright
        else _by_bash(text, environment)
    )
    code, out, err = done.returncode, done.stdout, done.stderr
    errors = [line for line in command.shown if line.startswith("stagewright: ")]
    where = f"{page}:{command.line}: {shlex.quote(command.text)}"
    if bool(errors) != (code != 0):
        sys.exit(f"{where} ended with {code}:\n{out}{err}")
    for error in errors:
        if error not in err.splitlines():
            sys.exit(f"{where} was to say\n{error}\nbut said\n{err}")


def _once(words: list[str]) -> list[str]:
    """Measure once and use a small model: times do not matter here."""
    few = {} if "--help" in words else _ONCE.get(words[0], {})
    if "deit-small" in words:
        words, few = ["deit-tiny" if word == "deit-small" else word for word in words], {**few, "--batch": "1"}
    return [*words, *(word for option, value in few.items() if option not in words for word in (option, value))]


def _words(text: str, environment: dict[str, str]) -> list[str]:
    """Return the arguments that bash would pass to stagewright."""
    printed = _by_bash(f'stagewright() {{ printf "%s\\0" "$@"; }}; {text}', environment)
    if printed.returncode:
        sys.exit(f"{text}: {printed.stderr}")
    return printed.stdout.split("\0")[:-1]


def _by_bash(text: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=TIME_LIMIT_S,
        check=False,
    )


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve())
