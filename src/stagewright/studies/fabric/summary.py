"""The study *fabric* in four sentences. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.quantity import format_s
from stagewright.studies.fabric.measured import PUBLISHED_S, is_correct, measured_runs, shown_network, shown_rate
from stagewright.studies.fabric.options import BATCHES_PER_EPOCH
from stagewright.studies.framework.phrases import counted, joined, percent, times
from stagewright.studies.framework.study import Results, Summary

_REMEDIES = {
    "slow-link": "Slow link: replace it, since every ring all-reduce waits for it.",
    "lossy-link": "Lossy link: repair it, since each lost packet may cost a timeout, which doubles with each loss.",
    "failing-link": "Failing link: replace it, its timeouts add up to seconds.",
    "late-host": "Late host: find what delays it, the network is not the cause.",
}


def summarize(results: Results, options: Mapping[str, Any]) -> Summary:
    runs = list(measured_runs(results, options))
    layered = {network: row for model, _, network, row in runs if model == options["model"]}
    if not layered:
        return Summary(
            measured="No all-reduce was measured.",
            ideal="Unknown: no link was probed.",
            why="Unknown: nothing was measured.",
            advice="See which parts failed, and run the same command again.",
        )
    clean = layered.get("clean") or next(iter(layered.values()))
    step_s, which = clean["total"]["p50_s"] or clean["total"]["mean_s"], "median" if clean["total"]["p50_s"] else "mean"
    longest = {network: max(layer["max_s"] for layer in row["layers"]) for network, row in layered.items()}
    worst = max(longest, key=lambda network: longest[network])
    sizes = joined(f"{layer['name']} {layer['bytes']}" for layer in clean["layers"])
    ideals = [layer["ideal_s"] for layer in clean["layers"]]
    ideal_s = sum(ideals) if ideals and None not in ideals else None
    correct = [is_correct(row, options) for _, _, _, row in runs]
    faults = [network for network in layered if network in _REMEDIES]
    where = (
        "on the loopback device, without a network"
        if options["where"] == "loopback"
        else f"on links of {shown_rate(options['rate'])}"
    )
    return Summary(
        measured=f"The gradients of {options['model']} ({sizes} bytes, the last layer first) are all-reduced in "
        f"{format_s(step_s)} per step {where} ({which} of {counted(clean['trials'], 'trial')}, one for each batch"
        f"{_epochs(options)}). {_late_share(layered)}The longest all-reduce of a layer takes "
        f"{format_s(longest[worst])} ({shown_network(worst)}).",
        ideal="Unknown: no link was probed."
        if ideal_s is None
        else f"{format_s(ideal_s)} per step from the bandwidth and latency of the links alone; reached: "
        f"{percent(ideal_s / step_s)}."
        if ideal_s <= step_s
        else "Unknown: the links were probed slower than the all-reduces are.",
        why=f"{sum(correct)} of {len(correct)} diagnoses from the trials alone name the emulated cause. "
        f"{_ratios(layered, clean)}".rstrip(),
        advice=" ".join(["Diagnose your network: stagewright fabric run.", *(_REMEDIES[network] for network in faults)])
        if faults
        else "Add faults, to see their tails: --networks lossy-link,failing-link."
        if options["where"] == "lab"
        else "Run it as root, to see the tails of faulty links.",
    )


def _epochs(options: Mapping[str, Any]) -> str:
    """How many batches an epoch has, and how many epochs were measured."""
    if options.get("epochs"):
        return f" of {counted(options['epochs'], 'epoch')} with {BATCHES_PER_EPOCH} batches"
    return f"; an epoch has {BATCHES_PER_EPOCH}"


def _late_share(layered: Mapping[str, Mapping[str, Any]]) -> str:
    """On which networks all-reduces take as long as published."""
    shares = {
        network: sum(seconds >= PUBLISHED_S for seconds in times_s) / len(times_s)
        for network, row in layered.items()
        if (times_s := [seconds for layer in row["times_s"] for seconds in layer])
    }
    texts = joined(f"{percent(share)} ({shown_network(network)})" for network, share in shares.items())
    return f"All-reduces of a layer that take 20 ms or more, as often published: {texts}. " if texts else ""


def _ratios(layered: Mapping[str, Mapping[str, Any]], clean: Mapping[str, Any]) -> str:
    """How much slower a step is on each faulty network than on the clean one."""
    base = clean["total"]["p50_s"]
    slower = [
        f"{shown_network(network)} {times(row['total']['p50_s'] / base)}"
        for network, row in layered.items()
        if row is not clean and base and row["total"]["p50_s"]
    ]
    return f"A median step takes, compared with the clean network: {joined(slower)}." if slower else ""
