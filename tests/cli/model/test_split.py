"""``split`` and ``profile``: their JSON, their pictures, and that the best split is the best."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from program import run_program


@pytest.fixture(scope="module")
def cache(tmp_path_factory: Any) -> Path:
    return Path(tmp_path_factory.mktemp("cache"))


def run(cache: Path, *words: str) -> Any:
    environment = {**os.environ, "STAGEWRIGHT_CACHE": str(cache)}
    result = run_program(words, env=environment)
    assert result.returncode == 0, result.stderr
    return result


def test_json_of_all_policies(cache: Path) -> None:
    data = json.loads(run(cache, "split", "digits-vit", "--stages", "3", "--all", "--json").stdout)
    policies = {one["policy"]: one for one in data["policies"]}
    assert list(policies) == ["parameters", "macs", "blocks", "time", "optimal", "client-server"]
    wanted = {"units", "parameters", "macs", "forward_s", "backward_s", "sends_bytes", "memory_bytes"}
    for one in policies.values():
        assert len(one["stages"]) == 3
        assert all(wanted <= set(stage) for stage in one["stages"])
        assert [unit for stage in one["stages"] for unit in stage["units"]] == [
            "vit.embeddings",
            *(f"vit.layers.{index}" for index in range(4)),
            "vit.layernorm",
            "classifier",
        ]
        assert sum(stage["parameters"] for stage in one["stages"]) == 136138
        assert one["bottleneck_s"] > 0
    chain = [policies[name]["step_s"] for name in ("parameters", "macs", "blocks", "time")]
    assert policies["optimal"]["step_s"] <= min(chain)
    assert data["profile"]["batch_size"] == 32
    again = json.loads(run(cache, "split", "digits-vit", "--stages", "3", "--all", "--json").stdout)
    assert again["profile"]["source"] == "cache"
    assert again["policies"] == data["policies"]


def test_measured_stages(cache: Path) -> None:
    words = ("split", "digits-vit", "--stages", "2", "--measure", "--repeats", "3", "--json")
    (split,) = json.loads(run(cache, *words).stdout)["policies"]
    for stage in split["stages"]:
        assert 0 < stage["measured"]["forward_s"] < stage["measured"]["total_s"]
    assert split["measured_bottleneck_s"] == max(stage["measured"]["total_s"] for stage in split["stages"])


def test_tables_and_picture(cache: Path, tmp_path: Path) -> None:
    picture = tmp_path / "split.svg"
    result = run(cache, "split", "digits-vit", "--stages", "2", "--all", "--plot", str(picture))
    for word in ("optimal", "client-server", "cut after vit.layers.1", "balance", "speed-up bound", "Policies"):
        assert word in result.stdout
    assert picture.read_text().startswith("<?xml")


def test_memory_limits_links_and_speeds(cache: Path) -> None:
    words = ("split", "digits-vit", "--stages", "2", "--speeds", "1,3", "--bandwidth", "1Gbit/s", "--latency", "10us")
    (split,) = json.loads(run(cache, *words, "--json").stdout)["policies"]
    assert len(split["stages"][0]["units"]) < len(split["stages"][1]["units"])
    assert split["stages"][0]["link_s"] == pytest.approx(2 * (10e-6 + split["stages"][0]["sends_bytes"] / 125e6))


def test_profile_as_data_and_as_table(cache: Path) -> None:
    data = json.loads(run(cache, "profile", "mlp-mnist", "--inference", "--repeats", "2", "--json").stdout)
    linear = [unit for unit in data["units"] if unit["kind"] == "Linear"]
    assert [unit["parameters"]["total"] * 4 for unit in linear] == [803840, 131584, 33024, 2600]
    assert (
        data["whole_macs"] == 32 * (784 * 256 + 256 * 128 + 128 * 64 + 64 * 10) == sum(u["macs"] for u in data["units"])
    )
    table = run(cache, "profile", "mlp-mnist", "--inference", "--repeats", "2").stdout
    assert "units sum to" in table
    assert "backward" not in table
