"""Read damaged files, messages and requests; count those that end in something other than a clear error.

    python benchmarks/damaged_input.py --output damaged_input.json
    python benchmarks/damaged_input.py --only plan,codec --cases 100000

The targets and cases are those of tests/fuzz: 10,000 seeded cases a target, fewer where one takes long. Goal: none
wrong, none over 3 s or 200 MiB.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from record import write_record

TESTS = Path(__file__).resolve().parents[1] / "tests"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--only", default="", help="targets, with commas")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from fuzz.read_variants import ALL_TARGETS, fuzz

    rows = []
    for make in ALL_TARGETS:
        if options.only and make.__name__ not in options.only.split(","):
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcome = fuzz(make, Path(folder), options.cases, whole=True)
        rows.append(asdict(outcome))
        print(
            f"{outcome.name:12} {outcome.num_cases:6} cases, {outcome.num_wrong} wrong, "
            f"slowest {outcome.slowest_s:.2f} s, {outcome.grown_bytes / 2**20:.0f} MiB, {outcome.total_s:.0f} s in all",
            *(f"\n    {where}: {case}" for where, case in outcome.wrong.items()),
            flush=True,
        )
        if options.output is not None:
            write_record(options.output, {"rows": rows})


if __name__ == "__main__":
    main()
