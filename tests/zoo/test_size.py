"""The size of a model before it is built."""

from __future__ import annotations

import pytest

from stagewright import zoo
from stagewright.errors import UsageError
from stagewright.zoo.size import built_bytes


@pytest.mark.parametrize("name", ["digits-vit", "mlp-mnist", "gpt-layers:2"])
def test_it_is_that_of_the_built_model(name: str) -> None:
    module = zoo.load(name, batch=2).module
    tensors = [*module.parameters(), *module.buffers()]
    assert built_bytes(name) == sum(one.numel() * one.element_size() for one in tensors)


def test_options_count() -> None:
    assert (built_bytes("digits-vit", num_classes=1000) or 0) > (built_bytes("digits-vit") or 0)


def test_what_is_not_known() -> None:
    assert built_bytes("my_module:factory") is None
    with pytest.raises(UsageError):
        built_bytes("digits-vitt")
