"""Conclusions of the studies that time plans: stages, strategies, memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from stagewright.studies.framework.rounds import Speedups
from stagewright.studies.framework.study import Results
from stagewright.studies.memory.measured import (
    NOISE,
    checkpointing_cost,
    is_possible_cost,
    measured_variants,
    shown_variant,
)
from stagewright.studies.parts.measurements import is_busy, noise_margin
from stagewright.studies.stages.contrast import read_contrast
from stagewright.studies.stages.measured import MeasuredRun, equal_sizes, explained_results, measured_runs
from stagewright.studies.strategies.large_tables import large_runs
from stagewright.studies.strategies.measured import (
    case_name,
    faster_strategy,
    measured_experiments,
    plain_loop,
    task_scale,
)
from study_conclusions.conclusion import Conclusions, above_or_below


def conclude_stages(results: Results, options: Mapping[str, Any]) -> Conclusions:
    """Which policy is faster, whether a pipeline is faster than one device, and its largest loss."""
    runs = {mode: measured_runs(results, options, mode) for mode in options["modes"]}
    results = explained_results(results, runs)
    found: Conclusions = {}
    for mode, measured in runs.items():
        for count in options["stages"]:
            found |= _cuts(results, f"{mode}, {count} stages", mode, count)
            of_count = [run for run in measured if run.num_stages == count and not run.shared]
            if not of_count:
                continue
            found |= _policies(f"{mode}, {count} stages", of_count, options["policies"])
            found |= _over_one_device(f"{mode}, {count} stages: a pipeline", _fastest(of_count))
        found[f"{mode}: largest loss"] = _largest_loss(results.get(f"why-{mode}"), results)
    equal = equal_sizes(results, options)
    found["equal numbers of parameters are a good policy"] = (
        None if not equal else "no" if "not always" in equal else "yes"
    )
    contrast = read_contrast(results, options.get("contrast_options"))
    if contrast is not None:
        found |= _policies(f"{contrast.model}, {contrast.mode}", contrast.runs, options["policies"])
        found |= _over_one_device(f"{contrast.model}, {contrast.mode}: a pipeline", _fastest(contrast.runs))
    return found


def _cuts(results: Results, head: str, mode: str, count: int) -> Conclusions:
    """Where each policy cuts; by measured time on a busy machine, that is not known."""
    splits = (results.get(f"profile-{mode}") or {"splits": {}})["splits"].get(str(count)) or {}
    return {
        f"{head}: {policy} cuts after": None
        if policy in ("time", "optimal") and is_busy(results)
        else ", ".join(split["cut_names"])
        for policy, split in splits.items()
        if "error" not in split
    }


def _fastest(runs: Sequence[MeasuredRun]) -> MeasuredRun | None:
    return max((run for run in runs if run.speedup), key=lambda run: run.speedup or 0.0, default=None)


def _policies(head: str, runs: Sequence[MeasuredRun], policies: Sequence[str]) -> Conclusions:
    """The faster one of each pair of policies; None where they cut alike or are within the noise."""
    of_policy = {policy: run for run in runs for policy in (run.policy, *run.also)}
    found: Conclusions = {}
    for first, second in combinations(policies, 2):
        one, other = of_policy.get(first), of_policy.get(second)
        subject = f"{head}: {first} or {second} is faster"
        if one is None or other is None or not one.differs_from(other):
            found[subject] = None
        else:
            found[subject] = first if (one.speedup or 0.0) > (other.speedup or 0.0) else second
    return found


def _over_one_device(head: str, measured: Speedups | None) -> Conclusions:
    if measured is None or not measured.speedups:
        return {f"{head} is faster than one device": None}
    margin = measured.margin if len(measured.speedups) == 1 else 0.0
    verdict = above_or_below(min(measured.speedups), max(measured.speedups), margin)
    return {f"{head} is faster than one device": verdict}


def _largest_loss(why: Mapping[str, Any] | None, results: Results) -> str | None:
    parts = [] if why is None else [part for part in why["parts"] if part["seconds"] > 0]
    if not parts or is_busy(results):
        return None
    largest = max(parts, key=lambda part: part["seconds"])
    return None if largest["name"] == "unexplained" else str(largest["name"])


def conclude_strategies(results: Results, options: Mapping[str, Any]) -> Conclusions:
    """Which strategy is faster, whether accuracies differ, and which large batches run."""
    found: Conclusions = {}
    for task in options["recipes"]:
        measured = measured_experiments(results, options, task)
        name, scale = case_name(options, task), task_scale(results, options, task, measured)
        for count in options["workers"]:
            rows = [row for row in measured if row.experiment.workers == count]
            data = next((row for row in rows if row.experiment.strategy == "data"), None)
            for row in rows:
                found |= _over_one_device(f"{name}: {row.experiment.full_name}", row if row.is_measured else None)
                if data is None or row is data:
                    continue
                head = f"{name}: {row.experiment.full_name}, against data parallel"
                is_timed = bool(row.speedups and data.speedups and row.is_measured)
                found[f"{head}: faster"] = (faster_strategy(data, row) or None) if is_timed else None
                if row.mean is None or data.mean is None or not scale.has_learned(data) or scale.deviation is None:
                    found[f"{head}: accuracy"] = None
                    continue
                difference = scale.difference(row, data)
                sign = "above" if difference.points > 0 else "below"
                found[f"{head}: accuracy"] = sign if difference.is_significant else None
        loop = plain_loop(results, options, task)
        if loop is not None and loop.ratios:
            ratio = statistics.median(loop.ratios)
            known = "as fast" if abs(ratio - 1) <= 0.1 else None if is_busy(results) else "of another speed"
            found[f"{name}: plain torch loop and baseline"] = known
    for run in large_runs(results, options):
        found[f"batch {run.batch}, {run.kind}, {run.workers} workers"] = "ran" if run.passed else "did not run"
    largest = results.get("largest-data")
    if largest is not None:
        found["largest batch of data parallel"] = str(largest["largest"]) if largest["is_exact"] else None
    return found


def conclude_memory(results: Results, options: Mapping[str, Any]) -> Conclusions:
    """Which strategy is faster and needs less memory, what activation checkpointing does, and how many layers fit."""
    variants = measured_variants(results, options)
    found: Conclusions = {}
    plain = [variants[strategy] for strategy in options["strategies"] if strategy in variants]
    for first, second in combinations(plain, 2):
        verdict = first if first.is_faster_than(second) else second if second.is_faster_than(first) else None
        found[f"{first.strategy} or {second.strategy} is faster"] = None if verdict is None else verdict.strategy
    for variant in plain:
        found |= _over_one_device(variant.strategy, variant)
    found |= dict(_checkpointing(results, variants))
    if variants:
        found["least memory"] = min(variants, key=lambda name: variants[name].peak)
    for variant_name in options["fits"]:
        fit = results.get(f"fit-{variant_name}")
        if fit is not None:
            found[f"most layers, {shown_variant(variant_name)}"] = str(fit["largest"]) if fit["is_exact"] else None
    for strategy in options["strategies"]:
        operators = results.get(f"operators-{strategy}")
        if operators is not None:
            found[f"{strategy}: workers execute the same operators"] = "yes" if operators["is_same"] else "no"
    return found


def _checkpointing(results: Results, variants: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    for name, without in variants.items():
        checkpointed = variants.get(f"{name}+recompute")
        if checkpointed is None:
            continue
        cost = checkpointing_cost(without, checkpointed)
        is_known = is_possible_cost(cost) and not is_busy(results) and abs(cost) > max(NOISE, noise_margin(results))
        yield f"activation checkpointing of {name} costs time", "yes" if is_known else None
        yield f"activation checkpointing of {name} saves memory", "yes" if checkpointed.peak < without.peak else "no"
