"""Time each command of the lab pages with --quick: how long a question takes to answer.

    STAGEWRIGHT_DATA=DATA python benchmarks/lab_times.py --output FILE      as root, for the study of the fabric
    python benchmarks/lab_times.py --output FILE --estimate studies/…       from parts of quick studies that were run

Commands are read from the tables of docs/studies/*.md. One that needs data is skipped without STAGEWRIGHT_DATA; one
that takes longer than --limit-s is ended, and has no time. A command that is in FILE already is not repeated.

With --estimate nothing is run: a command's time is that of its parts, each as long as the part of the same name in one
of the folders, or as the mean of its kind there. One with parts of another kind or on other data has no estimate.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import stagewright.cli
from record import command_of, machine_text, write_record
from stagewright.studies.framework.study import Study
from stagewright.studies.runner.folder import StudyFolder
from stagewright.studies.runner.load import load_study_of_folder
from stagewright.studies.runner.other_programs import other_load

PAGES = Path(__file__).resolve().parents[1] / "docs" / "studies"
_COMMAND = re.compile(r"^\|[^|]*\| `(study [^`]*)`", re.MULTILINE)
_MORE = {"--client f4l3": "--tasks cifar10"}
"""What a command needs with --quick, whose model has too few units for it."""
_LONG = ("resnet-101",)
"""In commands that take hours even so."""


def read_commands(pages: Path = PAGES) -> list[str]:
    """List the commands of the lab pages, each once."""
    texts = (page.read_text(encoding="utf-8") for page in sorted(pages.glob("*.md")))
    return list(dict.fromkeys(command for text in texts for command in _COMMAND.findall(text)))


def quick_words(command: str, *, has_data: bool) -> list[str] | None:
    """Return a command's words with --quick; None: it needs data that is not there, or takes hours."""
    more = next((words for part, words in _MORE.items() if part in command), "")
    words = shlex.split(f"{command} --quick {more}")
    is_possible = has_data or "--tasks" not in words
    return words if is_possible and not any(name in command for name in _LONG) else None


def run(words: list[str], limit_s: float) -> dict[str, Any]:
    """Run a command in a new folder; return its seconds and what other programs took of the cores meanwhile."""
    with tempfile.TemporaryDirectory(prefix="lab-times-") as root:
        begun_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "stagewright", *words, "--root", root],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, text = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.communicate()
            return {"seconds": None, "error": f"not done after {limit_s:.0f} s"}
        seconds = time.monotonic() - begun_s
        if process.returncode:
            return {"seconds": None, "error": text.strip().splitlines()[-1] if text.strip() else "failed"}
        folder = StudyFolder.open(next(Path(root).iterdir()))
        study = load_study_of_folder(folder)
        parts = [saved for part in study.parts if (saved := folder.part(part.name))]
        return {"seconds": seconds, "other_load": other_load(parts, tuple(study.options.get("devices") or ()))}


class _NotRunError(Exception):
    """A study as far as its command gets before the first part."""

    def __init__(self, study: Study) -> None:
        super().__init__(study.name)
        self.study = study


def read_study(words: Sequence[str]) -> Study:
    """Return the study that a command would run."""

    def stop(_root: Any, study: Study, **_: Any) -> Any:
        raise _NotRunError(study)

    with (
        tempfile.TemporaryDirectory() as root,
        mock.patch.object(StudyFolder, "create", stop),
        mock.patch.object(sys, "argv", ["stagewright", *words, "--restart", "--root", root]),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            stagewright.cli.main()
        except _NotRunError as end:
            return end.study
    raise RuntimeError(f"{' '.join(words)} did not begin")


def part_seconds(folders: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Return the time of each part of each study."""
    found: dict[str, dict[str, float]] = {}
    for path in folders:
        folder = StudyFolder.open(path)
        study = load_study_of_folder(folder)
        parts = {part.name: folder.part(part.name) for part in study.parts}
        found[study.name] = {name: float(saved["seconds"]) for name, saved in parts.items() if saved}
    return found


def estimate(study: Study, seconds: Mapping[str, float]) -> float | None:
    """Return the time of a study's parts, from the measured ones; None if there is a kind that was not measured."""
    kinds: dict[str, list[float]] = {}
    for name, value in seconds.items():
        kinds.setdefault(name.partition("-")[0], []).append(value)
    total = 0.0
    for part in study.parts:
        kind = part.name.partition("-")[0]
        if part.name not in seconds and kind not in kinds:
            return None
        total += seconds.get(part.name) or statistics.mean(kinds[kind])
    return total


def estimate_all(folders: Sequence[Path], done: Collection[str]) -> list[dict[str, Any]]:
    """Return a row for each command that was not timed and can be estimated."""
    measured, rows = part_seconds(folders), []
    for command in read_commands():
        words = quick_words(command, has_data=False)
        if command in done or words is None or words[1] not in measured:
            continue
        seconds = estimate(read_study(words), measured[words[1]])
        if seconds is not None:
            rows.append({"command": command, "words": " ".join(words), "seconds": seconds, "is_estimate": True})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=900.0)
    parser.add_argument("--estimate", type=Path, nargs="+", metavar="FOLDER", help="folders of quick studies")
    options = parser.parse_args()
    rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"] if options.output.exists() else []
    done = {row["command"] for row in rows if row["seconds"] is not None and not row.get("is_estimate")}
    rows = [row for row in rows if row["command"] in done]
    if options.estimate:
        about = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
        rows += estimate_all(options.estimate, done)
        about = {"command": command_of(sys.argv), "machine": machine_text(), "begun": "", **about, "rows": rows}
        options.output.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    for command in read_commands():
        words = quick_words(command, has_data="STAGEWRIGHT_DATA" in os.environ)
        if command in done or words is None:
            continue
        rows.append({"command": command, "words": " ".join(words), **run(words, options.limit_s)})
        print(rows[-1], flush=True)
        write_record(options.output, {"rows": rows})


if __name__ == "__main__":
    main()
