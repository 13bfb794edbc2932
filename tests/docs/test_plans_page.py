"""docs/plans.md names exactly the keys that the files have, with their defaults, and its examples can be read."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster import file as cluster_file
from stagewright.cluster.cluster import DeviceGroup, Link
from stagewright.cluster.file import cluster_to_toml, read_cluster
from stagewright.spec import plan_file
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.spec.plan_file import plan_to_table, read_plan

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "plans.md"
_ROW = re.compile(r"^\| `(\w+)` \| (?:–|`([^`]+)`) \| [^|]+ \|$", re.MULTILINE)
TABLES: dict[str, tuple[dict[str, Any], type]] = {
    "Plan file": (
        {key: reader for key, reader in plan_file._PLAN.items() if key not in ("model", "mesh", "optimizer")},
        Plan,
    ),
    "model": (plan_file._MODEL, ModelSpec),
    "mesh": (plan_file._MESH, Mesh),
    "optimizer": (plan_file._OPTIMIZER, OptimizerSpec),
    "Cluster file": (cluster_file._DEVICES, DeviceGroup),
    "links": (cluster_file._LINK, Link),
}


def sections() -> dict[str, str]:
    parts = re.split(r"^##+ (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("title", TABLES)
def test_keys_and_defaults(title: str) -> None:
    readers, value = TABLES[title]
    rows = dict(_ROW.findall(sections()[title]))
    assert list(rows) == list(readers)
    defaults = {one.name: one.default for one in fields(value)}
    for key, shown in rows.items():
        default = defaults.get(key)
        if shown and title != "links":
            assert json.loads(shown) == (list(default) if isinstance(default, tuple) else default), key
        elif title != "links":
            assert not isinstance(default, (str, int, float, bool)), f"{key} has a default: {default}"


def examples() -> dict[str, str]:
    blocks = runpy.run_path(str(Path(__file__).with_name("run_page.py")))["blocks"]
    pages = [ROOT / "docs" / "how-to" / "multi-node.md", PAGE]
    found = [block.text for page in pages for block in blocks(page) if block.language == "toml"]
    return {text.partition("\n")[0].removeprefix("# "): text for text in found}


@pytest.mark.parametrize("name", ["plan.toml", "resolved.toml", "two.toml"])
def test_plans_are_read_back(name: str, tmp_path: Path) -> None:
    text = examples()[name]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    written = plan_to_table(read_plan(path))
    assert written | tomllib.loads(text) | {"model": written["model"], "mesh": written["mesh"]} == written
    if name == "resolved.toml":
        assert written == tomllib.loads(text), "a resolved plan has every key"


def test_the_cluster_is_read_back(tmp_path: Path) -> None:
    first, second = tmp_path / "cluster.toml", tmp_path / "again.toml"
    first.write_text(examples()["cluster.toml"], encoding="utf-8")
    cluster = read_cluster(first)
    assert [group.count for group in cluster.devices] == [4, 4]
    second.write_text(cluster_to_toml(cluster), encoding="utf-8")
    assert read_cluster(second) == cluster
