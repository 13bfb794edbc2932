"""A study as plain values: its parts, their results, and the findings concluded from them.

Study ── parts ──► Results ── conclude ──► Findings (tables, answers, figures)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.cluster.device import num_separate
from stagewright.errors import RunError
from stagewright.studies.framework.repeats import Expectation, measure
from stagewright.table import Table

if TYPE_CHECKING:
    from stagewright.runs.result import RunResult
    from stagewright.spec.plan import Plan

_NAME = re.compile(r"[a-z0-9][a-z0-9.+_-]*")


@dataclass(frozen=True, slots=True)
class Results(Mapping[str, Any]):
    """The data of each finished part by name, and the reason of each failed one."""

    data: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartContext:
    """What a part receives when it runs."""

    folder: Path
    """The study's folder."""
    results: Results
    """Results of the parts before it."""
    note: Callable[[str], None] = lambda text: None
    """Show a line of progress."""
    fresh: bool = False
    """Whether measurements that are cached for this machine are repeated."""

    @property
    def runs(self) -> Path:
        """Parent of the run folders."""
        return self.folder / "runs"

    def run(
        self, plan: Plan, *, baselines: Sequence[str] = (), forecast_rate: float | None = None, for_speed: bool = True
    ) -> dict[str, Any]:
        """Run a plan with its parity check; return its result, with `run` relative to the study's folder.

        A run that is not plausible is repeated (`framework.repeats`): then the result has `repeated`, and its other
        runs are in left-out/.

        Args:
            plan: What to run.
            baselines: Parts with single-device runs of the same round; the fastest is the baseline.
            forecast_rate: Samples/s by forecast.
            for_speed: Whether a run is repeated whose speed is not plausible; False where only its memory counts.
        """
        from stagewright.engine.jobs.compare import run_plan
        from stagewright.runs.run_folder import RunFolder

        def run(chosen: Plan) -> RunResult:
            return run_plan(chosen, self.runs, progress=self.note)

        rows = [row for name in baselines if (row := self.results.get(name)) and row.get("samples_per_s")]
        baseline = max(rows, key=lambda row: float(row["samples_per_s"]), default=None)
        measured = measure(
            partial(run, plan),
            Expectation(
                num_devices=num_separate(plan.devices) or plan.mesh.num_workers,
                baseline_rate=None if baseline is None else baseline["samples_per_s"],
                forecast_rate=forecast_rate,
            )
            if for_speed
            else None,
            run_baseline=None
            if baseline is None
            else lambda: run(RunFolder.open(self.folder / baseline["run"]).plan()),
            note=self.note,
        )
        for other in measured.left_out:
            self._leave_out(Path(str(other.run)))
        row = {**measured.run.to_dict(), "run": Path(str(measured.run.run)).relative_to(self.folder).as_posix()}
        if measured.reason:
            row["repeated"] = {"reason": measured.reason, "samples_per_s": list(measured.rates)}
        if measured.baseline_rate is not None:
            row["baseline_samples_per_s"] = measured.baseline_rate
        return row

    def _leave_out(self, run: Path) -> None:
        """Move a run that does not count out of runs/, so that no page or baseline uses it."""
        (self.folder / "left-out").mkdir(exist_ok=True)
        run.rename(self.folder / "left-out" / run.name)

    def run_or_out_of_memory(self, plan: Plan, *, for_speed: bool = True) -> dict[str, Any]:
        """Run a plan under its memory limit; return its result with `ran`, or `ran` and `text` if memory ran out."""
        try:
            return {"ran": True, **self.run(plan, for_speed=for_speed)}
        except RunError as error:
            text = str(error).splitlines()[0]
            if "out of memory" not in text:
                raise
            return {"ran": False, "text": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of a study's work, saved as soon as it is done."""

    name: str
    """Names its file, parts/NAME.json: lower-case letters, digits, . + - _"""
    run: Callable[[PartContext], Any]
    """Does the work; returns data that JSON can hold."""
    about: str
    """One line for people: what it does."""
    run_name: str = ""
    """Name of its run folder on the page, where `about` does not suit."""
    needs: tuple[str, ...] = ()
    """Parts whose data it reads; it is skipped where one of them failed."""
    expected_s: float = 0.0
    """Approximate duration on the CPU cores of the published studies; 0: negligible or unknown."""

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), f"{self.name!r} can't name a part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question and its answer: whole sentences, each with its numbers."""

    question: str
    sentences: tuple[str, ...]
    tables: tuple[str, ...] = ()
    """Titles of the tables that it was read from; a page shows them next to it."""
    figures: tuple[str, ...] = ()
    """Names of its figures."""

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A study in four sentences, for someone who reads nothing else."""

    measured: str
    ideal: str
    why: str
    """What lies between the two."""
    advice: str
    """What to do."""
    caution: str = ""
    """Why the times are not to be relied on; empty if they are."""

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """Name and text of each."""
        caution = (("Caution", self.caution),) if self.caution else ()
        rows = (("Measured", self.measured), ("Ideal", self.ideal), ("Why", self.why), ("What to do", self.advice))
        return (*caution, *rows)

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def answer_all(
    questions: Iterable[str], replies: Iterable[Iterable[str]], unknown: str = "Unknown: nothing was measured."
) -> tuple[Answer, ...]:
    """Answer each question with the sentences of its reply, or where it has none with `unknown`."""
    pairs = zip(questions, map(tuple, replies), strict=True)
    return tuple(Answer(question=question, sentences=sentences or (unknown,)) for question, sentences in pairs)


def with_evidence(
    answers: Iterable[Answer],
    evidence: Mapping[str, Sequence[str]],
    tables: Sequence[Table],
    figures: Sequence[Figure] = (),
) -> tuple[Answer, ...]:
    """Give each answer its tables and figures: `evidence` has the beginnings of their titles and names by question."""
    return tuple(
        replace(
            answer,
            tables=tuple(table.title for table in tables if table.title.startswith(beginnings)),
            figures=tuple(figure.name for figure in figures if figure.name.startswith(beginnings)),
        )
        for answer in answers
        for beginnings in (tuple(evidence.get(answer.question, ())),)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure and the function that draws it."""

    name: str
    """Names its files: figures/NAME.svg and .png."""
    caption: str
    draw: Callable[[Path], object]
    """Draw into a file, in the format of its suffix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a study concludes."""

    summary: Summary | None = None
    tables: tuple[Table, ...] = ()
    answers: tuple[Answer, ...] = ()
    """One for each question."""
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study with its options chosen."""

    name: str
    """stages, strategies, codecs, memory or fabric."""
    title: str
    """One line: what is studied, and on which model."""
    options: Mapping[str, Any]
    """As JSON holds them; two studies with equal options are the same study."""
    questions: tuple[str, ...]
    parts: tuple[Part, ...]
    """In order: a part comes after those that it needs."""
    conclude: Callable[[Results], Findings]
    """Turn results into findings; pure."""

    def __post_init__(self) -> None:
        earlier: set[str] = set()
        for part in self.parts:
            assert part.name not in earlier, f"two parts are called {part.name!r}"
            assert earlier.issuperset(part.needs), f"{part.name!r} needs {part.needs}, which must all come before it"
            earlier.add(part.name)
