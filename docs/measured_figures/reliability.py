"""Blocks of docs/reliability.md."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from measured_figures.markdown import load_record, ms, paragraph, signed, source, table

_CHECKS = ("in_time", "named", "exit_code", "no_orphans", "nothing_lost", "same_losses")


def faults() -> str:
    record = load_record("faults")
    rows: list[dict[str, Any]] = record["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in sorted(rows, key=lambda row: row["kind"].lower())))
    lines = [_kind_line(kind, [row for row in rows if row["kind"] == kind]) for kind in kinds]
    right = sum(row["ok"] for row in rows)
    resumed = [row for row in rows if row["resumed"]]
    same = sum(row["same_losses"] for row in resumed)
    left = record["faults"] - len(rows)
    machines = Counter(row["machine"] for row in rows)
    ran = " and ".join(f"{count} on {machine}" for machine, count in machines.most_common())
    text = (
        f"Seed {record['seed']}: {right} of {len(rows)} faults ended as wanted"
        f"{f'; {left} have not been run' if left else ''}. {same} of the {len(resumed)} runs that had a checkpoint and "
        f"were resumed had exactly the losses of an uninterrupted run. The time limit of hangs was "
        f"{record['hang_s']:g} s. {ran}."
    )
    head = ("fault", "runs", "as wanted", "end, median", "end, longest", "resumed", "not as wanted")
    return source("faults") + "\n" + table(head, lines) + "\n" + paragraph(text)


def _kind_line(kind: str, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    times = [row["end_s"] for row in rows]
    wrong = [
        f"{row['moment']}, {row['plan']}: {', '.join(check.replace('_', ' ') for check in _CHECKS if not row[check])}"
        for row in rows
        if not row["ok"]
    ]
    return (
        kind,
        str(len(rows)),
        str(sum(row["ok"] for row in rows)),
        f"{statistics.median(times):.1f} s",
        f"{max(times):.1f} s",
        str(sum(row["resumed"] for row in rows)),
        "; ".join(wrong) or "–",
    )


def two_machines() -> str:
    record = load_record("two_machines")
    lines = [
        (
            f"{row['gbits']:g} Gbit/s",
            f"{row['link_bytes_per_s'] * 8 / 1e9:.3g} Gbit/s, {row['link_latency_s'] * 1e6:.0f} µs",
            _plan_text(plan),
            "yes" if plan["chosen"] else "",
            ms(plan["forecast_s"]),
            ms(plan["measured_s"]),
            signed(plan["error"]),
            "verified" if plan["equal"] else "different",
        )
        for row in record["rows"]
        for plan in row["plans"]
    ]
    head = ("cable", "measured link", "plan", "chosen", "forecast", "measured", "error", "parity")
    dead = record["dead_link"]
    about = (
        f"`{record['model']}` with images of {record['image_size']} × {record['image_size']}, batch {record['batch']}; "
        f"each plan ran {record['runs']} times for {record['steps']} steps, and the median of the runs is shown. "
        f"The cable of another run was cut in its first step: it ended after {dead['end_s']:.1f} s (limit 10 s) with"
    )
    message = f"```text\n{dead['error']}\n```\n"
    return source("two_machines") + "\n" + table(head, lines) + "\n" + paragraph(about) + "\n" + message


def _plan_text(row: dict[str, Any]) -> str:
    parts = [f"`{row['mesh']}`" + (" (FSDP)" if row["shard"] else "")]
    if row["microbatches"] > 1:
        parts.append(f"{row['microbatches']} micro-batches")
    if row["schedule"]:
        parts.append(row["schedule"])
    return ", ".join(parts)


def resume_matrix() -> str:
    record = load_record("resume_matrix")
    layouts = list(record["pairs"])
    lines = [(before, *(f"{record['pairs'][before][after]:.0e}" for after in layouts)) for before in layouts]
    text = (
        f"The largest relative difference of a loss is {record['worst']:.1e}, and that of an optimizer state "
        f"{record['worst_state']:.1e}; both may be {record['tolerance']:.0e}. Without optimizer states the losses "
        f"would differ by {record['without_states']:.1e}."
    )
    return source("resume_matrix") + "\n" + table(("saved under", *layouts), lines) + "\n" + paragraph(text)


_TARGETS = {
    "events": "events, memory, clock of a trace",
    "checkpoint": "checkpoint: index and safetensors",
    "profile": "profile cache",
    "codec": "codec bytes",
    "wire": "fabric messages and handshake",
    "Chakra": "Chakra trace",
    "live page": "requests of the live page",
    "watch": "live view (`watch`)",
    "runs": "list of runs",
    "index": "index of runs",
}


def damaged_input() -> str:
    record = load_record("damaged_input")
    lines = [
        (
            _TARGETS.get(row["name"], row["name"]),
            f"{row['num_cases']:,}",
            str(row["num_wrong"]),
            f"{row['slowest_s']:.2f} s",
            f"{row['grown_bytes'] / 2**20:.0f} MiB",
        )
        for row in record["rows"]
    ]
    head = ("target", "cases", "other than a clear error", "slowest, CPU time", "memory")
    return source("damaged_input") + "\n" + table(head, lines, right=True)
