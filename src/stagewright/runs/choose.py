"""Choose a run by what a person types: nothing (the newest), a path, or the beginning of a name.

stagewright trace                     the newest run in runs/
stagewright trace 2026-11-15-03       the only run in runs/ whose name begins so
"""

from __future__ import annotations

from pathlib import Path

from stagewright.errors import UsageError
from stagewright.runs.run_folder import RunFolder, list_runs

DEFAULT_ROOT = Path("runs")
_SHOWN = 3


def newest_run(root: str | Path = DEFAULT_ROOT) -> Path:
    """Return the newest run in a folder."""
    names = list_runs(Path(root))
    if not names:
        raise UsageError(f"there are no runs in {root}; create some: stagewright compare mlp-mnist --devices 2")
    return Path(root) / names[0]


def choose_run(typed: str | Path | None = None, root: str | Path = DEFAULT_ROOT) -> Path:
    """Return the run that was meant: the newest for None, a path, or the one run whose name begins with `typed`."""
    if typed is None:
        return newest_run(root)
    path = Path(typed)
    if path.exists():
        return path
    folders = dict.fromkeys((path.parent, Path(root)) if path.name == str(typed) else (path.parent,))
    for folder in folders:
        names = [name for name in list_runs(folder) if name.startswith(path.name)]
        if len(names) == 1:
            return folder / names[0]
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise UsageError(
                f"{typed} begins the names of {len(names)} runs: {', '.join(names[:_SHOWN])}{more}; type more"
            )
    in_root = Path(root) / path
    RunFolder.open(in_root if path.name == str(typed) and Path(root).is_dir() else path)  # names the nearest run
    return path
