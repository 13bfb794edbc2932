"""Answers of the study *fabric*, in sentences with their numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.studies.fabric.measured import (
    PUBLISHED_S,
    is_correct,
    measured_runs,
    shown_fault,
    shown_loss,
    shown_network,
    shown_rate,
)
from stagewright.studies.fabric.options import BATCH, BATCHES_PER_EPOCH
from stagewright.studies.framework.phrases import counted, joined, percent, times
from stagewright.studies.framework.study import Answer, Results, answer_all
from stagewright.studies.parts.measurements import is_busy

QUESTIONS = (
    "What is sent, and over which network?",
    "How long does the all-reduce of each layer take?",
    "How long is the tail?",
    "What causes the slow all-reduces?",
    "What do the gradient buckets of a larger model cost?",
    "How does it compare with published results?",
)
EVIDENCE: Mapping[str, tuple[str, ...]] = {QUESTIONS[1]: ("All-reduce latency",), QUESTIONS[3]: ("Diagnosis",)}
"""Beginnings of the titles and names of the tables and figures behind each answer."""


def answers(results: Results, options: Mapping[str, Any]) -> tuple[Answer, ...]:
    replies = (
        _traffic(results, options),
        _latencies(results, options),
        _tails(results, options),
        _causes(results, options),
        _buckets(results, options),
        _published(results, options),
    )
    return answer_all(QUESTIONS, replies, "Unknown: no all-reduce was measured.")


def _traffic(results: Results, options: Mapping[str, Any]) -> Iterator[str]:
    first_rows: dict[str, Mapping[str, Any]] = {}
    for model, _, _, row in measured_runs(results, options):
        first_rows.setdefault(model, row)
    if not first_rows:
        return
    for model, row in first_rows.items():
        is_by_layer = model == options["model"]
        sizes = joined(
            f"{layer['name']} {layer['bytes'] if is_by_layer else format_bytes(layer['bytes'])}"
            for layer in row["layers"]
        )
        total = sum(layer["bytes"] for layer in row["layers"])
        unit = " bytes" if is_by_layer else ""
        yield f"{model}: gradients of {sizes}{unit}, in this order; {format_bytes(total)} per step."
    activations = (results.get(f"floor-{options['part_name']}") or {}).get("activations")
    if activations:
        texts = joined(f"{name} {size}" for name, size in activations)
        yield (
            f"The outputs of these layers, in a forward pass of {BATCH} samples: {texts} bytes. A pipeline would send "
            "those at its cuts; data parallel sends the gradients, whose sizes do not depend on the batch."
        )
    if options.get("epochs"):
        yield (
            f"A training step all-reduces each layer once, so trials = batches × epochs = {BATCHES_PER_EPOCH} × "
            f"{options['epochs']} = {options['num_trials']}; 60000 samples make {BATCHES_PER_EPOCH} batches of {BATCH}."
        )
    if options["where"] == "lab":
        yield (
            f"They are all-reduced between {options['hosts']} emulated hosts, each on a link of "
            f"{shown_rate(options['rate'])}. In the faulty networks, host {options['wrong_host']} has a link of "
            f"{shown_rate(options['slow_rate'])}, loses {shown_loss(options['loss'])} (lossy) or "
            f"{shown_loss(options['failing_loss'])} (failing) of its packets, or is {format_s(options['late_s'])} "
            "late. Rank n runs on host n."
        )
    else:
        yield (
            "The lab needs root with CAP_NET_ADMIN and CAP_SYS_ADMIN, so everything was sent over this host's "
            "loopback: these numbers are what the host itself costs. Slow and lossy links, and their tails, can't "
            "be shown there."
        )


def _layer_runs(results: Results, options: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(network, result) of the model that is reduced layer by layer."""
    return [(network, row) for model, _, network, row in measured_runs(results, options) if model == options["model"]]


def _latencies(results: Results, options: Mapping[str, Any]) -> Iterator[str]:
    for network, row in _layer_runs(results, options):
        layers = [layer for layer in row["layers"] if layer["p50_s"] is not None]
        if not layers:
            texts = joined(f"{layer['name']} {format_s(layer['max_s'])}" for layer in row["layers"])
            yield (
                f"{shown_network(network).capitalize()}: {counted(row['trials'], 'trial')} within the time limit, too "
                f"few for a median; at most {texts}."
            )
            continue
        texts = joined(f"{layer['name']} {format_s(layer['p50_s'])}" for layer in layers)
        step_s = row["total"]["p50_s"]
        step = f"; a whole step {format_s(step_s)}" if step_s is not None else ""
        yield f"{shown_network(network).capitalize()}: median of {row['trials']} trials: {texts}{step}."


def _tail_ratio(layer: Mapping[str, Any]) -> float:
    return float(layer["max_s"] / layer["p50_s"]) if layer["p50_s"] else 0.0


def _longest(layer: Mapping[str, Any]) -> float:
    return float(layer["max_s"])


_LOSSY = ("lossy-link", "failing-link")


def _tails(results: Results, options: Mapping[str, Any]) -> Iterator[str]:
    for network, row in _layer_runs(results, options):
        # Where packets are lost, a median is long too: there the longest all-reduce is the tail.
        worst = max(row["layers"], key=_longest if network in _LOSSY else _tail_ratio)
        if not worst["p50_s"]:
            yield (
                f"{shown_network(network).capitalize()}: inconclusive with {counted(row['trials'], 'trial')}."
                f"{_timeouts(row) if network in _LOSSY else ''}"
            )
            continue
        p99 = f", p99 {format_s(worst['p99_s'])}" if worst["p99_s"] is not None else ""
        yield (
            f"{shown_network(network).capitalize()}: {worst['name']} has the longest tail: at most "
            f"{format_s(worst['max_s'])}, which is {times(_tail_ratio(worst))} its median of "
            f"{format_s(worst['p50_s'])}{p99}"
            + (f"; TCP retransmitted {counted(worst['retransmits'], 'segment')}." if network in _LOSSY else ".")
            + (_timeouts(row) if network in _LOSSY else "")
        )


_MIN_RTO_S = 0.2
"""Linux' minimum retransmission timeout."""


def _timeouts(row: Mapping[str, Any]) -> str:
    """How many retransmission timeouts in a row the longest all-reduce is; empty where there was none."""
    longest = max(row["layers"], key=lambda layer: layer["max_s"])
    if not longest["retransmits"] or longest["max_s"] < _MIN_RTO_S:
        return ""
    count = max(1, math.floor(math.log2(longest["max_s"] / _MIN_RTO_S + 1)))
    waits = [_MIN_RTO_S * 2**number for number in range(count)]
    steps = " + ".join(f"{wait:g}" for wait in waits)
    row_text = " in a row" if count > 1 else ""
    total = f" = {sum(waits):g}" if count > 1 else ""
    return (
        f" A segment that is lost again is sent again after a retransmission timeout of at least "
        f"{format_s(_MIN_RTO_S)}, which doubles with each loss in a row: the longest all-reduce, {longest['name']} "
        f"with {format_s(longest['max_s'])}, takes at least as long as {counted(count, 'timeout')}{row_text} "
        f"({steps}{total} s); timeouts of several segments add up."
    )


def _causes(results: Results, options: Mapping[str, Any]) -> Iterator[str]:
    correct = []
    for model, _, network, row in measured_runs(results, options):
        correct.append(is_correct(row, options))
        fault = shown_fault(network, options)
        slowest = max(row["layers"], key=lambda layer: layer["max_s"])
        modes = "".join(f" Slowest layer {slowest['name']}: {mode['sentence']}." for mode in slowest["modes"][:1])
        busy = " (other programs used the cores: a host that waits for one looks like a slow network)"
        verdict = "correct" if correct[-1] else f"wrong{busy if is_busy(results) else ''}"
        yield f"{model}, {fault}: the diagnosis “{row['verdict']['sentence']}” is {verdict}.{modes}"
    if correct:
        yield f"{sum(correct)} of {len(correct)} diagnoses are correct."


def _buckets(results: Results, options: Mapping[str, Any]) -> Iterator[str]:
    for model, _, network, row in measured_runs(results, options):
        if model == options["model"]:
            continue
        total = sum(layer["bytes"] for layer in row["layers"])
        ideals = [layer["ideal_s"] for layer in row["layers"]]
        step_s = row["total"]["mean_s"] if row["total"]["p50_s"] is None else row["total"]["p50_s"]
        text = (
            f"{model}, {shown_network(network)}: {counted(len(row['layers']), 'bucket')} of {format_bytes(total)} in "
            f"total take {format_s(step_s)} per step over {row['trials']} trials"
        )
        if ideals and None not in ideals and 0 < sum(ideals) <= step_s:
            text += f", {percent(sum(ideals) / step_s)} of the ideal speed ({format_s(sum(ideals))})"
        yield text + "."


def _published(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    for network, row in _layer_runs(results, options):
        latencies = [seconds for layer in row["times_s"] for seconds in layer]
        if not latencies:
            continue
        share = sum(seconds >= PUBLISHED_S for seconds in latencies) / len(latencies)
        sentences.append(
            f"{shown_network(network).capitalize()}: {percent(share)} of the all-reduces take 20 ms or more; the "
            f"longest takes {format_s(max(latencies))}."
        )
    if sentences:
        sentences.append(
            "Published for these layers on an emulated fabric: often 20 ms and more, with tails up to 4 s and 12 s."
        )
    return tuple(sentences)
