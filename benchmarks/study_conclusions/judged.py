"""Conclusions of the studies that compare accuracies and diagnose networks: codecs, fabric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.studies.codecs.measured import (
    GOAL_RATIO,
    collapse_verdict,
    faster_here,
    goal_points,
    may_collapse,
    measured_codecs,
    task_scale,
    without_codec,
)
from stagewright.studies.fabric.measured import is_correct, measured_runs, shown_network
from stagewright.studies.framework.study import Results
from stagewright.studies.parts.measurements import is_busy
from study_conclusions.conclusion import Conclusions, above_or_below

_SLOWER = 0.2
"""Relative difference between two median steps from which one network is called slower."""


def conclude_codecs(results: Results, options: Mapping[str, Any]) -> Conclusions:
    """Which codecs keep the accuracy, collapse, and save time on this machine's link."""
    found: Conclusions = {}
    for task, recipe in options["recipes"].items():
        measured, name = measured_codecs(results, options, task), recipe.shown_data
        reference, scale = without_codec(measured), task_scale(results, options, task, measured)
        faster, _ = faster_here(results, measured)
        verdicts: dict[str, str] = {}
        for codec in measured:
            if codec.codec == "none" or not codec.raw_bytes:
                continue
            found[f"{codec.codec}: compression ratio"] = f"{codec.ratio:.3f}"
            found[f"{name}: {codec.codec} saves time on this link"] = "yes" if codec.codec in faster else None
            if reference is None or codec.mean is None or not scale.has_learned(reference):
                continue
            verdicts[codec.codec] = verdict = scale.compare(codec, reference, goal_points(task))
            found[f"{name}: {codec.codec} and the accuracy"] = None if verdict == "unclear" else verdict
            if may_collapse(codec):
                collapses = collapse_verdict(scale, codec, reference)
                found[f"{name}: {codec.codec} collapses"] = None if collapses == "unclear" else collapses
        small = {codec.codec for codec in measured if codec.codec in verdicts and codec.ratio <= GOAL_RATIO}
        if any(verdicts[codec] == "keeps" for codec in small):
            found[f"{name}: goal of {GOAL_RATIO:g}"] = "met"
        elif small:
            is_open = any(verdicts[codec] == "unclear" for codec in small)
            found[f"{name}: goal of {GOAL_RATIO:g}"] = None if is_open else "missed"
    return found


def conclude_fabric(results: Results, options: Mapping[str, Any]) -> Conclusions:
    """What each network is diagnosed with, and which are slower than the clean one."""
    found: Conclusions = {}
    medians: dict[str, float] = {}
    for model, _, network, row in measured_runs(results, options):
        name, verdict = f"{model}, {shown_network(network)}", row["verdict"]
        diagnosis = str(verdict["kind"]) + ("" if verdict["rank"] is None else f" at host {verdict['rank']}")
        is_doubted = not is_correct(row, options) and is_busy(results)
        found[f"{name}: diagnosis"] = None if is_doubted else diagnosis
        if model == options["model"] and row["total"]["p50_s"]:
            medians[network] = row["total"]["p50_s"]
    for network, median_s in medians.items():
        if network != "clean" and "clean" in medians:
            ratio = median_s / medians["clean"]
            subject = f"{shown_network(network)}: a median step is slower than on the clean network"
            found[subject] = above_or_below(ratio, ratio, _SLOWER)
    return found
