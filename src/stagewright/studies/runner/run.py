"""Run a study: the parts that are missing, one after the other, then what is concluded from all of them.

for each part:  saved already? ─► next      needs one that failed? ─► left out, with that reason
                run ─► parts/NAME.json      raises ─► its reason is saved, the next part runs
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stagewright.errors import StagewrightError
from stagewright.studies.runner.folder import StudyFolder
from stagewright.studies.runner.page import write_page
from stagewright.studies.runner.write import write_findings
from stagewright.studies.framework.study import Answer, Bench, Findings, Part, Results, Study

__all__ = ["MISSING", "Outcome", "run_study"]

MISSING = "What is missing?"
"""The question under which answers say what failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a study."""

    study: Study
    """The study."""
    folder: Path
    """Its folder."""
    results: Results
    """What its parts found."""
    findings: Findings
    """What is concluded."""
    seconds: dict[str, float]
    """Seconds that each part took, those of earlier attempts too."""

    @property
    def is_complete(self) -> bool:
        """Whether no part failed."""
        return not self.results.failures

    def to_dict(self) -> dict[str, Any]:
        return {
            "study": self.study.name,
            "title": self.study.title,
            "folder": str(self.folder),
            "options": dict(self.study.options),
            "status": "done" if self.is_complete else "incomplete",
            "parts": [
                {
                    "name": part.name,
                    "about": part.about,
                    "seconds": self.seconds[part.name],
                    "error": self.results.failures.get(part.name),
                }
                for part in self.study.parts
            ],
            "tables": [table.to_dict() for table in self.findings.tables],
            "answers": [answer.to_dict() for answer in self.findings.answers],
            "figures": [f"figures/{one.name}.svg" for one in self.findings.drawings],
            "data": dict(self.results),
        }


def run_study(
    study: Study, folder: StudyFolder, *, tell: Callable[[Part, str], None] = lambda part, text: None
) -> Outcome:
    """Run the parts of a study that its folder does not have, and write what is concluded."""
    with folder.held():
        for part in study.parts:
            saved = folder.part(part.name)
            if saved is None or "data" not in saved:
                _run(part, folder, folder.results(study), tell)
        results = folder.results(study)
        findings = _with_missing(study.conclude(results), study, results)
        write_findings(findings, study, folder)
        folder.ended("incomplete" if results.failures else "done")
        write_page(folder.path, study.title)
    seconds = {part.name: float((folder.part(part.name) or {"seconds": 0.0})["seconds"]) for part in study.parts}
    return Outcome(study=study, folder=folder.path, results=results, findings=findings, seconds=seconds)


def _run(part: Part, folder: StudyFolder, results: Results, tell: Callable[[Part, str], None]) -> None:
    lacking = [name for name in part.needs if name not in results]
    if lacking:
        folder.save_part(part.name, seconds=0.0, error=f"left out: it needs {lacking[0]}, which failed")
        return
    tell(part, part.about)
    start = time.monotonic()
    try:
        data = part.run(Bench(folder=folder.path, results=results, tell=lambda text: tell(part, text)))
        folder.save_part(part.name, seconds=time.monotonic() - start, data=data)
    except StagewrightError as error:
        reason = str(error)
    except Exception as error:  # whatever a library raises: the other parts are worth having
        reason = f"{type(error).__name__}: {error}"
    else:
        return
    folder.save_part(part.name, seconds=time.monotonic() - start, error=reason)
    tell(part, f"failed: {reason.splitlines()[0]}")


def _with_missing(findings: Findings, study: Study, results: Results) -> Findings:
    """The findings; where parts failed, with an answer that says which and why."""
    if not results.failures:
        return findings
    about = {part.name: part.about for part in study.parts}
    sentences = tuple(
        f"{about[name]} ({name}): {(reason.splitlines() or ['no reason was given'])[0]}."
        for name, reason in results.failures.items()
    )
    return replace(findings, answers=(*findings.answers, Answer(question=MISSING, sentences=sentences)))
