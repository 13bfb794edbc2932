"""Run the missing parts of a study in order, then conclude from all results.

for each part:  saved already? ─► next      needs a failed part? ─► skipped, with that reason
                run ─► parts/NAME.json      raises ─► the reason is saved, and the next part runs
                                            Ctrl-C, SIGTERM ─► the study is interrupted, and can be resumed
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stagewright.engine.launch.termination import sigterm_raises
from stagewright.errors import RunTerminated, StagewrightError
from stagewright.studies.framework.phrases import percent
from stagewright.studies.framework.rounds import disturbances
from stagewright.studies.framework.study import Answer, Findings, Part, PartContext, Results, Study
from stagewright.studies.framework.tables import table_to_dict
from stagewright.studies.parts.measurements import with_other_load
from stagewright.studies.runner.folder import StudyFolder
from stagewright.studies.runner.neighbors import announced, find_neighbors
from stagewright.studies.runner.other_programs import BUSY, other_load, read_other_cpu_s
from stagewright.studies.runner.write import write_findings, write_page

MISSING = "Which parts failed?"
"""The question whose answer lists the failed parts."""
ALONE = "Were the devices used by this study alone?"
"""Asked only if they were not."""
DISTURBED = "Which measurements were disturbed?"
"""Asked only if some were repeated or left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A study that was run."""

    study: Study
    folder: Path
    results: Results
    findings: Findings
    seconds: dict[str, float]
    """Duration of each part, including parts of earlier attempts."""

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
            "summary": None if self.findings.summary is None else self.findings.summary.to_dict(),
            "tables": [table_to_dict(table) for table in self.findings.tables],
            "answers": [answer.to_dict() for answer in self.findings.answers],
            "figures": [f"figures/{figure.name}.svg" for figure in self.findings.figures],
            "data": dict(self.results),
        }


def run_study(
    study: Study,
    folder: StudyFolder,
    *,
    note: Callable[[Part, str], None] = lambda part, text: None,
    fresh: bool = False,
) -> Outcome:
    """Run the parts that the folder lacks, and write the findings; `fresh` repeats what is cached for this machine."""
    devices = tuple(study.options.get("devices") or ())
    with folder.held(), announced(folder.path, devices):
        try:
            with sigterm_raises("the study"):
                for part in study.parts:
                    saved = folder.part(part.name)
                    if saved is None or "data" not in saved:
                        _warn_of_neighbors(part, folder, devices, note)
                        _run(part, folder, folder.results(study), note, fresh=fresh)
                results, findings = _conclude(study, folder, devices)
        except (KeyboardInterrupt, RunTerminated):
            folder.ended("interrupted")
            raise
    seconds = {part.name: float((folder.part(part.name) or {"seconds": 0.0})["seconds"]) for part in study.parts}
    return Outcome(study=study, folder=folder.path, results=results, findings=findings, seconds=seconds)


def _conclude(study: Study, folder: StudyFolder, devices: tuple[str, ...]) -> tuple[Results, Findings]:
    """Conclude from all results, and write findings and page."""
    results = folder.results(study)
    load = other_load((saved for part in study.parts if (saved := folder.part(part.name))), devices)
    concluded = study.conclude(with_other_load(results, load))
    findings = _with_disturbances(_with_failures(concluded, study, results), study, results)
    findings = _with_load(_with_neighbors(findings, folder), load)
    write_findings(findings, study, folder, results)
    folder.ended("incomplete" if results.failures else "done")
    write_page(folder.path, study.title)
    return results, findings


def _run(part: Part, folder: StudyFolder, results: Results, note: Callable[[Part, str], None], *, fresh: bool) -> None:
    missing = [name for name in part.needs if name not in results]
    if missing:
        folder.save_part(part.name, seconds=0.0, error=f"skipped: it needs {missing[0]}, which failed")
        return
    note(part, part.about)
    start, others_s = time.monotonic(), read_other_cpu_s()
    try:
        context = PartContext(folder=folder.path, results=results, note=lambda text: note(part, text), fresh=fresh)
        data = part.run(context)
        seconds, now_s = time.monotonic() - start, read_other_cpu_s()
        used_s = None if others_s is None or now_s is None else max(0.0, now_s - others_s)
        folder.save_part(part.name, seconds=seconds, data=data, other_cpu_s=used_s)
    except RunTerminated:
        raise
    except StagewrightError as error:
        reason = str(error)
    except Exception as error:  # any library's error: the other parts must still run
        reason = f"{type(error).__name__}: {error}"
    else:
        return
    folder.save_part(part.name, seconds=time.monotonic() - start, error=reason)
    note(part, f"failed: {reason.splitlines()[0]}")


def _warn_of_neighbors(
    part: Part, folder: StudyFolder, devices: tuple[str, ...], note: Callable[[Part, str], None]
) -> None:
    """Say once which other study times the same devices, and record it."""
    known = folder.about().get("neighbors") or []
    new = [other for other in find_neighbors(folder.path, devices) if other not in known]
    for other in new:
        note(part, f"warning: another study is timing the same devices, so both are slower: {other}")
    if new:
        folder.record_neighbors([*known, *new])


def _with_neighbors(findings: Findings, folder: StudyFolder) -> Findings:
    """Add an answer if another study timed the same devices meanwhile."""
    others = [Path(other).name for other in folder.about().get("neighbors") or []]
    if not others:
        return findings
    sentence = (
        f"No: {', '.join(others)} timed the same devices meanwhile. Times and speed-ups are of a shared machine: run "
        "this study again by itself (--restart)."
    )
    return replace(findings, answers=(Answer(question=ALONE, sentences=(sentence,)), *findings.answers))


def _with_load(findings: Findings, load: float | None) -> Findings:
    """Say at the top of the summary that other programs used the cores."""
    if load is None or load <= BUSY or findings.summary is None:
        return findings
    caution = (
        f"Other programs took {percent(load)} of the cores' time while this ran. What follows from times (speed-ups, "
        "what limits them, what is faster) is of a busy machine and may change; accuracy, bytes and memory do not. For "
        "the times, run it again on a quiet machine (--restart)."
    )
    return replace(findings, summary=replace(findings.summary, caution=caution))


def _with_disturbances(findings: Findings, study: Study, results: Results) -> Findings:
    """Add an answer if measurements were repeated or left out."""
    sentences = tuple(disturbances(results, {part.name: part.about for part in study.parts}))
    if not sentences:
        return findings
    return replace(findings, answers=(*findings.answers, Answer(question=DISTURBED, sentences=sentences)))


def _with_failures(findings: Findings, study: Study, results: Results) -> Findings:
    """Add an answer that lists the failed parts and their reasons."""
    if not results.failures:
        return findings
    about = {part.name: part.about for part in study.parts}
    sentences = tuple(
        f"{about[name]} ({name}): {(reason.splitlines() or ['no reason was given'])[0]}."
        for name, reason in results.failures.items()
    )
    return replace(findings, answers=(*findings.answers, Answer(question=MISSING, sentences=sentences)))
