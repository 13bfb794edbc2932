from __future__ import annotations

import importlib.util
import io
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from stagewright.errors import DataMissing, UsageError
from stagewright.zoo.sources import network
from stagewright.zoo.tasks import catalog, dataset_files


def encoded(colour: int) -> dict[str, Any]:
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), colour, dtype=np.uint8)).save(stream, format="PNG")
    return {"bytes": stream.getvalue(), "path": "x.png"}


def write(path: Path, **columns: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)


@pytest.fixture(autouse=True)
def no_variable_and_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dataset_files.VARIABLE, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize("subfolder", ["cifar10", "cifar10/plain_text", "cifar10/data", "."])
def test_files_are_found_in_every_layout(tmp_path: Path, subfolder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / subfolder
    write(folder / "train-00000-of-00002.parquet", img=[encoded(0), encoded(9)], label=[3, 4], idx=[0, 1])
    write(folder / "train-00001-of-00002.parquet", img=[encoded(1)], label=[5], idx=[2])
    entry = catalog.entry("cifar10")
    rows = dataset_files.read(entry, "train", tmp_path)
    assert rows.column("label").to_pylist() == [3, 4, 5]
    assert rows.column_names == ["img", "label"]
    monkeypatch.setenv(dataset_files.VARIABLE, str(tmp_path))
    assert dataset_files.read(entry, "train", None).num_rows == 3


def test_a_missing_file_of_a_split(tmp_path: Path) -> None:
    write(tmp_path / "cifar10" / "train-00000-of-00003.parquet", img=[encoded(0)], label=[3])
    with pytest.raises(DataMissing, match="has 1 of 3 files of the split 'train'"):
        dataset_files.read(catalog.entry("cifar10"), "train", tmp_path)


def test_another_data_set_and_wrong_labels(tmp_path: Path) -> None:
    write(tmp_path / "mnist" / "train-0.parquet", picture=[encoded(0)], label=[3])
    with pytest.raises(UsageError, match="it has the columns picture, label, but needs image, label"):
        dataset_files.read(catalog.entry("mnist"), "train", tmp_path)
    write(tmp_path / "glue" / "cola" / "train-0.parquet", sentence=["a"], label=[-1])
    with pytest.raises(UsageError, match="labels from -1 to -1, but 'cola' has the classes 0 to 1"):
        dataset_files.read(catalog.entry("cola"), "train", tmp_path)
    (tmp_path / "glue" / "cola" / "train-0.parquet").write_bytes(b"nonsense")
    with pytest.raises(UsageError, match="can't be read as parquet"):
        dataset_files.read(catalog.entry("cola"), "train", tmp_path)


def test_a_missing_set_has_a_download_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = catalog.entry("rte")
    with pytest.raises(DataMissing) as caught:
        dataset_files.read(entry, "train", None)
    assert str(caught.value) == (
        "the data set 'rte' is not on this machine (STAGEWRIGHT_DATA is not set); with network access, "
        "download it with `hf download nyu-mll/glue --repo-type dataset --include 'rte/*' --local-dir FOLDER/glue` "
        "and set STAGEWRIGHT_DATA=FOLDER (or --data-dir FOLDER), or let it be downloaded after "
        "`pip install 'stagewright[data]'`"
    )
    with pytest.raises(DataMissing, match=f"no train-.*parquet in '{tmp_path}/glue/rte'"):
        dataset_files.read(entry, "train", tmp_path)
    with pytest.raises(DataMissing, match=r"--data-dir is '/no/where', which is not a folder"):
        dataset_files.read(entry, "train", Path("/no/where"))
    monkeypatch.setenv(dataset_files.VARIABLE, "/no/where")
    with pytest.raises(DataMissing, match=r"STAGEWRIGHT_DATA is '/no/where', which is not a folder"):
        dataset_files.read(entry, "train", None)


@pytest.mark.parametrize(
    ("name", "num_train", "num_evaluation"),
    [("cifar10", 50000, 10000), ("mnist", 60000, 10000), ("rte", 2490, 277), ("cola", 8551, 1043)],
)
def test_the_real_sets_are_complete(data_dir: Path, name: str, num_train: int, num_evaluation: int) -> None:
    entry = catalog.entry(name)
    if not (data_dir / entry.folder).is_dir():
        pytest.skip(f"no {entry.folder} in {data_dir}")
    train, evaluation = entry.splits
    assert dataset_files.read(entry, train, data_dir).num_rows == num_train
    assert dataset_files.read(entry, evaluation, data_dir).num_rows == num_evaluation


def test_without_a_network_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    monkeypatch.setattr(network, "offline_by_choice", lambda: False)
    monkeypatch.setattr(network, "unreachable", lambda: True)
    with pytest.raises(DataMissing, match="the Hugging Face hub can't be reached"):
        dataset_files.read(catalog.entry("mnist"), "train", None)


def test_a_set_by_name_keeps_its_images_encoded() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset(pyarrow.table({"img": [encoded(7)], "label": [2]}))
    rows = dataset_files.to_arrow_table(dataset.cast_column("img", datasets.Image()), catalog.entry("cifar10"))
    assert rows.column("img")[0].as_py()["bytes"] == encoded(7)["bytes"]
