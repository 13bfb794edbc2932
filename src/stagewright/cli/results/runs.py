"""``stagewright runs``: list the runs, newest first."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from stagewright.cli.options import Json, Root
from stagewright.cli.screen import note, print_json, print_table
from stagewright.errors import UsageError


def runs(root: Root = Path("runs"), json: Json = False) -> None:
    """List the runs with their results."""
    from stagewright.runs.index import RunIndex

    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file; --root names the folder with the runs in it")
    with RunIndex(root) as index:
        rows = index.rows()
    if json:
        print_json({"root": str(root), "runs": [asdict(row) for row in rows]})
        return
    if not rows:
        note(f"no runs in {root}; start one: stagewright compare mlp-mnist --devices 2")
        return
    from stagewright.report.tables.runs import runs_table

    print_table(runs_table(rows))
    for row in rows:
        if row.status in ("failed", "refused", "damaged") and row.error:
            note(f"{row.name}: {row.error}")
