"""Sections on fabric runs: the verdict, each layer with its tail, and the distribution of trial times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stagewright.errors import UsageError
from stagewright.fabric.results.run_folder import FabricFolder
from stagewright.files.json_values import read_object_or_empty
from stagewright.report.page.sections import Item, Line, LineChart, Section
from stagewright.report.tables.fabric import fabric_remarks, fabric_table, layer_label, select_layers

_MAX_LAYERS = 6  # more curves are not distinguishable
_MAX_POINTS = 600


def fabric_sections(folders: Sequence[FabricFolder], names: Mapping[str, str] | None = None) -> tuple[Section, ...]:
    """Return one section per fabric run; `names` has titles by folder, instead of the folders' names."""
    return tuple(
        _fabric_section(folder, number, (names or {}).get(folder.path.name, f"Fabric: {folder.path.name}"))
        for number, folder in enumerate(folders)
    )


def _fabric_section(folder: FabricFolder, number: int, title: str) -> Section:
    name = f"fabric-{number}"
    try:
        result = folder.result()
    except UsageError as error:
        return Section(name=name, title=title, prose=(f"No result: {error}.",))
    started = str(read_object_or_empty(folder.path / "fabric.json").get("begun", "–"))[:19]
    setup = f"{result['ranks']} ranks, {result['trials']} trials, engine {result['engine']}"
    prose = [f"{result['workload']}: {setup}; started {started}.", *fabric_remarks(result)]
    items: list[Item] = [fabric_table(result, "")]
    try:
        trials = folder.trials()
        layers = [(layer, trials.durations(index)) for index, layer in enumerate(result["layers"])]
    except (UsageError, IndexError) as error:
        prose.append(f"The trials can't be drawn: {error}.")
        layers = []
    layers = [(layer, times) for layer, times in layers if len(times) > 1]
    if layers:
        items += _trial_charts(select_layers(layers, _MAX_LAYERS), number)
    return Section(name=name, title=title, prose=tuple(prose), items=tuple(items))


def _trial_charts(layers: Sequence[tuple[dict[str, Any], Any]], number: int) -> list[LineChart]:
    distributions, sequences = [], []
    for index, (layer, times) in enumerate(layers):
        name = layer_label(layer)
        ordered, shares = np.sort(times), np.arange(1, len(times) + 1) / len(times)
        kept = _sample_indices(len(times))
        x, y = tuple(ordered[kept].tolist()), tuple(shares[kept].tolist())
        distributions.append(Line(name=name, paint=f"stage-{index}", x=x, y=y, style="step"))
        kept = _sample_indices(len(times), keep=int(np.argmax(times)))
        x, y = tuple(map(float, kept)), tuple(times[kept].tolist())
        sequences.append(Line(name=name, paint=f"stage-{index}", x=x, y=y, style="dots"))
    return [
        LineChart(
            name=f"fabric-cdf-{number}",
            title="Cumulative distribution of trial times",
            x_title="time, logarithmic",
            y_title="share of trials",
            x_quantity="seconds",
            y_quantity="share",
            x_log=True,
            lines=tuple(distributions),
        ),
        LineChart(
            name=f"fabric-trials-{number}",
            title="Time of each layer, trial by trial",
            x_title="trial",
            x_quantity="count",
            y_title="time, logarithmic",
            y_quantity="seconds",
            y_log=True,
            lines=tuple(sequences),
            note=f"At most {_MAX_POINTS} points per layer are drawn, including the slowest trial.",
        ),
    ]


def _sample_indices(count: int, keep: int = 0) -> list[int]:
    """Select evenly spaced indices, always with the first, the last and `keep`."""
    num_drawn = min(count, _MAX_POINTS)
    indices = {round(index * (count - 1) / max(1, num_drawn - 1)) for index in range(num_drawn)}
    return sorted({*indices, keep, count - 1})
