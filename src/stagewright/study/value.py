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
    from stagewright.plan.value import Plan

__all__ = ["Answer", "Bench", "Drawing", "Findings", "Part", "Results", "Study", "Table"]

_NAME = re.compile(r"[a-z0-9][a-z0-9.+_-]*")


@dataclass(frozen=True, slots=True)
class Results(Mapping[str, Any]):
    """The data of the parts that are done, by name; parts that failed have a reason instead."""

    # What each part returned.
    data: Mapping[str, Any] = field(default_factory=dict)
    # Why a part has no data.
    failures: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where a part works."""

    # The study's folder.
    folder: Path
    # The data of the parts before it.
    results: Results
    # Shows what goes on.
    tell: Callable[[str], None] = lambda text: None

    @property
    def runs(self) -> Path:
        """Where run folders go."""
        return self.folder / "runs"

    def run(self, plan: Plan) -> dict[str, Any]:
        """Run a plan, proven equal to serial; its result, with `run` as a path inside the study's folder."""
        from stagewright.engine.compare import run_plan

        row = run_plan(plan, self.runs, progress=self.tell)
        row["run"] = Path(row["run"]).relative_to(self.folder).as_posix()
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of a study's work, saved as soon as it is done."""

    # Names its file, parts/NAME.json: lower-case letters, digits, . + - _
    name: str
    # Does the work; returns data that JSON can hold.
    run: Callable[[Bench], Any]
    # What it does, for people.
    about: str
    # Parts whose data it reads; where one of them failed, this one is left out.
    needs: tuple[str, ...] = ()
    # What it takes, about, on cores like those that the pages' figures are from; 0: nothing to speak of, or not known.
    expected_s: float = 0.0

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), f"{self.name!r} can't name a part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as people read it; the numbers behind it are in the parts."""

    # What it shows.
    title: str
    # Names of its columns.
    columns: tuple[str, ...]
    # Its cells, as text.
    rows: tuple[tuple[str, ...], ...]
    # What a reader must know; below it.
    note: str = ""

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

    # The question.
    question: str
    # Whole sentences, each with its numbers.
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"question": self.question, "sentences": list(self.sentences)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure that can be drawn."""

    # Names its files: figures/NAME.svg and .png.
    name: str
    # What it shows.
    caption: str
    # Draws it into a file, by the file's suffix.
    draw: Callable[[Path], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a study concludes."""

    # In the order in which they are shown.
    tables: tuple[Table, ...] = ()
    # One for each question.
    answers: tuple[Answer, ...] = ()
    # Figures.
    drawings: tuple[Drawing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study with its options chosen."""

    # stages, strategies, codecs, memory or fabric.
    name: str
    # One line: what is studied on what.
    title: str
    # What was asked for, as JSON has it; two studies with the same options are the same.
    options: Mapping[str, Any]
    # What it is to answer.
    questions: tuple[str, ...]
    # Its work, in order; a part comes after those that it needs.
    parts: tuple[Part, ...]
    # From what the parts found to what is concluded; pure.
    conclude: Callable[[Results], Findings]

    def __post_init__(self) -> None:
        before: set[str] = set()
        for part in self.parts:
            assert part.name not in before, f"two parts are called {part.name!r}"
            assert before.issuperset(part.needs), f"{part.name!r} needs {part.needs}, which do not all come before it"
            before.add(part.name)
