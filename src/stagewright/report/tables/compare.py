"""Strategies side by side, as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from stagewright.quantity import format_bytes, format_s
from stagewright.report.tables.loss_notes import loss_notes
from stagewright.report.tables.parity_note import DIFFERENCES, unequal_sentence

__all__ = [
    "collective_label",
    "compare_remarks",
    "compare_table",
    "failure_tracebacks",
    "refusal_reason",
    "sent_bytes",
    "strategy_label",
]

_SHORT_S, _LONG_S = 0.05, 0.2
"""A serial step that leaves little to share, and one that leaves enough."""
_WHO = re.compile(r"worker \d+( \([^)]*\))? (refused|failed): ")


def compare_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One row a strategy; a plan that is not equal to serial, was refused or failed says so and has no speed-up."""
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title_justify="left")
    table.add_column("strategy", style="bold", no_wrap=True)
    for name in ("workers", "batch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    for name in ("samples/s", "latency", "speed-up", "bound", "memory", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("equal", no_wrap=True)
    for row in rows:
        chunks = f"{row['batch']} ({row['microbatches']})" if row["microbatches"] > 1 else str(row["batch"])
        head = [escape(strategy_label(row)), str(row["workers"]), chunks, row["schedule"] or "–"]
        if "error" in row:
            table.add_row(*head, *["–"] * 6, "[yellow]refused[/yellow]" if row["refused"] else "[red]failed[/red]")
            continue
        speedup, share, sent = row["speedup"], row["share_of_bound"], sent_bytes(row)
        table.add_row(
            *head,
            f"{row['samples_per_s']:.1f} ±{50 * row['samples_per_s_spread'] / row['samples_per_s']:.0f}%",
            format_s(row["latency_s"]),
            "–" if speedup is None else f"{speedup:.2f} ×",
            "–" if share is None else f"{share:.0%}",
            format_bytes(max(row["peak_memory_bytes"])),
            format_bytes(sent) if sent else "–",
            "[green]yes[/green]" if row["equal"] else "[red]NO[/red]",
        )
    return table


def strategy_label(row: Mapping[str, Any]) -> str:
    """A strategy as a person tells it from others: ``data, sharded``."""
    return f"{row['strategy']}, sharded" if row.get("shard") else str(row["strategy"])


def failure_tracebacks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where in the code failed rows failed, each place once; the rest of their message is in the remarks."""
    errors = [str(row["error"]) for row in rows if "error" in row and not row["refused"]]
    traced = [re.search(r"^Traceback.*|^  File .*", error, re.DOTALL | re.MULTILINE) for error in errors]
    return list(dict.fromkeys(found[0] for found in traced if found is not None))


def sent_bytes(row: Mapping[str, Any]) -> int:
    """Bytes that a step gives to links and collectives, over all workers."""
    links = sum(row["link_bytes"].values())
    return int(links + sum(sum(one.values()) for one in row["collective_bytes"]))


def collective_label(axis: str) -> str:
    """What ``collective_bytes`` counts under a name."""
    return "sums of tied weights" if axis == "tied" else f"{axis} collectives"


def compare_remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each row: how close it is to serial, or why there is none; then what to know about the loss."""
    found = []
    for row in rows:
        label = strategy_label(row)
        if "error" in row:
            if row["refused"]:
                found.append(f"{label} refused: {refusal_reason(str(row['error']))}")
                continue
            first, *rest = str(row["error"]).splitlines()
            found.append(f"{label} failed: {first}")
            found.extend(line for line in rest if line.startswith(("  at: ", "  log: ")))
            continue
        equality = row["equality"]
        worst = max(equality.get(kind, 0.0) for kind in DIFFERENCES)
        if not row["equal"]:
            found.append(unequal_sentence(label, equality))
        else:
            close = "to the last bit" if worst == 0 else f"within {worst:.0e}"
            memory = ", ".join(format_bytes(size) for size in row["peak_memory_bytes"])
            traffic = [f"{size} over cut {cut}" for cut, size in _sizes(row["link_bytes"]).items()]
            traffic += [f"{size} to {collective_label(axis)}" for axis, size in _sizes(_summed(row)).items()]
            sent = f"; a step sends {', '.join(traffic)}" if traffic else ""
            found.append(f"{label}: equal to serial {close}; peak memory of each worker {memory}{sent}")
    return found + [f"note: {line}" for line in (*loss_notes(rows), *_short_step(rows))]


def _short_step(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where strategies lose against a serial step that is over at once: a batch that leaves more to share."""
    serial = next((row for row in rows if row["strategy"] == "serial" and row.get("latency_s")), None)
    if serial is None or serial["latency_s"] >= _SHORT_S:
        return []
    slower = [strategy_label(row) for row in rows if (row.get("speedup") or 1.0) < 0.95]
    if not slower:
        return []
    short = f"serial's step of {serial['batch']} samples takes {format_s(serial['latency_s'])}"
    wanted = 2 ** math.ceil(math.log2(serial["batch"] * _LONG_S / serial["latency_s"]))
    return [
        f"{short}, which leaves little to share: {', '.join(slower)} spent more on starting work and on "
        f"messages; --batch {wanted} tells more"
    ]


def refusal_reason(error: str) -> str:
    """Why something can't be: the sentence alone, whichever worker was the first to say it."""
    return _WHO.sub("", error.partition("\n")[0], count=1)


def _summed(row: Mapping[str, Any]) -> dict[str, int]:
    """Bytes given to the collectives of each axis by all workers."""
    found: dict[str, int] = {}
    for one in row["collective_bytes"]:
        for axis, size in one.items():
            found[axis] = found.get(axis, 0) + size
    return found


def _sizes(sizes: Mapping[str, int]) -> dict[str, str]:
    return {name: format_bytes(size) for name, size in sizes.items() if size}
