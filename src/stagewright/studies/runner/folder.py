"""The folder of a study: what it was asked, what its parts found, what it concludes.

    studies/2026-11-15-031502-stages-deit-small/
      study.json          options, command, environment, begun, ended, status
      parts/NAME.json     each part's data, or why there is none; written as soon as the part ends
      runs/…              run folders of everything that really ran
      table.md  answers.md  figures/NAME.svg, NAME.png  report.html       written at the end

`status` is running until all parts have been tried, then done or incomplete. A folder that still says running and that
no process holds was interrupted: the same study goes on there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.files.atomic import save_text
from stagewright.studies.framework.study import Results, Study

__all__ = ["StudyFolder", "as_json"]


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """One study's folder."""

    path: Path
    """Where it is."""

    @classmethod
    def create(cls, root: str | Path, study: Study, *, command: str, environment: Mapping[str, Any]) -> StudyFolder:
        """A new folder under `root`, named by time, study and model."""
        begun = datetime.now().astimezone()
        model = re.sub(r"[^A-Za-z0-9._]+", "-", str(study.options.get("model", ""))).strip("-._")[-40:]
        name = "-".join(word for word in (begun.strftime("%Y-%m-%d-%H%M%S"), study.name, model) if word)
        path = Path(root) / name
        try:
            while True:
                try:
                    path.mkdir(parents=True)
                    break
                except FileExistsError:
                    path = path.with_name(f"{name}-{secrets.token_hex(2)}")
            for inner in ("parts", "runs", "figures"):
                (path / inner).mkdir()
        except OSError as error:
            raise UsageError(
                f"can't create a study's folder in {root}: {error.strerror}; choose another --root"
            ) from None
        folder = cls(path)
        folder._write(
            {
                "study": study.name,
                "title": study.title,
                "options": dict(study.options),
                "questions": list(study.questions),
                "command": command,
                "begun": begun.isoformat(timespec="seconds"),
                "ended": None,
                "status": "running",
                "environment": dict(environment),
            }
        )
        return folder

    @classmethod
    def open(cls, path: str | Path) -> StudyFolder:
        """The folder of a study that exists."""
        folder = cls(Path(path))
        if not (folder.path / "study.json").is_file():
            raise UsageError(
                f"{path} is not a study's folder: it has no study.json; name one below studies/, or leave --resume out "
                "to begin a study"
            )
        folder.about()
        return folder

    @classmethod
    def unfinished(cls, root: str | Path, study: Study) -> StudyFolder | None:
        """The newest folder under `root` where the same study was interrupted; None: there is none."""
        root = Path(root)
        wanted = as_json(study.options)
        for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
            if not (path / "study.json").is_file():
                continue
            folder = cls(path)
            try:
                about = folder.about()
            except UsageError:
                continue  # of something else, or broken: never in the way of a new study
            same = about.get("study") == study.name and as_json(about.get("options")) == wanted
            if same and about.get("status") == "running" and not folder.is_held():
                return folder
        return None

    def about(self) -> dict[str, Any]:
        """What study.json says."""
        path = self.path / "study.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"can't read {path}: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}") from None
        if not isinstance(content, dict) or "study" not in content or "options" not in content:
            raise UsageError(f"{path} is not of a study: it has no study and options")
        return content

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While this process works here; another one is refused."""
        with open(self.path / "lock", "w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another process works on the study in {self.path}: wait for it to end") from None
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def is_held(self) -> bool:
        """Whether a process works here."""
        try:
            with self.held():
                return False
        except UsageError:
            return True

    def resumed(self, command: str) -> None:
        """Going on: the study runs again."""
        self._write({**self.about(), "command": command, "ended": None, "status": "running"})

    def ended(self, status: str) -> None:
        """All parts have been tried."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._write({**self.about(), "ended": now, "status": status})

    def save_part(self, name: str, *, seconds: float, data: Any = None, error: str | None = None) -> None:
        """What a part found, or why it found nothing; on the disk at once and whole."""
        about: dict[str, Any] = {"part": name, "seconds": seconds}
        content = {**about, "data": data} if error is None else {**about, "error": error}
        save_text(as_json(content), self.path / "parts" / f"{name}.json")

    def part(self, name: str) -> dict[str, Any] | None:
        """What was saved of a part; None where nothing was, or where it can't be read: then it is made again."""
        try:
            content = json.loads((self.path / "parts" / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) and ("data" in content or "error" in content) else None

    def results(self, study: Study) -> Results:
        """What all of a study's parts found so far."""
        data, failures = {}, {}
        for part in study.parts:
            saved = self.part(part.name)
            if saved is not None and "data" in saved:
                data[part.name] = saved["data"]
            elif saved is not None:
                failures[part.name] = str(saved["error"])
        return Results(data, failures)

    def _write(self, about: Mapping[str, Any]) -> None:
        save_text(as_json(about), self.path / "study.json")


def as_json(content: Any) -> str:
    """As files have it; refuses numbers that are none, which JSON can't hold."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
