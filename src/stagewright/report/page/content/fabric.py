"""A fabric run: the verdict, each layer with its tail, how times are spread, and when the slow trials came."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from stagewright.errors import UsageError
from stagewright.fabric.results.run_folder import FabricFolder
from stagewright.report.page.from_rich import from_rich
from stagewright.report.page.sections import Item, Line, LineChart, Section
from stagewright.report.tables.fabric import fabric_remarks, fabric_table, size_words

__all__ = ["fabric_sections"]

_MOST_LAYERS = 6  # more curves can't be told apart
_MOST_POINTS = 600


def fabric_sections(folders: Sequence[FabricFolder]) -> tuple[Section, ...]:
    """One section a run."""
    return tuple(_section(folder, at) for at, folder in enumerate(folders))


def _section(folder: FabricFolder, at: int) -> Section:
    name = f"fabric-{at}"
    title = f"Fabric: {folder.path.name}"
    try:
        result = folder.result()
    except UsageError as error:
        return Section(name=name, title=title, prose=(f"There is nothing to show: {error}.",))
    engine = f"{result['ranks']} ranks, {result['trials']} trials, engine {result['engine']}"
    prose = [f"{result['workload']}: {engine}; begun {_begun(folder)}.", *fabric_remarks(result)]
    items: list[Item] = [from_rich(fabric_table(result, ""))]
    try:
        trials = folder.trials()
        layers = [(layer, trials.durations(place)) for place, layer in enumerate(result["layers"])]
    except (UsageError, IndexError) as error:
        prose.append(f"The trials can't be drawn: {error}.")
        layers = []
    layers = [(layer, times) for layer, times in layers if len(times) > 1]
    if layers:
        items += _charts(_spread(layers), at)
    return Section(name=name, title=title, prose=tuple(prose), items=tuple(items))


def _charts(layers: Sequence[tuple[dict[str, Any], Any]], at: int) -> list[LineChart]:
    spread, over = [], []
    for place, (layer, times) in enumerate(layers):
        plain = layer["name"] == f"{layer['bytes']} B"
        name = layer["name"] if plain else f"{layer['name']} ({size_words(layer['bytes'])})"
        ordered, shares = np.sort(times), np.arange(1, len(times) + 1) / len(times)
        kept = _some(len(times))
        common: dict[str, Any] = {"name": name, "paint": f"stage-{place}"}
        spread.append(Line(x=tuple(ordered[kept].tolist()), y=tuple(shares[kept].tolist()), style="step", **common))
        shown = _some(len(times), keep=int(np.argmax(times)))
        over.append(Line(x=tuple(float(one) for one in shown), y=tuple(times[shown].tolist()), style="dots", **common))
    some = f"At most {_MOST_POINTS} points of each layer are drawn, the slowest trial among them."
    return [
        LineChart(
            name=f"fabric-cdf-{at}",
            title="How many trials took at most so long",
            x_title="time, logarithmic",
            y_title="share of trials",
            x_quantity="seconds",
            y_quantity="share",
            x_log=True,
            lines=tuple(spread),
        ),
        LineChart(
            name=f"fabric-trials-{at}",
            title="Delay of each layer, trial by trial",
            x_title="trial",
            x_quantity="count",
            y_title="time, logarithmic",
            y_quantity="seconds",
            y_log=True,
            lines=tuple(over),
            note=some,
        ),
    ]


def _spread(layers: list[tuple[dict[str, Any], Any]]) -> list[tuple[dict[str, Any], Any]]:
    """As many layers as can be told apart, from the smallest to the largest."""
    if len(layers) <= _MOST_LAYERS:
        return layers
    ordered = sorted(layers, key=lambda one: int(one[0]["bytes"]))
    return [ordered[round(at * (len(ordered) - 1) / (_MOST_LAYERS - 1))] for at in range(_MOST_LAYERS)]


def _some(count: int, keep: int = 0) -> list[int]:
    """Places of as many points as are drawn, evenly, the first, the last and one more among them."""
    drawn = min(count, _MOST_POINTS)
    kept = {round(at * (count - 1) / max(1, drawn - 1)) for at in range(drawn)}
    return sorted({*kept, keep, count - 1})


def _begun(folder: FabricFolder) -> str:
    try:
        return str(json.loads((folder.path / "fabric.json").read_text(encoding="utf-8")).get("begun", "–"))[:19]
    except (OSError, ValueError, AttributeError):
        return "–"
