"""What a study is made of, as plain values: its parts, what came of them, and what is concluded from that.

Study ── parts ──► Results ── conclude ──► Findings (tables, answers, drawings)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagewright.spec.plan import Plan

__all__ = ["Answer", "Bench", "Drawing", "Findings", "Part", "Results", "Study", "Table"]

_NAME = re.compile(r"[a-z0-9][a-z0-9.+_-]*")


@dataclass(frozen=True, slots=True)
class Results(Mapping[str, Any]):
    """The data of the parts that are done, by name; parts that failed have a reason instead."""

    data: Mapping[str, Any] = field(default_factory=dict)
    """What each part returned."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Why a part has no data."""

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where a part works."""

    folder: Path
    """The study's folder."""
    results: Results
    """The data of the parts before it."""
    tell: Callable[[str], None] = lambda text: None
    """Shows what goes on."""

    @property
    def runs(self) -> Path:
        """Where run folders go."""
        return self.folder / "runs"

    def run(self, plan: Plan) -> dict[str, Any]:
        """Run a plan, proven equal to serial; its result, with `run` as a path inside the study's folder."""
        from stagewright.engine.jobs.compare import run_plan

        row = run_plan(plan, self.runs, progress=self.tell)
        row["run"] = Path(row["run"]).relative_to(self.folder).as_posix()
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of a study's work, saved as soon as it is done."""

    name: str
    """Names its file, parts/NAME.json: lower-case letters, digits, . + - _"""
    run: Callable[[Bench], Any]
    """Does the work; returns data that JSON can hold."""
    about: str
    """What it does, for people."""
    needs: tuple[str, ...] = ()
    """Parts whose data it reads; where one of them failed, this one is left out."""
    expected_s: float = 0.0
    """What it takes, about, on cores like those that the pages' figures are from; 0: nothing to speak of, or not known.
    """

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), f"{self.name!r} can't name a part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as people read it; the numbers behind it are in the parts."""

    title: str
    """What it shows."""
    columns: tuple[str, ...]
    """Names of its columns."""
    rows: tuple[tuple[str, ...], ...]
    """Its cells, as text."""
    note: str = ""
    """What a reader must know; below it."""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question and what was measured about it, in sentences."""

    question: str
    """The question."""
    sentences: tuple[str, ...]
    """Whole sentences, each with its numbers."""

    def to_dict(self) -> dict[str, Any]:
        return {"question": self.question, "sentences": list(self.sentences)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure that can be drawn."""

    name: str
    """Names its files: figures/NAME.svg and .png."""
    caption: str
    """What it shows."""
    draw: Callable[[Path], object]
    """Draws it into a file, by the file's suffix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a study concludes."""

    tables: tuple[Table, ...] = ()
    """In the order in which they are shown."""
    answers: tuple[Answer, ...] = ()
    """One for each question."""
    drawings: tuple[Drawing, ...] = ()
    """Figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study with its options chosen."""

    name: str
    """stages, strategies, codecs, memory or fabric."""
    title: str
    """One line: what is studied on what."""
    options: Mapping[str, Any]
    """What was asked for, as JSON has it; two studies with the same options are the same."""
    questions: tuple[str, ...]
    """What it is to answer."""
    parts: tuple[Part, ...]
    """Its work, in order; a part comes after those that it needs."""
    conclude: Callable[[Results], Findings]
    """From what the parts found to what is concluded; pure."""

    def __post_init__(self) -> None:
        before: set[str] = set()
        for part in self.parts:
            assert part.name not in before, f"two parts are called {part.name!r}"
            assert before.issuperset(part.needs), f"{part.name!r} needs {part.needs}, which do not all come before it"
            before.add(part.name)
