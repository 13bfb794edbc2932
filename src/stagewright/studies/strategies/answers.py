"""Answers of the study *strategies*, in sentences with their numbers. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagewright.cluster.device import num_separate
from stagewright.quantity import format_bytes
from stagewright.studies.framework.accuracy import AccuracyScale
from stagewright.studies.framework.phrases import counted, joined, spread, study_command, times
from stagewright.studies.framework.study import Answer, Results, answer_all
from stagewright.studies.parts.measurements import why_busy
from stagewright.studies.parts.training_recipe import TrainingRecipe
from stagewright.studies.strategies.large_tables import large_answer
from stagewright.studies.strategies.measured import (
    Experiments,
    MeasuredExperiment,
    case_name,
    faster_strategy,
    forecast_check,
    plain_loop,
    round_ratios,
    task_scale,
)
from stagewright.studies.strategies.tables import data_on_2

QUESTIONS = (
    "What was trained?",
    "Pipeline or data parallel: which is faster?",
    "Does a pipeline reach the accuracy of data parallel?",
    "What do more micro-batches change?",
    "What does a larger batch change?",
    "Equal stages, or the first and last units at a client?",
    "What do more workers gain?",
    "Which batches run out of memory under data parallel but run as a pipeline?",
)
EVIDENCE: Mapping[str, tuple[str, ...]] = {
    QUESTIONS[1]: ("Pipeline and data parallel", "Published"),
    QUESTIONS[7]: ("Large batches",),
}
"""Beginnings of the titles and names of the tables and figures behind each answer."""
_SAME_SPEED = "The difference is within the variation between runs."
_FORECAST = "forecast with one device per worker"


def answers(results: Results, options: Mapping[str, Any], experiments: Experiments) -> tuple[Answer, ...]:
    replies = (
        _training(results, options),
        (*_faster(options, experiments), *(filter(None, (_plain(results, options, task) for task in experiments)))),
        _accuracy(results, options, experiments),
        _microbatches(options, experiments),
        _batches(results, options, experiments),
        _cuts(results, options, experiments),
        _workers(results, options, experiments),
        large_answer(results, options),
    )
    return answer_all(QUESTIONS, replies)


def _training(results: Results, options: Mapping[str, Any]) -> Iterator[str]:
    for task in options["tasks"]:
        recipe: TrainingRecipe = options["recipes"][task]
        samples = results.get(f"data-{task}")
        used = (
            f"{samples['train']} of {samples['of'][0]} samples, evaluated on {samples['judged']} of {samples['of'][1]}"
            if samples is not None and samples["of"] is not None
            else "all samples"
        )
        weights = "pretrained" if recipe.weights else "random"
        size = f" at {recipe.size} {'tokens' if recipe.kind == 'bert' else 'pixels'}" if recipe.size else ""
        epochs, seeds = counted(options["epochs"], "epoch"), counted(len(options["seeds"]), "seed")
        yield (
            f"{recipe.model} on {recipe.shown_data}{size}: {used}, {epochs}, {seeds}, starting from {weights} weights."
        )
        if task == "digits":
            yield (
                "These are the embedded digits, not the published data sets: --tasks names those, with --data-dir DATA."
            )


def _groups(
    options: Mapping[str, Any], experiments: Experiments, field: str
) -> list[tuple[str, int, MeasuredExperiment, list[MeasuredExperiment]]]:
    """(data set, workers, data parallel, pipelines) of each group in which both have a value of `field`."""
    groups = []
    for task, measured in experiments.items():
        for count in options["workers"]:
            rows = [row for row in measured if row.experiment.workers == count and getattr(row, field) is not None]
            data = next((row for row in rows if row.experiment.strategy == "data"), None)
            pipelines = [row for row in rows if row.experiment.strategy == "pipeline"]
            if data is not None and pipelines:
                groups.append((case_name(options, task), count, data, pipelines))
    return groups


def _speedup_text(row: MeasuredExperiment) -> str:
    text = f"{row.experiment.shown} {times(row.speedup or 0.0)}"
    return text + (f" ({spread(row.speedups)})" if len(row.speedups) > 1 else "")


def _faster(options: Mapping[str, Any], experiments: Experiments) -> tuple[str, ...]:
    sentences = []
    for name, count, data, pipelines in _groups(options, experiments, "speedup"):
        # Client and server have their own question.
        pipelines = [row for row in pipelines if row.experiment.cut == "even"] or pipelines
        best = max(pipelines, key=lambda row: row.speedup or 0.0)
        source = "measured" if data.is_measured and best.is_measured else _FORECAST
        sentences.append(
            f"{name}, {count} workers, {source}: {_speedup_text(data)}, {_speedup_text(best)} with "
            f"{best.experiment.microbatches} micro-batches. {_verdict(data, best)}"
        )
    sentences += [
        f"Left out: {row.experiment.shown} {joined(map(times, row.implausible))} on {row.experiment.workers} workers, "
        "more than they can reach: the baseline was disturbed; run the study again on a quiet machine (--restart)."
        for measured in experiments.values()
        for row in measured
        if row.implausible
    ]
    superlinear = [
        row
        for measured in experiments.values()
        for row in measured
        if row.is_measured and row.speedup is not None and row.speedup > row.experiment.workers
    ]
    if superlinear:
        texts = joined(
            f"{row.experiment.shown} {times(row.speedup or 0.0)} on {row.experiment.workers} workers"
            for row in superlinear
        )
        sentences.append(
            f"Superlinear speed-up: {texts}. Either a share of the batch runs more efficiently than the whole, or "
            "other programs slowed the baseline down; more --rounds show which."
        )
    if sentences:
        sentences.append(
            "Published: on 2 GPUs the pipeline reaches 0.61 (CIFAR-10) and 0.80 (RTE) of the speed of data parallel; "
            "on 4 GPUs it is slower on CIFAR-10 (1.07 and 1.66) and faster on RTE (1.40 and 1.25)."
        )
    return tuple(sentences)


def _plain(results: Results, options: Mapping[str, Any], task: str) -> str:
    """Whether the baseline is as fast as the loop that a user would write; empty if it was not measured."""
    loop = plain_loop(results, options, task)
    if loop is None or not loop.ratios:
        return ""
    ratio = statistics.median(loop.ratios)
    verdict = (
        "so the baseline is a fair one"
        if abs(ratio - 1) <= 0.1
        else f"but {busy}, so the comparison is inconclusive"
        if (busy := why_busy(results))
        else f"so speed-ups over a plain loop are {times(1 / ratio)} as high"
    )
    return (
        f"{case_name(options, task)}: a plain torch loop reaches {loop.samples_per_s:.1f} samples/s, "
        f"{times(ratio)} the single-device baseline, {verdict}."
    )


def _verdict(data: MeasuredExperiment, pipeline: MeasuredExperiment) -> str:
    """Which is faster; with three rounds or more, how much in each."""
    faster = faster_strategy(data, pipeline)
    if not faster:
        return _SAME_SPEED
    name = "The pipeline" if faster == "pipeline" else "Data parallel"
    ratios = round_ratios(data, pipeline)
    if ratios:
        return (
            f"{name} is faster in each of {len(ratios)} rounds: the pipeline runs at "
            f"{times(statistics.median(ratios))} ({spread(ratios)}) the speed of data parallel."
        )
    ratio = (pipeline.speedup or 0.0) / (data.speedup or 1.0)
    return f"{name} is faster: the pipeline runs at {times(ratio)} the speed of data parallel."


def _accuracy(results: Results, options: Mapping[str, Any], experiments: Experiments) -> Iterator[str]:
    tasks = {case_name(options, task): task for task in experiments}
    for name, count, data, pipelines in _groups(options, experiments, "mean"):
        assert data.mean is not None
        task = tasks[name]
        scale = task_scale(results, options, task, experiments[task])
        head = f"{name}, {count} workers (guessing reaches {scale.chance:g}): data {scale.shown(data)}"
        if not scale.has_learned(data):
            yield f"{head}: too little was learned to compare strategies; use more --epochs or --samples."
            continue
        texts: list[str] = []
        below: list[str] = []
        above: list[str] = []
        for row in pipelines:
            assert row.mean is not None
            label = f"{row.experiment.shown} ({row.experiment.microbatches})"
            difference = scale.difference(row, data)
            texts.append(f"{label} {scale.shown(row)}, a difference of {difference.shown}")
            if difference.is_significant:
                (below if difference.points < 0 else above).append(label)
        verdict = "No significant difference: the 95 % intervals of all differences contain 0."
        if below or above:
            verdict = " ".join(
                f"{word} data parallel by more than the interval: {joined(labels)}."
                for word, labels in (("Below", below), ("Above", above))
                if labels
            )
        if scale.deviation is None:
            verdict = "Inconclusive: with one seed, the variation between seeds is unknown."
        yield f"{head}; {'; '.join(texts)}. {verdict}"


def _microbatches(options: Mapping[str, Any], experiments: Experiments) -> Iterator[str]:
    if len(options["microbatches"]) < 2:
        command = study_command(options, "strategies --microbatches 2,4,8")
        yield f"Only one number of micro-batches was studied; this studies more: {command}"
        return
    for task, measured in experiments.items():
        for count in options["workers"]:
            rows = [
                row
                for row in measured
                if row.experiment.workers == count and row.experiment.cut == "even" and row.speedup is not None
            ]
            if len(rows) < 2:
                continue
            source = "measured" if all(row.is_measured for row in rows) else "forecast"
            rates = joined(f"{row.experiment.microbatches} reach {times(row.speedup or 0.0)}" for row in rows)
            most = times(max(row.speedup or 0.0 for row in rows))
            best = joined(str(row.experiment.microbatches) for row in rows if times(row.speedup or 0.0) == most)
            yield (
                f"{case_name(options, task)}, {count} workers ({source}): {rates}; best: {best}. More "
                "micro-batches shrink the pipeline bubble, but smaller ones run less efficiently."
            )


def _batches(results: Results, options: Mapping[str, Any], experiments: Experiments) -> Iterator[str]:
    if len(options["recipes"]) == len(options["tasks"]):
        batch = options["recipes"][options["tasks"][0]].batch
        command = study_command(options, f"strategies --batch {batch},{2 * batch}")
        yield f"Only one batch was studied; this studies two: {command}"
        return
    for task in options["tasks"]:
        cases = [case for case, recipe in options["recipes"].items() if recipe.task == task]
        for first in experiments[task]:
            rows = [row for case in cases for row in experiments[case] if row.experiment == first.experiment]
            if len(rows) < 2:
                continue
            texts = joined(map(_batch_text, rows))
            verdict = _accuracy_change(task_scale(results, options, task, experiments[task]), rows)
            yield f"{options['recipes'][task].shown_data}, {first.experiment.full_name}: {texts}. {verdict}"
    yield "A larger batch makes fewer and longer steps, so communication and the optimizer cost less per sample."


def _batch_text(row: MeasuredExperiment) -> str:
    """Batch 64: 120.0 samples/s, 1.80 ×, accuracy 95.9."""
    known = (
        f"{row.samples_per_s:.1f} samples/s{'' if row.is_measured else ' (forecast)'}" if row.samples_per_s else "",
        times(row.speedup) if row.speedup is not None else "",
        f"accuracy {row.shown}" if row.mean is not None else "",
    )
    return f"batch {row.batch} {', '.join(filter(None, known))}"


def _accuracy_change(scale: AccuracyScale, rows: Sequence[MeasuredExperiment]) -> str:
    """Whether the accuracy with the largest batch differs from that with the first."""
    first, last = rows[0], rows[-1]
    if first.mean is None or last.mean is None:
        return "The accuracy was not measured."
    if not scale.has_learned(first) or scale.deviation is None:
        return "The comparison of accuracies is inconclusive."
    difference = scale.difference(last, first)
    if not difference.is_significant:
        return f"No significant difference in accuracy ({difference.shown})."
    return f"The accuracy differs by more than the interval: {difference.shown}."


def _cuts(results: Results, options: Mapping[str, Any], experiments: Experiments) -> tuple[str, ...]:
    sentences = []
    for task, measured in experiments.items():
        cuts = (results.get(f"profile-{task}") or {"cuts": {}})["cuts"]
        on_two = [row for row in measured if row.experiment.workers == 2]
        even = {row.experiment.microbatches: row for row in on_two if row.experiment.cut == "even"}
        sentences += [
            f"{case_name(options, task)}, {row.experiment.microbatches} micro-batches: "
            + _client_and_even(row, even.get(row.experiment.microbatches), cuts.get(row.experiment.name, ()))
            for row in measured
            if row.experiment.is_client and row.speedup is not None
        ]
    if sentences:
        sentences.append(
            "Published: 0.61 of the speed of data parallel with client and server, 0.85 with equal stages; 1641 and "
            "5039 MiB."
        )
    elif len(options["cuts"]) < 2:
        command = study_command(options, "strategies --policies even,client")
        return (f"Only one policy was studied; this studies both: {command}",)
    return tuple(sentences)


def _client_and_even(client: MeasuredExperiment, even: MeasuredExperiment | None, cuts: Sequence[str]) -> str:
    """Compare client and server with equal stages and as many micro-batches."""
    after = f" (cut after {joined(cuts)})" if cuts else ""
    units = client.experiment.client_units
    which = f" with the first {units[0]} and last {units[1]} units at the client" if units else ""
    text = f"client and server{which} reach {times(client.speedup or 0.0)}{after}"
    if even is not None and even.speedup is not None:
        text += f", equal stages {times(even.speedup)}"
    if len(client.peak_bytes) == 2:
        text += f"; memory: client {format_bytes(client.peak_bytes[0])}, server {format_bytes(client.peak_bytes[1])}"
        if even is not None and len(even.peak_bytes) == 2:
            text += f"; equal stages {format_bytes(even.peak_bytes[0])} and {format_bytes(even.peak_bytes[1])}"
    return text + "."


def _workers(results: Results, options: Mapping[str, Any], experiments: Experiments) -> Iterator[str]:
    if tuple(options["workers"]) == (2,):
        command = study_command(options, "strategies --workers 2,4")
        yield f"Only 2 workers were studied; this studies more: {command}"
        return
    for task, measured in experiments.items():
        reference = data_on_2(measured)
        for count in options["workers"]:
            rows = [
                row
                for row in measured
                if row.experiment.workers == count and row.samples_per_s is not None and row.equal
            ]
            if count == 2 or not rows or reference is None or not reference.samples_per_s:
                continue
            rates = joined(
                f"{row.experiment.shown}{f' ({row.experiment.microbatches})' if row.experiment.cut else ''} "
                f"{(row.samples_per_s or 0.0) / reference.samples_per_s:.2f}"
                for row in rows
            )
            is_measured = all(row.is_measured for row in rows)
            if not is_measured:
                yield f"{case_name(options, task)}: {forecast_check(results, measured).sentence}"
            source = "measured" if is_measured else _FORECAST
            yield (f"{case_name(options, task)}, {count} workers, {source}, relative to data parallel on 2: {rates}.")
            if not is_measured:
                devices = counted(num_separate(options["devices"]), "device")
                yield (
                    f"During training {count} workers shared {devices}: their measured speed is meaningless, their "
                    "accuracy is valid."
                )
