"""The folder of a study: its options, the data of its parts, its findings.

    studies/2026-11-15-031502-stages-deit-small/
      study.json          options, command, environment, begun, ended, status
      parts/NAME.json     each part's data or error; written as soon as the part ends
      runs/…              a run folder for every plan that was run
      left-out/…          runs that were repeated
      answers.md  table.md  findings.json  figures/NAME.svg, NAME.png  report.html       written at the end

`status` is running until every part has run or failed, then done or incomplete; interrupted after Ctrl-C or SIGTERM. A
folder whose status is running and which no process has locked was interrupted too: the same study continues there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.files.atomic import save_text
from stagewright.files.json_values import read_object, read_object_or_empty
from stagewright.studies.framework.study import Results, Study


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """One study's folder."""

    path: Path

    @classmethod
    def create(cls, root: str | Path, study: Study, *, command: str, environment: Mapping[str, Any]) -> StudyFolder:
        """Create a folder under `root`, named by time, study and model."""
        started = datetime.now().astimezone()
        model = re.sub(r"[^A-Za-z0-9._]+", "-", str(study.options.get("model") or "")).strip("-._")[-40:]
        name = "-".join(word for word in (started.strftime("%Y-%m-%d-%H%M%S"), study.name, model) if word)
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
                "begun": started.isoformat(timespec="seconds"),
                "ended": None,
                "status": "running",
                "environment": dict(environment),
            }
        )
        return folder

    @classmethod
    def open(cls, path: str | Path) -> StudyFolder:
        """Open the folder of an existing study."""
        folder = cls(Path(path))
        if not (folder.path / "study.json").is_file():
            raise UsageError(
                f"{path} is not a study's folder: it has no study.json; name one below studies/, or "
                "leave --continue out to start a study"
            )
        folder.about()
        return folder

    @classmethod
    def unfinished(cls, root: str | Path, study: Study) -> StudyFolder | None:
        """Find the newest folder under `root` in which the same study was interrupted."""
        root = Path(root)
        wanted = json.loads(as_json(study.options))
        for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
            if not (path / "study.json").is_file():
                continue
            folder = cls(path)
            try:
                about = folder.about()
            except UsageError:
                continue  # unreadable, or not a study: it must not prevent a new one
            is_same = about.get("study") == study.name and about.get("options") == wanted
            if is_same and about.get("status") in ("running", "interrupted") and not folder.is_held():
                return folder
        return None

    def about(self) -> dict[str, Any]:
        """Read study.json."""
        path = self.path / "study.json"
        try:
            content = read_object(path)
        except FileNotFoundError as error:
            raise UsageError(f"can't read {path}: {error.strerror}") from None
        if "study" not in content or "options" not in content:
            raise UsageError(f"{path} does not describe a study: it has no study and options")
        return content

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder for this process; UsageError if another process holds it."""
        with open(self.path / "lock", "w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another process is running the study in {self.path}: wait for it to end") from None
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def is_held(self) -> bool:
        """Whether a process has locked the folder."""
        try:
            with self.held():
                return False
        except UsageError:
            return True

    def resumed(self, command: str) -> None:
        """Mark the study as running again."""
        self._write({**self.about(), "command": command, "ended": None, "status": "running"})

    def ended(self, status: str) -> None:
        """Record that every part has run or failed, or that the study was interrupted."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._write({**self.about(), "ended": now, "status": status})

    def record_neighbors(self, folders: Sequence[str]) -> None:
        """Record the folders of other studies that timed the same devices."""
        self._write({**self.about(), "neighbors": list(folders)})

    def save_part(
        self, name: str, *, seconds: float, data: Any = None, error: str | None = None, other_cpu_s: float | None = None
    ) -> None:
        """Save the data or the error of a part, atomically; `other_cpu_s`: what other programs used meanwhile."""
        about: dict[str, Any] = {"part": name, "seconds": seconds, "other_cpu_s": other_cpu_s}
        content = {**about, "data": data} if error is None else {**about, "error": error}
        save_text(as_json(content), self.path / "parts" / f"{name}.json")

    def part(self, name: str) -> dict[str, Any] | None:
        """Read a saved part; None if it is missing or unreadable, and must run again."""
        content = read_object_or_empty(self.path / "parts" / f"{name}.json")
        return content if "data" in content or "error" in content else None

    def results(self, study: Study) -> Results:
        """Read the results of all parts so far."""
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
    """Write JSON as the files of a study have it; ValueError for NaN and infinity."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
