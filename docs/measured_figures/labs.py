"""Blocks of the lab pages: how long their commands take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from measured_figures.markdown import Record, load_record, paragraph, percent, source, table

PAGES = Path(__file__).resolve().parents[1] / "studies"
_COMMAND = re.compile(r"^\|[^|]*\| `(study [^`]*)`", re.MULTILINE)
_BUSY = 0.1
"""Share of the cores' time that other programs took, beyond which it stands beside a time."""


def lab_times() -> str:
    """List each command of the lab pages that was timed."""
    rows = _timed()
    lines = [[f"`{row['words']}`", _shown(row)] for row in rows.values()]
    return (
        source("lab_times")
        + "\n"
        + paragraph(f"The commands of the lab pages with `--quick`.{_note(rows.values())} In full size see each page.")
        + "\n"
        + table(["command", "time"], lines, right=True)
    )


def _of_page(name: str) -> Callable[[], str]:
    """Make the block of one lab page: each of its commands, with or without a time."""

    def make() -> str:
        rows = _timed()
        commands = dict.fromkeys(_COMMAND.findall((PAGES / f"{name}.md").read_text(encoding="utf-8")))
        lines = [
            [f"`{rows[command]['words'] if command in rows else f'{command} --quick'}`", _shown(rows.get(command))]
            for command in commands
        ]
        timed = [rows[command] for command in commands if command in rows]
        missing = " –: not timed." if len(timed) < len(commands) else ""
        machine = load_record("lab_times")["machine"].partition(";")[0]
        note = f"Expected times on {machine} ([record](../measured/lab_times.json)).{_note(timed)}{missing}"
        return paragraph(note) + "\n" + table(["command", "expected time"], lines, right=True)

    make.__name__ = f"lab_times_{name}"
    return make


def study_conclusions() -> str:
    """Compare what each quick study concluded in two runs, one of them beside other programs."""
    outcomes = ("same", "one can't tell", "neither can tell", "contradiction")
    records = [load_record(f"study_conclusions_{name}") for name in STUDIES]
    lines = [
        [
            f"`study {record['study']} --quick`",
            *(str(record["counts"].get(outcome, 0)) for outcome in outcomes),
            " and ".join("unknown" if load is None else percent(load) for load in record["other_load"]),
        ]
        for record in records
    ]
    head = ["study", *outcomes, "CPU time of other programs"]
    return source(*(f"study_conclusions_{name}" for name in STUDIES)) + "\n" + table(head, lines, right=True)


STUDIES = ("stages", "strategies", "codecs", "memory", "fabric")
PAGE_BLOCKS = tuple(_of_page(name) for name in STUDIES)


def _timed() -> dict[str, Record]:
    """The rows of the record that have a time, by command."""
    return {row["command"]: row for row in load_record("lab_times")["rows"] if row["seconds"] is not None}


def _load(row: Record) -> float:
    return float(row.get("other_load") or 0.0)


def _note(rows: Iterable[Record]) -> str:
    """Explain estimates, and the loads in parentheses, if there are any."""
    rows, text = list(rows), ""
    if any(row.get("is_estimate") for row in rows):
        text += " Times are of single runs, read off the shell; about: estimated from their parts."
    if any(_load(row) > _BUSY for row in rows):
        text += " In parentheses the share of the cores' time that other programs took: without them it takes less."
    return text


def _shown(row: Record | None) -> str:
    """Write 95 s as 1 min 35 s, with what other programs took; – without a time."""
    if row is None:
        return "–"
    is_estimate = row.get("is_estimate", False)
    minutes, rest = divmod(round(row["seconds"], -1 if is_estimate else None), 60)
    time = f"{'about ' if is_estimate else ''}{f'{minutes:.0f} min ' if minutes else ''}{rest:.0f} s"
    return f"{time} ({percent(_load(row))})" if _load(row) > _BUSY else time
