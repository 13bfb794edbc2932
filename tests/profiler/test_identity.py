from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.cluster.device import Device
from stagewright.profiler.cache import ProfileCache
from stagewright.profiler.identity import library_versions, profile_key, structure_digest


def test_weights_do_not_matter_but_structure_does() -> None:
    digest = structure_digest(nn.Linear(3, 4))
    assert structure_digest(nn.Linear(3, 4)) == digest
    assert structure_digest(nn.Linear(3, 5)) != digest
    assert structure_digest(nn.Linear(3, 4).double()) != digest
    assert structure_digest(nn.Linear(3, 4).requires_grad_(False)) != digest
    assert structure_digest(nn.Dropout(0.1)) != structure_digest(nn.Dropout(0.2))


def test_configuration_matters() -> None:
    def model(config: object) -> nn.Module:
        linear = nn.Linear(2, 2)
        linear.config = config  # type: ignore[assignment]
        return linear

    assert structure_digest(model({"layers": 1})) == structure_digest(model({"layers": 1}))
    assert structure_digest(model({"layers": 1})) != structure_digest(model({"layers": 2}))
    assert structure_digest(model(object())) == structure_digest(model(object()))  # addresses are ignored


def test_key_depends_on_shapes_and_modes(chain: Callable[..., Any]) -> None:
    def key(batch_size: int = 2, device: str = "cpu:0", training: bool = True, mode: bool = True) -> dict[str, str]:
        inputs = torch.zeros(batch_size, 4)
        graph = chain(nn.Linear(4, 4), example=inputs)
        graph.model.train(mode)
        return profile_key(graph, (inputs,), {}, name="m", device=Device.parse(device), repeats=3, training=training)

    assert key() == key()
    assert "float32[2, 4]" in key()["inputs"]
    assert key(batch_size=3)["inputs"] != key()["inputs"]
    assert key(training=False)["training"] == "False"
    assert key(mode=False)["mode"] == "eval"
    assert (key()["threads"], key()["device"]) == ("1", "cpu")
    assert key()["torch version"] == torch.__version__


def test_offloaded_weights_change_the_key(
    chain: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inputs = torch.zeros(2, 4)
    graph = chain(nn.Linear(4, 4), example=inputs)

    def path() -> Path:
        device = Device.parse("cpu:0")
        key = profile_key(graph, (inputs,), {}, name="m", device=device, repeats=3, training=True)
        return ProfileCache(tmp_path).path(key)

    resident = path()
    monkeypatch.setattr("stagewright.profiler.identity.is_offloaded", lambda module, device: True)
    assert path() != resident


def test_versions_name_torch() -> None:
    assert library_versions()["torch"] == torch.__version__
