"""Tables and figures that public values find by name."""

from __future__ import annotations

import pytest

import stagewright as sw
from stagewright import display
from stagewright.display import Displayed
from stagewright.errors import UsageError


@pytest.mark.parametrize("reference", sorted({*display._TABLES.values(), *display._FIGURES.values()}))
def test_every_name_is_a_function_of_report(reference: str) -> None:
    assert callable(display._load(reference))


def test_every_displayed_value_has_a_table() -> None:
    displayed = {
        name for name in sw.__all__ if isinstance(getattr(sw, name), type) and issubclass(getattr(sw, name), Displayed)
    }
    own = {name for name in displayed if "table" in vars(getattr(sw, name))}
    assert own == {"Profile", "Split", "UnitGraph"}
    assert displayed - own == set(display._TABLES)


def test_a_value_without_a_figure_says_so() -> None:
    with pytest.raises(UsageError, match="has no figure"):
        sw.FitResult(model="m", what="batch", devices=2, memory_bytes=1, rows=()).plot("figure.png")
