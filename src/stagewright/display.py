"""How public values show themselves: ``table()``, ``plot()``, ``print`` and notebooks.

Tables and figures are made in `stagewright.report`, above the values that they show, so they are found by name when
they are asked for.
"""

from __future__ import annotations

import unicodedata
from importlib import import_module
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.table import Table

_TABLES = {
    "AnalyticForecast": "tables.analytic:analytic_table",
    "Comparison": "tables.compare:comparison_table",
    "Explanation": "tables.forecast:explanation_table",
    "FitResult": "tables.fit:fit_result_table",
    "Forecast": "tables.forecast:worker_table",
    "PlanResult": "tables.plan:plan_result_table",
    "Run": "tables.compare:run_table",
    "TrainingResult": "tables.runs:training_result_table",
}
_FIGURES = {
    "Explanation": "figures.waterfall:plot_explanation",
    "Forecast": "figures.timeline:plot_forecast",
    "Split": "figures.split:plot_split",
}


def printable(text: str) -> str:
    """Show control characters as escapes, except for line breaks and tabs: a name must not control the terminal."""
    if text.isprintable():
        return text
    return "".join(
        character if character in "\n\t" or not _is_control(character) else repr(character)[1:-1] for character in text
    )


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


class Displayed:
    """A value with a table, and with a figure where one says more."""

    __slots__ = ()

    def table(self) -> Table:
        """Return the value as a table."""
        table: Table = _load(_TABLES[type(self).__name__])(self)
        return table

    def plot(self, path: str | Path) -> Path:
        """Draw the value into a .png, .svg or .pdf file."""
        name = type(self).__name__
        if name not in _FIGURES:
            raise UsageError(f"a {name} has no figure; use table() instead")
        drawn: Path = _load(_FIGURES[name])(self, Path(path))
        return drawn

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return self.table()._repr_html_()


def _load(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(f"stagewright.report.{module}"), function)
