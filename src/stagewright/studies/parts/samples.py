"""The samples that a study trains and evaluates on: all of a task, or a class-balanced subset in the study's folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.studies.framework.study import Part, PartContext
from stagewright.zoo import tasks

if TYPE_CHECKING:
    from numpy.typing import NDArray


_DIGITS = (1437, 360)
"""Training and evaluation samples of the embedded digits."""


def samples_part(task: str, data: str | None, num_train: int | None, num_judged: int | None) -> Part:
    """Build the part `data-TASK`: it selects the samples."""

    def run(context: PartContext) -> dict[str, Any]:
        return select_samples(task, data, context.folder / "samples", num_train, num_judged)

    return Part(name=f"data-{task}", about=f"select the samples of {task}", run=run)


def select_samples(
    task: str, data: str | None, folder: Path, num_train: int | None, num_judged: int | None
) -> dict[str, Any]:
    """Write a class-balanced subset of a task as parquet files below `folder`; return the sample counts.

    Nothing is written where all samples are used; the embedded digits are always used whole.
    """
    from stagewright.zoo.tasks import dataset_files

    entry = tasks.entry(task)
    if not entry.folder:
        train, judged = _DIGITS if task == "digits" else (None, None)
        return {"kept": False, "train": train, "judged": judged, "of": None}
    is_subset = num_train is not None or num_judged is not None
    counts, sizes = [], []
    for split, wanted in zip(entry.splits, (num_train, num_judged), strict=True):
        rows = dataset_files.read(entry, split, Path(str(data)))
        sizes.append(rows.num_rows)
        counts.append(min(rows.num_rows, wanted or rows.num_rows))
        if is_subset:
            from pyarrow import parquet

            chosen = rows.take(sorted(_round_robin(rows.column("label").to_numpy())[: counts[-1]]))
            target = folder / entry.folder
            target.mkdir(parents=True, exist_ok=True)
            parquet.write_table(chosen, target / f"{split}-00000-of-00001.parquet")
    return {"kept": is_subset, "train": counts[0], "judged": counts[1], "of": sizes}


def samples_folder(data: str | None, task: str, context: PartContext) -> str | None:
    """Return the folder from which a part reads a task: the subset in the study's folder, or the whole data."""
    return str((context.folder / "samples").resolve()) if context.results[f"data-{task}"]["kept"] else data


def _round_robin(labels: NDArray[Any]) -> list[int]:
    """Order the indices of samples so that classes alternate as long as they have samples."""
    import numpy as np

    rank_in_class = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        rank_in_class[members] = np.arange(len(members))
    return np.argsort(rank_in_class, kind="stable").tolist()  # type: ignore[no-any-return]
