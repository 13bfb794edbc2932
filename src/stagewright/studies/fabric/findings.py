"""What the study *fabric* concludes: tables, sentences and figures from the data of its parts. Pure but for drawing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.quantity import format_s
from stagewright.studies.fabric.answers import answers, is_right, sent_runs
from stagewright.studies.framework.phrases import percent
from stagewright.studies.framework.study import Drawing, Findings, Results, Table

__all__ = ["conclude"]


def conclude(options: Mapping[str, Any], results: Results) -> Findings:
    """Everything that the study says."""
    return Findings(
        tables=(_layer_table(results, options), _cause_table(results, options)),
        answers=answers(results, options),
        drawings=tuple(
            Drawing(
                name=f"{plain}-{network}",
                caption=f"{model}, {network}: how long each layer took, and when the slow ones came.",
                draw=partial(_draw, row, f"{model}: {network}"),
            )
            for model, plain, network, row in sent_runs(results, options)
        ),
    )


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else format_s(seconds)


def _layer_table(results: Results, options: Mapping[str, Any]) -> Table:
    rows = []
    for model, _, network, row in sent_runs(results, options):
        for layer in row["layers"]:
            rows.append(
                (
                    model,
                    network,
                    layer["name"],
                    str(layer["bytes"]),
                    str(layer["samples"]),
                    *(_time(layer[name]) for name in ("p50_s", "p95_s", "p99_s", "max_s", "ideal_s")),
                    percent(layer["share_of_ideal"]) if layer["share_of_ideal"] else "–",
                    str(layer["retransmits"]),
                )
            )
    where = "in the lab" if options["where"] == "lab" else "on this host's loopback"
    return Table(
        title="Delay of each layer",
        columns=(
            "model",
            "network",
            "layer",
            "bytes",
            "trials",
            "p50",
            "p95",
            "p99",
            "longest",
            "ideal",
            "of ideal",
            "sent again",
        ),
        rows=tuple(rows),
        note=f"{options['algorithm']} all-reduce between {options['hosts']} hosts {where}, last layer first as "
        "backward has them. A percentile stands where two trials or more lie beyond it. Ideal: from the best pair "
        "alone. Every sum was checked.",
    )


def _cause_table(results: Results, options: Mapping[str, Any]) -> Table:
    rows = []
    for model, _, network, row in sent_runs(results, options):
        verdict = row["verdict"]
        rows.append(
            (
                model,
                network if network == "clean" else f"{network} of host {options['wrong_host']}",
                verdict["sentence"],
                "yes" if is_right(row, options) else "no",
                _time(row["total"]["p50_s"]),
                _time(row["total"]["max_s"]),
            )
        )
    return Table(
        title="Who is to blame",
        columns=("model", "what was made", "verdict", "right", "a step's messages, p50", "longest"),
        rows=tuple(rows),
        note="The verdict is made from the trials alone; what was made is known.",
    )


def _draw(row: Mapping[str, Any], title: str, path: Path) -> None:
    import numpy as np

    from stagewright.report.figures.fabric import draw_fabric

    draw_fabric(row, [np.asarray(times) for times in row["times_s"]], path, title=title)
