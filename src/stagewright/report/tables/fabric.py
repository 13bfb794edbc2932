"""A fabric run as tables: layers with their tails, nccl-tests' columns, pairs, and two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from stagewright.quantity import format_bytes, format_s

__all__ = ["change_table", "fabric_remarks", "fabric_table", "nccl_lines", "pair_table"]

_COLUMNS = (
    ("p50", "p50_s"),
    ("p90", "p90_s"),
    ("p95", "p95_s"),
    ("p99", "p99_s"),
    ("p99.9", "p999_s"),
    ("max", "max_s"),
)


def fabric_table(result: Mapping[str, Any], title: str) -> Table:
    """One row a layer, in the order of sending, and the whole trial; – is what the samples can't support."""
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title_justify="left")
    table.add_column("layer", style="bold", no_wrap=True)
    for name in ("bytes", "trials", *(name for name, _ in _COLUMNS), "jitter", "busbw", "ideal", "floor"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for layer in result["layers"]:
        share = layer["share_of_ideal"]
        marks = [_WORDS[mode["kind"]] for mode in layer["modes"]]
        table.add_row(
            escape(layer["name"]),
            str(layer["bytes"]),
            str(layer["samples"]),
            *(_time(layer[key]) for _, key in _COLUMNS),
            _time(layer["jitter_s"]),
            _rate(layer["busbw_bytes_per_s"]),
            "–" if share is None else f"{share:.0%}",
            _time(layer["floor_s"]),
            ", ".join(marks) if not layer["wrong"] else f"[red]{layer['wrong']} wrong[/red]",
        )
    if len(result["layers"]) > 1:
        total = result["total"]
        table.add_row(
            "whole trial",
            str(sum(layer["bytes"] for layer in result["layers"])),
            str(total["samples"]),
            *(_time(total[key]) for _, key in _COLUMNS),
            _time(total["jitter_s"]),
            *[""] * 4,
        )
    return table


_WORDS = {
    "retransmission-timeout": "timeouts",
    "rate": "rate",
    "latency": "latency",
    "straggler": "straggler",
    "host": "this host",
}


def fabric_remarks(result: Mapping[str, Any]) -> list[str]:
    """What the table does not say: who and why, in sentences."""
    verdict = result["verdict"]
    lines = [f"verdict: {verdict['sentence']}" + "".join(f"; {line}" for line in verdict["evidence"])]
    seen: dict[str, list[str]] = {}
    for layer in result["layers"]:
        for mode in layer["modes"]:
            seen.setdefault(f"{_WORDS[mode['kind']]}: {mode['sentence']}", []).append(layer["name"])
    for sentence, names in seen.items():
        lines.append(f"{', '.join(names[:6])}{', …' if len(names) > 6 else ''}: {sentence}")
    checked = f"{result['trials']} trials"
    lines.append(
        f"every sum of {checked} was checked and is right"
        if result["verified"]
        else f"NOT verified: {checked} were checked"
    )
    if result["void"]:
        lines.append(f"{result['void']} of {checked} don't count: the lab's switch was late")
    if result["latency_s"] is not None:
        lines.append(
            f"ideal: latency {format_s(result['latency_s'])} and {_rate(result['bytes_per_s'])} of the best pair alone"
        )
    if {host["host"] for host in result["hosts"]} == {"127.0.0.1"}:
        lines.append("floor: all ranks share this machine's loopback, so these times are what the host itself costs")
    if result["projected_s"] is not None:
        ideal = result["projected_ideal_s"]
        beside = "" if ideal is None else f" (ideal {format_s(ideal)})"
        lines.append(f"the whole job would spend {format_s(result['projected_s'])}{beside} on these messages")
    return lines


def nccl_lines(result: Mapping[str, Any]) -> list[str]:
    """nccl-tests' own columns, for programs that read these: times in µs, rates in GB/s, out of place only."""
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
    """What each pair showed alone: row sends to column, rate and one-way latency."""
    table = Table(title="pairs alone: rate, one way", box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("from", style="bold", no_wrap=True)
    for rank in range(num_ranks):
        table.add_column(f"to {rank}", justify="right", no_wrap=True)
    cells = {(pair["source"], pair["destination"]): pair for pair in pairs}
    for source in range(num_ranks):
        row = []
        for destination in range(num_ranks):
            pair = cells.get((source, destination))
            row.append("" if pair is None else f"{_rate(pair['bytes_per_s'])}, {format_s(pair['latency_s'])}")
        table.add_row(str(source), *row)
    return table


def change_table(changes: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Two runs, a row a layer."""
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title_justify="left")
    table.add_column("layer", style="bold", no_wrap=True)
    for name in ("bytes", "p50", "then", "ratio (95 %)", "", "p99", "then", "ratio (95 %)", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for change in changes:
        table.add_row(
            escape(change["name"]),
            str(change["num_bytes"]),
            _time(change["first_p50_s"]),
            _time(change["second_p50_s"]),
            *_change(change, ""),
            _time(change["first_p99_s"]),
            _time(change["second_p99_s"]),
            *_change(change, "tail_"),
        )
    return table


def _change(change: Mapping[str, Any], what: str) -> tuple[str, str]:
    ratio = change[f"{what}ratio"]
    if ratio is None:
        return "–", ""
    told = f"{ratio:.2f} × ({change[f'{what}ratio_low']:.2f} – {change[f'{what}ratio_high']:.2f})"
    return told, "alike" if not change[f"{what}differs"] else "slower" if ratio > 1 else "faster"


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else format_s(seconds)


def _rate(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return "–"
    return f"{bytes_per_s * 8e-9:.3g} Gbit/s" if bytes_per_s >= 125e6 else f"{bytes_per_s * 8e-6:.3g} Mbit/s"


def size_words(num_bytes: int) -> str:
    """A size as a legend shows it."""
    return f"{num_bytes} B" if num_bytes < 10_000 else format_bytes(num_bytes)
