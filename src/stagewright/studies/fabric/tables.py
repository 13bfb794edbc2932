"""Tables and figures of the study *fabric*."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.quantity import format_s
from stagewright.studies.fabric.measured import is_correct, measured_runs, shown_fault, shown_network
from stagewright.studies.framework.phrases import percent
from stagewright.studies.framework.study import Figure, Results
from stagewright.studies.framework.tables import study_table
from stagewright.table import Table


def tables(results: Results, options: Mapping[str, Any]) -> tuple[Table, ...]:
    """Latency of each layer, and the diagnosis of each network."""
    return _latency_table(results, options), _diagnosis_table(results, options)


def figures(results: Results, options: Mapping[str, Any]) -> tuple[Figure, ...]:
    """The distribution of latencies on each network."""
    return tuple(
        Figure(
            name=f"{part_name}-{network}",
            caption=f"{model}, {shown_network(network)}: latency of each layer, and when slow all-reduces happened.",
            draw=partial(_draw, row, f"{model}: {shown_network(network)}"),
        )
        for model, part_name, network, row in measured_runs(results, options)
    )


_BEATEN = {
    "lab": "an emulated link lets a burst of a millisecond pass after a pause, or its probe was disturbed",
    "loopback": "the probe was disturbed",
}
"""Why an all-reduce can be faster than its ideal."""


def shown_share(share: float | None) -> str:
    """Write a share of the ideal speed; above 100 % it is no ideal."""
    return "–" if not share else "beaten" if share > 1 else percent(share)


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else format_s(seconds)


def _latency_table(results: Results, options: Mapping[str, Any]) -> Table:
    rows = [
        (
            model,
            shown_network(network),
            layer["name"],
            str(layer["bytes"]),
            str(layer["samples"]),
            *(_time(layer[name]) for name in ("p50_s", "p95_s", "p99_s", "max_s", "ideal_s")),
            shown_share(layer["share_of_ideal"]),
            str(layer["retransmits"]),
        )
        for model, _, network, row in measured_runs(results, options)
        for layer in row["layers"]
    ]
    hosts = "in the lab" if options["where"] == "lab" else "on this host's loopback"
    columns = ("model", "network", "layer", "bytes", "trials", "p50", "p95", "p99", "max", "ideal", "% of ideal speed")
    return study_table(
        "All-reduce latency of each layer",
        (*columns, "retransmits"),
        rows,
        f"{options['algorithm'].capitalize()} all-reduce between {options['hosts']} hosts {hosts}, last layer first, "
        "as backward produces the gradients. A percentile is shown if at least two trials lie beyond it. Ideal: from "
        f"the bandwidth and latency of the best pair of hosts alone; beaten: {_BEATEN[options['where']]}. Every result "
        "was checked.",
    )


def _diagnosis_table(results: Results, options: Mapping[str, Any]) -> Table:
    rows = [
        (
            model,
            shown_fault(network, options),
            row["verdict"]["sentence"],
            "yes" if is_correct(row, options) else "no",
            _time(row["total"]["p50_s"]),
            _time(row["total"]["max_s"]),
        )
        for model, _, network, row in measured_runs(results, options)
    ]
    return study_table(
        "Diagnosis",
        ("model", "emulated fault", "diagnosis", "correct", "all-reduces of a step, p50", "max"),
        rows,
        "The diagnosis uses only the measured trials; the emulated fault is known.",
    )


def _draw(row: Mapping[str, Any], title: str, path: Path) -> None:
    import numpy as np

    from stagewright.report.figures.fabric import draw_fabric

    draw_fabric(row, [np.asarray(times) for times in row["times_s"]], path, title=title)
