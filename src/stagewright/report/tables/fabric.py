"""A fabric run as tables: layers with their latency tails, nccl-tests columns, pairs, and two runs compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.table import Cell, Column, Table, number_columns, text_columns

_PERCENTILES = {"p50": "p50_s", "p90": "p90_s", "p95": "p95_s", "p99": "p99_s", "p99.9": "p999_s", "max": "max_s"}
_MODES = {
    "retransmission-timeout": "timeouts",
    "rate": "rate",
    "latency": "latency",
    "straggler": "straggler",
    "host": "this host",
}


def fabric_table(result: Mapping[str, Any], title: str) -> Table:
    """Tabulate the layers in the order they are sent, and the whole trial; – marks what has too few samples."""
    rows: list[tuple[str | Cell, ...]] = []
    for layer in result["layers"]:
        share = layer["share_of_ideal"]
        modes = ", ".join(_MODES[mode["kind"]] for mode in layer["modes"])
        rows.append(
            (
                layer["name"],
                str(layer["bytes"]),
                str(layer["samples"]),
                *(_format_time(layer[key]) for key in _PERCENTILES.values()),
                _format_time(layer["jitter_s"]),
                _format_rate(layer["busbw_bytes_per_s"]),
                "–" if share is None else f"{share:.0%}",
                _format_time(layer["floor_s"]),
                Cell(f"{layer['wrong']} wrong", "bad") if layer["wrong"] else modes,
            )
        )
    if len(result["layers"]) > 1:
        total = result["total"]
        rows.append(
            (
                "whole trial",
                str(sum(layer["bytes"] for layer in result["layers"])),
                str(total["samples"]),
                *(_format_time(total[key]) for key in _PERCENTILES.values()),
                _format_time(total["jitter_s"]),
                *[""] * 4,
            )
        )
    names = ("bytes", "trials", *_PERCENTILES, "jitter", "busbw", "ideal", "floor")
    return Table(
        title=title, columns=(*text_columns("layer"), *number_columns(*names), *text_columns("")), rows=tuple(rows)
    )


def fabric_remarks(result: Mapping[str, Any]) -> list[str]:
    """Explain the table in sentences: the verdict, the causes, the checks and the projected cost."""
    verdict = result["verdict"]
    lines = [f"verdict: {verdict['sentence']}" + "".join(f"; {line}" for line in verdict["evidence"])]
    layers_by_mode: dict[str, list[str]] = {}
    for layer in result["layers"]:
        for mode in layer["modes"]:
            layers_by_mode.setdefault(f"{_MODES[mode['kind']]}: {mode['sentence']}", []).append(layer["name"])
    for sentence, names in layers_by_mode.items():
        lines.append(f"{', '.join(names[:6])}{', …' if len(names) > 6 else ''}: {sentence}")
    trials = f"{result['trials']} trials"
    lines.append(
        f"the results of all {trials} were checked and are correct"
        if result["verified"]
        else f"NOT verified: {trials} were checked"
    )
    if result["void"]:
        lines.append(f"{result['void']} of {trials} don't count: the lab's switch was late")
    if result["latency_s"] is not None:
        rate = _format_rate(result["bytes_per_s"])
        lines.append(f"ideal: latency {format_s(result['latency_s'])} and {rate} of the best pair alone")
    if {host["host"] for host in result["hosts"]} == {"127.0.0.1"}:
        lines.append("floor: all ranks share this machine's loopback, so these times are the overhead of the host")
    if result["projected_s"] is not None:
        ideal = result["projected_ideal_s"]
        detail = "" if ideal is None else f" (ideal {format_s(ideal)})"
        lines.append(f"the whole job would spend {format_s(result['projected_s'])}{detail} on these messages")
    return lines


def nccl_lines(result: Mapping[str, Any]) -> list[str]:
    """Format the columns of nccl-tests for programs that parse them: times in µs, rates in GB/s, out of place only."""
    lines = [
        f"# {result['ranks']} ranks, engine {result['engine']}",
        "#",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)",
    ]
    rates = []
    for layer in result["layers"]:
        item = 4 if layer["bytes"] % 4 == 0 else 1
        reduces = layer["algorithm"] not in ("all-gather", "all-to-all", "broadcast", "pipeline")
        time_us = layer["p50_s"] * 1e6 if layer["p50_s"] is not None else float("nan")
        algbw = (layer["algbw_bytes_per_s"] or float("nan")) / 1e9
        busbw = (layer["busbw_bytes_per_s"] or float("nan")) / 1e9
        rates.append(busbw)
        lines.append(
            f"{layer['bytes']:12d}  {layer['bytes'] // item:12d}  {'float' if item == 4 else 'uint8':>8}"
            f"  {'sum' if reduces else 'none':>6}  {0 if layer['algorithm'] == 'broadcast' else -1:6d}"
            f"  {time_us:7.1f}  {algbw:6.3f}  {busbw:6.3f} {layer['wrong']:6d}"
        )
    average = sum(rates) / len(rates) if rates else float("nan")
    wrong = sum(layer["wrong"] for layer in result["layers"])
    lines += [
        f"# Out of bounds values : {wrong} {'OK' if not wrong else 'FAILED'}",
        f"# Avg bus bandwidth    : {average:g}",
    ]
    return lines


def pair_table(pairs: Sequence[Mapping[str, Any]], num_ranks: int) -> Table:
    """Tabulate rate and one-way latency of each pair measured alone; the row sends to the column."""
    pair_by_ranks = {(pair["source"], pair["destination"]): pair for pair in pairs}

    def format_pair(source: int, destination: int) -> str:
        pair = pair_by_ranks.get((source, destination))
        return "" if pair is None else f"{_format_rate(pair['bytes_per_s'])}, {format_s(pair['latency_s'])}"

    return Table(
        title="pairs alone: rate, one-way latency",
        columns=(*text_columns("from"), *number_columns(*(f"to {rank}" for rank in range(num_ranks)))),
        rows=tuple(
            (str(source), *(format_pair(source, destination) for destination in range(num_ranks)))
            for source in range(num_ranks)
        ),
    )


def change_table(changes: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Tabulate the change of each layer from the first run to the second."""
    names = ("bytes", "p50", "then", "ratio (95 %)", "", "p99", "then", "ratio (95 %)", "")
    return Table(
        title=title,
        columns=(*text_columns("layer"), *(Column(name, align="right" if name else "left") for name in names)),
        rows=tuple(
            (
                change["name"],
                str(change["num_bytes"]),
                _format_time(change["first_p50_s"]),
                _format_time(change["second_p50_s"]),
                *_format_change(change, ""),
                _format_time(change["first_p99_s"]),
                _format_time(change["second_p99_s"]),
                *_format_change(change, "tail_"),
            )
            for change in changes
        ),
    )


def layer_label(layer: Mapping[str, Any]) -> str:
    """Name a layer for a legend, with its size."""
    name, size = layer["name"], layer["bytes"]
    if name == f"{size} B":
        return str(name)
    return f"{name} ({f'{size} B' if size < 10_000 else format_bytes(size)})"


def select_layers(layers: list[tuple[dict[str, Any], Any]], most: int) -> list[tuple[dict[str, Any], Any]]:
    """Select distinguishable layers with their trials, evenly from the smallest to the largest."""
    if len(layers) <= most:
        return layers
    ordered = sorted(layers, key=lambda item: int(item[0]["bytes"]))
    return [ordered[round(index * (len(ordered) - 1) / (most - 1))] for index in range(most)]


def _format_change(change: Mapping[str, Any], prefix: str) -> tuple[str, str]:
    ratio = change[f"{prefix}ratio"]
    if ratio is None:
        return "–", ""
    interval = f"{change[f'{prefix}ratio_low']:.2f} – {change[f'{prefix}ratio_high']:.2f}"
    verdict = "no change" if not change[f"{prefix}differs"] else "slower" if ratio > 1 else "faster"
    return f"{ratio:.2f} × ({interval})", verdict


def _format_time(seconds: float | None) -> str:
    return "–" if seconds is None else format_s(seconds)


def _format_rate(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return "–"
    return f"{bytes_per_s * 8e-9:.3g} Gbit/s" if bytes_per_s >= 125e6 else f"{bytes_per_s * 8e-6:.3g} Mbit/s"
