"""Time each command of the lab pages with --quick: how long a question takes to answer.

    STAGEWRIGHT_DATA=DATA python benchmarks/lab_times.py --output FILE      as root, for the study of the fabric

Commands are read from the tables of docs/studies/*.md. One that needs data is skipped without STAGEWRIGHT_DATA; one
that takes longer than --limit-s is ended, and has no time. A command that is in FILE already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import write_record
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=900.0)
    options = parser.parse_args()
    rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"] if options.output.exists() else []
    done = {row["command"] for row in rows if row["seconds"] is not None}
    rows = [row for row in rows if row["command"] in done]
    for command in read_commands():
        words = quick_words(command, has_data="STAGEWRIGHT_DATA" in os.environ)
        if command in done or words is None:
            continue
        rows.append({"command": command, "words": " ".join(words), **run(words, options.limit_s)})
        print(rows[-1], flush=True)
        write_record(options.output, {"rows": rows})


if __name__ == "__main__":
    main()
