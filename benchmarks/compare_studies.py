"""Compare what two runs of a study conclude: the same, or one of them says that it can't be told.

    python benchmarks/compare_studies.py studies/FIRST studies/SECOND [--output FILE]

A contradiction exits with 3. For each folder, `study.json` and `parts/` are read; conclusions are drawn anew from them.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from record import write_record
from stagewright.errors import StagewrightError, UsageError
from stagewright.studies.framework.study import Results, Study
from stagewright.studies.parts.measurements import with_other_load
from stagewright.studies.runner.folder import StudyFolder
from stagewright.studies.runner.load import load_study_of_folder
from stagewright.studies.runner.other_programs import other_load
from study_conclusions.conclusion import Comparison, Conclusions, compare
from study_conclusions.judged import conclude_codecs, conclude_fabric
from study_conclusions.timed import conclude_memory, conclude_stages, conclude_strategies

CONTRADICTION = 3
"""Exit status."""
_CONCLUDE: Mapping[str, Callable[[Results, Mapping[str, Any]], Conclusions]] = {
    "stages": conclude_stages,
    "strategies": conclude_strategies,
    "codecs": conclude_codecs,
    "memory": conclude_memory,
    "fabric": conclude_fabric,
}


def read_conclusions(path: Path) -> tuple[Study, Conclusions, float | None]:
    """Return the study of a folder, what it concludes, and the share of the cores' time that other programs took."""
    folder = StudyFolder.open(path)
    study = load_study_of_folder(folder)
    parts = [saved for part in study.parts if (saved := folder.part(part.name))]
    load = other_load(parts, tuple(study.options.get("devices") or ()))
    results = with_other_load(folder.results(study), load)
    # What `conclude` is given: the options, and what follows from them.
    options: Mapping[str, Any] = study.conclude.args[0]  # type: ignore[attr-defined]
    return study, _CONCLUDE[study.name](results, options), load


def compare_folders(first: Path, second: Path) -> tuple[list[Comparison], list[float | None]]:
    """Compare two folders of the same study with the same options."""
    (study, conclusions, load), (other_study, other_conclusions, other) = map(read_conclusions, (first, second))
    if study.name != other_study.name:
        raise UsageError(f"{first} is a study of {study.name}, {second} one of {other_study.name}: compare two of one")
    different = [
        name
        for name in dict.fromkeys((*study.options, *other_study.options))
        if study.options.get(name) != other_study.options.get(name)
    ]
    if different:
        raise UsageError(f"{first} and {second} have different options: {', '.join(different)}; compare equal ones")
    return list(compare(conclusions, other_conclusions)), [load, other]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--output", type=Path, help="write the comparisons as JSON")
    parser.add_argument("--all", action="store_true", help="also list what neither can tell")
    options = parser.parse_args()
    try:
        comparisons, loads = compare_folders(options.first, options.second)
    except StagewrightError as error:
        print(error, file=sys.stderr)
        return 2
    shown = " and ".join("unknown" if load is None else f"{load:.0%}" for load in loads)
    print(f"CPU time of other programs: {shown}")
    shown_rows = [row for row in comparisons if options.all or row.outcome != "neither can tell"]
    for row in sorted(shown_rows, key=lambda row: row.outcome):
        print(f"{row.outcome:17} {row.subject}: {row.first or 'can’t tell'} | {row.second or 'can’t tell'}")
    counts = Counter(row.outcome for row in comparisons)
    print(", ".join(f"{outcome}: {count}" for outcome, count in sorted(counts.items())))
    if options.output is not None:
        rows = [
            {"subject": row.subject, "first": row.first, "second": row.second, "outcome": row.outcome}
            for row in comparisons
        ]
        figures = {"study": read_conclusions(options.first)[0].name, "other_load": loads, "counts": dict(counts)}
        write_record(options.output, {**figures, "comparisons": rows})
    return CONTRADICTION if counts["contradiction"] else 0


if __name__ == "__main__":
    sys.exit(main())
