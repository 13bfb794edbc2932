"""Benchmark records, and how their values are written in Markdown."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).resolve().parents[1] / "measured"

Record = dict[str, Any]


def load_record(name: str) -> Record:
    record: Record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    rule = ["---", *(["--:" if right else "---"] * (len(head) - 1))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, *rows)).replace("\n", f"\n|{'|'.join(rule)}|\n", 1)


def paragraph(text: str) -> str:
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False) + "\n"


def source(*names: str) -> str:
    """Cite the records of a block: commands, machine, day."""
    records = [load_record(name) for name in names]
    commands = ", ".join(
        f"`{record['command']}` ([record](measured/{name}.json))" for record, name in zip(records, names, strict=True)
    )
    days = sorted({record.get("begun", record.get("ended", ""))[:10] for record in records})
    machines = " and ".join(dict.fromkeys(record["machine"] for record in records))
    return paragraph(f"{commands}; {machines}; {', '.join(days)}.")


def spread(ratios: Sequence[float]) -> str:
    """Format median, lowest and highest: 1.91 × (1.89 to 1.92)."""
    return f"{statistics.median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})"


def signed(ratio: float) -> str:
    """Format a relative difference: +1.4 %, −0.5 %, 0.0 %."""
    text = f"{ratio:+.1%}".replace("%", " %").replace("-", "−")
    return text.replace("+0.0", "0.0").replace("−0.0", "0.0")


def percent(ratio: float, digits: int = 0) -> str:
    return f"{ratio:.{digits}%}".replace("%", " %")


def ms(seconds: float, digits: int = 0) -> str:
    return f"{seconds * 1e3:.{digits}f} ms"


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def size(num_bytes: int) -> str:
    for unit_bytes, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit_bytes:
            return f"{num_bytes // unit_bytes} {unit}"
    return f"{num_bytes} bytes"


def short_time(seconds: float) -> str:
    """Format with three digits: 924 µs, 3.94 ms, 219 ms."""
    value, unit = (seconds * 1e6, "µs") if seconds < 1e-3 else (seconds * 1e3, "ms")
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"
