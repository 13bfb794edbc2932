"""Where the data and weights of a recipe are found, and which samples are kept."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from made_profiles import profile_of, unit
from stagewright.errors import DataMissing, UsageError
from stagewright.profiler.profile import Profile
from stagewright.studies.parts.samples import select_samples
from stagewright.studies.parts.training_options import TrainingOptions, choose_tasks
from stagewright.studies.parts.training_recipe import choose_recipe, data_folder, tasks_in


def cifar(folder: Path, num_train: int = 60, num_test: int = 30) -> Path:
    """A folder with photographs of one colour each, three times as many of class 0 as of others."""
    place = folder / "cifar10"
    place.mkdir(parents=True)
    for split, count in (("train", num_train), ("test", num_test)):
        labels = [at % 12 % 10 if at % 12 < 10 else 0 for at in range(count)]
        pictures = []
        for label in labels:
            file = io.BytesIO()
            Image.fromarray(np.full((32, 32, 3), 20 * label, dtype=np.uint8)).save(file, "PNG")
            pictures.append({"bytes": file.getvalue(), "path": None})
        parquet.write_table(
            pyarrow.table({"img": pictures, "label": labels}), place / f"{split}-00000-of-00001.parquet"
        )
    return folder


def weights(folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_samples_are_of_all_classes(tmp_path: Path) -> None:
    data = cifar(tmp_path / "data")
    found = select_samples("cifar10", str(data), tmp_path / "kept", 20, 10)
    assert found == {"kept": True, "train": 20, "judged": 10, "of": [60, 30]}
    kept = parquet.read_table(tmp_path / "kept" / "cifar10" / "train-00000-of-00001.parquet")
    assert np.bincount(kept.column("label").to_numpy()).tolist() == [2] * 10
    assert select_samples("cifar10", str(data), tmp_path / "none", None, None) == {
        **found,
        "kept": False,
        "train": 60,
        "judged": 30,
    }
    assert not (tmp_path / "none").exists()
    assert select_samples("digits", None, tmp_path / "none", 20, 10)["kept"] is False


def test_tasks_are_those_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(cifar(tmp_path / "data"))
    assert tasks_in(data, ("cifar10", "rte")) == ("cifar10",)
    assert tasks_in(data, ("rte",)) == ("digits",)
    assert tasks_in(None, ("cifar10",)) == ("digits",)
    monkeypatch.setenv("STAGEWRIGHT_DATA", data)
    assert data_folder(None) == data
    monkeypatch.setenv("STAGEWRIGHT_DATA", str(tmp_path / "not there"))
    with pytest.raises(DataMissing, match="does not exist"):
        data_folder(None)


def test_weights_are_found_by_their_kind(tmp_path: Path) -> None:
    data = cifar(tmp_path / "data")
    recipe = choose_recipe("cifar10", data=str(data), weights=None, quick=True)
    assert (recipe.weights, recipe.size, recipe.batch) == (None, 32, 64)
    beside = weights(data / "mobilenet", "mobilenet_v2")
    weights(data / "another", "bert")
    assert choose_recipe("cifar10", data=str(data), weights=None, quick=False).weights == str(beside)
    own = weights(tmp_path / "own", "mobilenet_v2")
    chosen = choose_recipe("cifar10", data=str(data), weights=str(own), quick=True, size=48, batch=8, learning_rate=0.5)
    assert (chosen.weights, chosen.size, chosen.batch, chosen.learning_rate) == (str(own), 48, 8, 0.5)
    spec = chosen.model_spec(3)
    assert (spec.image_size, spec.sequence_length, spec.num_classes, spec.seed) == (48, None, 10, 3)


def test_what_is_not_there_is_told_in_one_sentence(tmp_path: Path) -> None:
    data = cifar(tmp_path / "data")
    wrong = weights(tmp_path / "bert", "bert")
    empty = tmp_path / "empty"
    empty.mkdir()
    for given, text in (
        ({"data": None, "weights": None}, "needs its data"),
        ({"data": str(empty), "weights": None}, "has no parquet files of 'cifar10'"),
        ({"data": str(data), "weights": str(wrong)}, "hold no 'mobilenet_v2'"),
        ({"data": str(data), "weights": str(tmp_path / "not there")}, "does not exist"),
    ):
        with pytest.raises(UsageError, match=text) as raised:
            choose_recipe("cifar10", quick=True, **given)
        assert "\n" not in str(raised.value)


def test_a_folder_one_level_too_high_is_found_or_refused(tmp_path: Path) -> None:
    told: list[str] = []
    cifar(tmp_path / "up" / "data")
    found = choose_tasks(None, str(tmp_path / "up"), ("cifar10", "rte"), told.append)
    assert found == (str(tmp_path / "up" / "data"), ("cifar10",))
    assert "but data in it has: using" in told[0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataMissing, match="has none of cifar10, rte: name the folder with cifar10/"):
        choose_tasks(None, str(tmp_path / "empty"), ("cifar10", "rte"), told.append)
    cifar(tmp_path / "up" / "other")
    with pytest.raises(DataMissing, match="name the folder"):
        choose_tasks(None, str(tmp_path / "up"), ("cifar10",), told.append)


def test_quick_trains_what_it_can_learn(tmp_path: Path) -> None:
    told: list[str] = []
    chosen = TrainingOptions.machine_defaults({"data": str(cifar(tmp_path))}, quick=True, note=told.append)
    assert chosen["tasks"] == ("digits",)
    assert told[-1].endswith(f"; for the data in {tmp_path}: --tasks cifar10")
    below = cifar(tmp_path / "up" / "data")
    up = TrainingOptions.machine_defaults({"data": str(tmp_path / "up")}, quick=True, note=told.append)
    assert up["data"] == str(below), "one level too high"
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataMissing, match="has none of"):
        TrainingOptions.machine_defaults({"data": str(tmp_path / "empty")}, quick=True, note=told.append)
    full = TrainingOptions.machine_defaults({"data": str(tmp_path)}, quick=False, note=told.append)
    assert full["tasks"] == ("cifar10",)


def test_costs_of_a_part_are_read_again() -> None:
    profile = profile_of([unit("a", 1.0, (1.0, 1.0))])
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile
