"""Find and read a data set: parquet files in the Hugging Face layout, or downloaded with `datasets`.

    STAGEWRIGHT_DATA/cifar10/train-00000-of-00005.parquet …    columns: img {bytes, path}, label
    STAGEWRIGHT_DATA/glue/rte/validation-00000-of-00001.parquet    columns: sentence1, sentence2, label

Images stay encoded in the table; they are decoded when a batch is requested.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from stagewright.errors import DataMissing, UsageError
from stagewright.extras import require
from stagewright.zoo.quiet import quiet_transformers
from stagewright.zoo.sources import network
from stagewright.zoo.sources.weights import first_line
from stagewright.zoo.tasks.catalog import Entry

VARIABLE = "STAGEWRIGHT_DATA"


def read(entry: Entry, split: str, data_dir: Path | None) -> Any:
    """Read a split as a pyarrow table with the entry's columns and `label`, and check the labels."""
    files = find(entry, split, data_dir)
    if files:
        return _checked(entry, split, _read_files(entry, files), str(files[0].parent))
    return _checked(entry, split, _from_hub(entry, split, _root(data_dir)), entry.repository)


def find(entry: Entry, split: str, data_dir: Path | None) -> list[Path]:
    """Return the files of a split, or none if `datasets` can download it; raise DataMissing with a hint otherwise."""
    root = _root(data_dir)
    if root is not None and not root.is_dir():
        option = "--data-dir" if data_dir is not None else VARIABLE
        raise DataMissing(f"{option} is {str(root)!r}, which is not a folder; {download_hint(entry, None)}")
    folders = _candidate_folders(entry, root) if root is not None else []
    for folder in folders:
        files = sorted(folder.glob(f"{split}-*.parquet")) or sorted(folder.glob(f"{split}.parquet"))
        if files:
            _check_complete(entry, split, files)
            return files
    if data_dir is None and importlib.util.find_spec("datasets") is not None:
        return []
    alternative = ", or let it be downloaded after `pip install 'stagewright[data]'`" if data_dir is None else ""
    raise DataMissing(_missing(entry, split, folders) + download_hint(entry, root) + alternative)


def _root(data_dir: Path | None) -> Path | None:
    """Return the folder of data sets: the given one, or that of the environment variable."""
    if data_dir is None and os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser()
    return data_dir


def _candidate_folders(entry: Entry, root: Path) -> list[Path]:
    """Return the folders that may contain the files: the layout above, that of the hub, or the folder itself."""
    folder = root / entry.folder
    return [folder, folder / (entry.configuration or ""), folder / "data", root]


def download_hint(entry: Entry, root: Path | None) -> str:
    """Return the command that downloads the data set."""
    top, _, below = entry.folder.partition("/")
    folder = str(root) if root is not None else "FOLDER"
    include = f" --include '{below}/*'" if below else ""
    return (
        "with network access, download it with "
        f"`hf download {entry.repository} --repo-type dataset{include} --local-dir {folder}/{top}` "
        f"and set {VARIABLE}={folder} (or --data-dir {folder})"
    )


def _missing(entry: Entry, split: str, folders: list[Path]) -> str:
    searched = f"no {split}-*.parquet in {str(folders[0])!r}" if folders else f"{VARIABLE} is not set"
    return f"the data set {entry.name!r} is not on this machine ({searched}); "


def _check_complete(entry: Entry, split: str, files: list[Path]) -> None:
    """Raise DataMissing if the file names say `…-of-00005` and there are fewer."""
    matches = [re.search(r"-of-(\d+)\.parquet$", path.name) for path in files]
    expected = max((int(match.group(1)) for match in matches if match), default=len(files))
    if len(files) != expected:
        raise DataMissing(
            f"the data set {entry.name!r} is incomplete: {str(files[0].parent)!r} has {len(files)} of "
            f"{expected} files of the split {split!r}"
        )


def _read_files(entry: Entry, files: list[Path]) -> Any:
    require("pyarrow", f"the data set {entry.name!r}")
    import pyarrow
    from pyarrow import parquet

    columns = [*entry.columns, "label"]
    tables = []
    for path in files:
        try:
            file = parquet.ParquetFile(path)
            present = file.schema_arrow.names
            if not set(columns) <= set(present):
                raise UsageError(
                    f"{str(path)!r} is not {entry.name!r}: it has the columns {', '.join(present)}, "
                    f"but needs {', '.join(columns)}"
                )
            tables.append(file.read(columns=columns))
        except (pyarrow.ArrowException, OSError) as error:
            raise UsageError(f"{str(path)!r} can't be read as parquet: {first_line(error)}") from error
    return pyarrow.concat_tables(tables)


def _from_hub(entry: Entry, split: str, root: Path | None) -> Any:
    import datasets

    if not network.offline_by_choice() and network.unreachable():
        raise DataMissing(
            f"the data set {entry.name!r} can't be downloaded: the Hugging Face hub can't be reached "
            "(HF_HUB_OFFLINE=1 uses an earlier download); " + download_hint(entry, root)
        )
    try:
        with quiet_transformers():
            dataset = datasets.load_dataset(entry.repository, entry.configuration, split=split)
    except Exception as error:  # anything that the transports of the library raise
        raise DataMissing(
            f"the data set {entry.name!r} can't be downloaded ({first_line(error)}); " + download_hint(entry, root)
        ) from error
    return to_arrow_table(dataset, entry)


def to_arrow_table(dataset: Any, entry: Entry) -> Any:
    """Convert the columns of a `datasets.Dataset` to a pyarrow table, with encoded images."""
    import datasets

    if entry.kind == "image":
        dataset = dataset.cast_column(entry.columns[0], datasets.Image(decode=False))
    return dataset.select_columns([*entry.columns, "label"]).with_format("arrow")[:]


def _checked(entry: Entry, split: str, table: Any, source: str) -> Any:
    labels = table.column("label").to_numpy()
    if len(labels) == 0:
        raise UsageError(f"the split {split!r} of {entry.name!r} in {source!r} is empty")
    assert entry.num_classes is not None
    if labels.min() < 0 or labels.max() >= entry.num_classes:
        raise UsageError(
            f"the split {split!r} of {entry.name!r} in {source!r} has labels from {labels.min()} "
            f"to {labels.max()}, but {entry.name!r} has the classes 0 to {entry.num_classes - 1}"
        )
    return table
