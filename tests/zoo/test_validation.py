"""What can be told of a model before it is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.errors import UsageError
from stagewright.zoo.blueprint import Options
from stagewright.zoo.model import ImageInput, TextInput
from stagewright.zoo.validation import check_model, check_name, has_option

SOURCE = """
import torch
from torch import nn

def plain(): return nn.Linear(4, 2), (torch.ones(3, 4),)
def sized(num_classes=2, *, width=4): return nn.Linear(width, num_classes), (torch.ones(3, width),)
def needs(num_classes): return nn.Linear(4, num_classes), (torch.ones(3, 4),)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_shop.py").write_text(SOURCE)
    (tmp_path / "my_burst.py").write_text("x = 1 / 0\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    sys.modules.pop("my_shop", None)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "weights", "words"),
    [
        ("digits-vti", None, ("unknown model 'digits-vti'", "did you mean 'digits-vit'")),
        ("digits-vit:3", None, ("fixed number of layers", "write 'digits-vit'")),
        ("gpt-layers:0", None, ("'gpt-layers:0'", "from 1 to 10000", "gpt-layers:16")),
        ("gpt-layer:3", None, ("unknown model 'gpt-layer:3'", "did you mean 'gpt-layers:3'")),
        ("my_shpo:plain", None, ("no module named 'my_shpo'", "did you mean my_shop:plain?")),
        ("no.such.module:make", None, ("no module named 'no.such.module'", "change to its folder")),
        ("my_shop.py:plain", None, ("is a file", "write my_shop:plain")),
        ("my_shop:", None, ("names no factory", "package.module:factory")),
        ("hf:", None, ("needs a model", "hf:org/name")),
        ("hf:./nowhere", None, ("'./nowhere' does not exist", "config.json")),
        ("digits-vit", "nowhere", ("'nowhere' does not exist", "model.safetensors")),
        ("digits-vit", "empty", ("'empty' has no *.safetensors", "it is empty")),
    ],
)
def test_missing_names_and_folders(name: str, weights: str | None, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        check_name(name, weights)
    for one in words:
        assert one in str(error.value)


def test_good_names_pass_and_import_neither_torch_nor_the_users_module() -> None:
    code = (
        "import sys; from stagewright.zoo.validation import check_name\n"
        "for name in ('digits-vit', 'gpt-layers:3', 'my_shop:nothing', 'my_burst:x'): check_name(name, 'random')\n"
        "assert not {'torch', 'my_shop', 'my_burst'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("my_shop:plan", {}, ("unknown factory 'plan'", "did you mean 'plain'", "my_shop.py")),
        ("my_shop:qqq", {}, ("unknown factory 'qqq'; known: needs, plain, sized (",)),
        ("my_burst:x", {}, ("'my_burst' does not import: ZeroDivisionError", "my_burst.py, line 1", "fix it")),
        ("my_shop:plain", {"num_classes": 10}, ("num_classes=10 was given", "takes no arguments", "def plain(num")),
        ("my_shop:sized", {"image_size": 8}, ("image_size=8", "takes num_classes, width", "leave image_size out")),
        ("my_shop:needs", {}, ("'my_shop:needs' requires num_classes", "--num-classes", "def needs(num_classes=…)")),
        ("digits-vit", {"sequence_length": 8}, ("has no option sequence_length", "image_size, num_classes")),
        ("digits-vit", {"image_size": 7}, ("image_size 7", "use image_size 6 or 8")),
    ],
)
def test_unsupported_options(name: str, options: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        check_model(name, None, Options(**options))
    for one in words:
        assert one in str(error.value)


def test_what_is_known_without_building() -> None:
    image = check_model("digits-vit", None, Options(num_classes=3))
    text = check_model("gpt-layers:2", "random", Options(sequence_length=8))
    assert image is not None
    assert text is not None
    assert (image.objective, image.num_classes, isinstance(image.inputs, ImageInput)) == ("classify", 3, True)
    assert (text.objective, isinstance(text.inputs, TextInput)) == ("next-token", True)
    assert check_model("my_shop:sized", None, Options(num_classes=3)) is None


def test_who_takes_a_number_of_classes() -> None:
    names = ("digits-vit", "mlp-mnist", "gpt-layers:2", "my_shop:plain", "my_shop:sized", "hf:some/name")
    assert [has_option(name, "num_classes") for name in names] == [True, False, False, False, True, True]
