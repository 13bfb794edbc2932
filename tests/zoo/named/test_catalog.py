from __future__ import annotations

import subprocess
import sys

import pytest

from stagewright import zoo
from stagewright.errors import UnknownName
from stagewright.zoo import tasks
from stagewright.zoo.named import catalog


def test_the_names_of_the_zoo() -> None:
    assert set(zoo.names()) == {
        "mlp-mnist", "digits-vit", "deit-tiny", "deit-small", "deit-base", "mobilenet-v2", "resnet-50",
        "resnet-101", "roberta-base", "bert-minilm", "gpt2", "llama-tiny", "gpt-layers",
    }  # fmt: skip
    assert set(tasks.names()) == {"digits", "mnist", "cifar10", "rte", "cola", "synthetic"}
    assert len(zoo.describe()) == len(zoo.names())
    assert "gpt-layers:N" in zoo.describe()


def test_listing_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from stagewright import zoo; from stagewright.zoo import tasks; zoo.describe();"
        "tasks.describe(); print(sorted({'torch', 'transformers', 'pyarrow', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'deit-small'"):
        catalog.entry("deit-smal")
    with pytest.raises(UnknownName, match="'rte'"):
        tasks.entry("rted")


@pytest.mark.parametrize(
    ("name", "own"),
    [("shop:tagger", True), ("hf:org/name", False), ("hf:/a/folder", False), ("gpt-layers:4", False), ("gpt2", False)],
)
def test_what_only_a_users_factory_can_be_called(name: str, own: bool) -> None:
    assert catalog.is_factory(name) is own
