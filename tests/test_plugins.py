"""Names that the entry points of an installed package define."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagewright.codecs.registry import check_codec_name, codec_names, get
from stagewright.errors import UnknownName
from stagewright.partition.registry import find_policy
from stagewright.plugins import plugins
from stagewright.spec.plan_rules import _check_policy
from stagewright.zoo.loading import load
from stagewright.zoo.named import catalog

CODE = """
import torch
from torch import nn
from stagewright.codecs.builtin.casts import Bf16 as Half

def tagger():
    return nn.Linear(4, 2), (torch.ones(3, 4),)

def first(profile, num_stages, conditions):
    return list(range(num_stages - 1))
"""
ENTRIES = """
[stagewright.models]
tagger = plugged_shop:tagger
[stagewright.policies]
first = plugged_shop:first
[stagewright.codecs]
halved = plugged_shop:Half
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with plug-ins, as pip leaves it on disk."""
    (tmp_path / "plugged_shop.py").write_text(CODE)
    info = tmp_path / "plugged_shop-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged-shop\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.cache_clear()
    get.cache_clear()
    yield
    sys.modules.pop("plugged_shop", None)
    plugins.cache_clear()
    get.cache_clear()


def test_names_are_listed_without_importing_the_package() -> None:
    assert catalog.describe()["tagger"] == "plug-in, plugged_shop:tagger"
    assert "halved" in codec_names()
    check_codec_name("halved")
    _check_policy("first")
    assert "plugged_shop" not in sys.modules


def test_model() -> None:
    model = load("tagger")
    assert model.module(*model.args).shape == (3, 2)


def test_policy_and_codec() -> None:
    assert find_policy("first").choose(None, 3, None) == [0, 1]  # type: ignore[arg-type]
    assert type(get("halved")).__module__.startswith("stagewright.codecs")


def test_unknown_names_suggest_plugins() -> None:
    with pytest.raises(UnknownName, match="did you mean 'tagger'"):
        catalog.entry("taggr")
    with pytest.raises(UnknownName, match="did you mean 'first'"):
        find_policy("frist")
