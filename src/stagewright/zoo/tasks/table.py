"""Finds a data set: parquet files of the Hugging Face layout in a folder, or by name through `datasets`.

    STAGEWRIGHT_DATA/cifar10/train-00000-of-00005.parquet …    columns: img {bytes, path}, label
    STAGEWRIGHT_DATA/glue/rte/validation-00000-of-00001.parquet    columns: sentence1, sentence2, label

Images stay encoded in the table; they are decoded one by one when a batch asks for them.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from stagewright.errors import DataMissing, UsageError
from stagewright.zoo.quiet import quiet_transformers
from stagewright.zoo.sources import network
from stagewright.zoo.sources.weights import first_line
from stagewright.zoo.tasks.catalog import Entry

VARIABLE = "STAGEWRIGHT_DATA"


def read(entry: Entry, split: str, data_dir: Path | None) -> Any:
    """The split as a pyarrow table with the entry's columns and `label`, checked."""
    files = find(entry, split, data_dir)
    if files:
        return _checked(entry, split, _read_files(entry, files), str(files[0].parent))
    return _checked(entry, split, _from_hub(entry, split, _root(data_dir)), entry.repository)


def find(entry: Entry, split: str, data_dir: Path | None) -> list[Path]:
    """The files of a split, unread; none where `datasets` may fetch them; DataMissing with how to get them."""
    root = _root(data_dir)
    if root is not None and not root.is_dir():
        named = "--data-dir" if data_dir is not None else VARIABLE
        raise DataMissing(f"{named} is {str(root)!r}, which is no folder; {how_to_get(entry, None)}")
    places = _places(entry, root) if root is not None else []
    for place in places:
        files = sorted(place.glob(f"{split}-*.parquet")) or sorted(place.glob(f"{split}.parquet"))
        if files:
            _refuse_gaps(entry, split, files)
            return files
    if data_dir is None and importlib.util.find_spec("datasets") is not None:
        return []
    by_name = ", or let it be fetched by name after `pip install 'stagewright[data]'`" if data_dir is None else ""
    raise DataMissing(_missing(entry, split, places) + how_to_get(entry, root) + by_name)


def _root(data_dir: Path | None) -> Path | None:
    """Where data sets are: the folder that was named, or the variable's."""
    if data_dir is None and os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser()
    return data_dir


def _places(entry: Entry, root: Path) -> list[Path]:
    """Folders that may hold the files: the layout above, the hub's own, or the folder itself."""
    own = root / entry.folder
    return [own, own / (entry.configuration or ""), own / "data", root]


def how_to_get(entry: Entry, root: Path | None) -> str:
    """What to type to have the set."""
    top, _, below = entry.folder.partition("/")
    folder = str(root) if root is not None else "FOLDER"
    only = f" --include '{below}/*'" if below else ""
    return (
        "where there is a network, get it with "
        f"`hf download {entry.repository} --repo-type dataset{only} --local-dir {folder}/{top}` "
        f"and set {VARIABLE}={folder} (or --data-dir {folder})"
    )


def _missing(entry: Entry, split: str, places: list[Path]) -> str:
    looked = f"no {split}-*.parquet in {str(places[0])!r}" if places else f"{VARIABLE} is not set"
    return f"the data set {entry.name!r} is not on this machine ({looked}); "


def _refuse_gaps(entry: Entry, split: str, files: list[Path]) -> None:
    """DataMissing where the file names say `…-of-00005` and fewer are there."""
    named = [re.search(r"-of-(\d+)\.parquet$", one.name) for one in files]
    wanted = max((int(one.group(1)) for one in named if one), default=len(files))
    if len(files) != wanted:
        raise DataMissing(
            f"the data set {entry.name!r} is incomplete: {str(files[0].parent)!r} holds {len(files)} of "
            f"{wanted} files of the split {split!r}"
        )


def _read_files(entry: Entry, files: list[Path]) -> Any:
    import pyarrow
    from pyarrow import parquet

    wanted = [*entry.columns, "label"]
    tables = []
    for path in files:
        try:
            file = parquet.ParquetFile(path)
            present = file.schema_arrow.names
            if not set(wanted) <= set(present):
                raise UsageError(
                    f"{str(path)!r} is not {entry.name!r}: it has the columns {', '.join(present)}, "
                    f"wanted are {', '.join(wanted)}"
                )
            tables.append(file.read(columns=wanted))
        except (pyarrow.ArrowException, OSError) as error:
            raise UsageError(f"{str(path)!r} can't be read as parquet: {first_line(error)}") from error
    return pyarrow.concat_tables(tables)


def _from_hub(entry: Entry, split: str, root: Path | None) -> Any:
    import datasets

    if not network.offline_by_choice() and network.unreachable():
        raise DataMissing(
            f"the data set {entry.name!r} can't be fetched by name: the Hugging Face hub can't be reached "
            "(HF_HUB_OFFLINE=1 uses a copy that was fetched before); " + how_to_get(entry, root)
        )
    try:
        with quiet_transformers():
            found = datasets.load_dataset(entry.repository, entry.configuration, split=split)
    except Exception as error:  # the library raises whatever its transports raise
        raise DataMissing(
            f"the data set {entry.name!r} can't be fetched by name ({first_line(error)}); " + how_to_get(entry, root)
        ) from error
    return table_of(found, entry)


def table_of(found: Any, entry: Entry) -> Any:
    """The columns of a `datasets.Dataset` as a pyarrow table, images still encoded."""
    import datasets

    if entry.kind == "image":
        found = found.cast_column(entry.columns[0], datasets.Image(decode=False))
    return found.select_columns([*entry.columns, "label"]).with_format("arrow")[:]


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
