"""The block of docs/capture-libraries.md."""

from __future__ import annotations

import statistics
from typing import Any

from measured_figures.markdown import load_record, paragraph, source, table

_CASES = ("eval", "train")
_DISTRIBUTIONS = {
    "diffusers": "diffusers",
    "x-transformers": "x-transformers",
    "timm": "timm",
    "torchvision": "torchvision",
    "MONAI": "monai",
    "changed models": "torch",
    "PEFT": "peft",
}
"""Group of models → library whose version is shown."""
_MAX_REMARK = 400

Row = dict[str, Any]


def capture_libraries() -> str:
    record = load_record("capture_libraries")
    rows: list[Row] = record["models"]
    groups = {
        group: [row for row in rows if row["group"] == group] for group in dict.fromkeys(r["group"] for r in rows)
    }
    slow = [row for row in rows if _is_slow(row)]
    text = (
        f"**{_count(rows, 'eval')} of {len(rows)}** models pass in eval mode and **{_count(rows, 'train')} of "
        f"{len(rows)}** in train mode; capture refuses {sum(map(_is_refused, rows))} with a reason. "
        f"Gradients through three stages are bit-identical too for {_count_exact(rows)}. "
        f"{_missing_text(record, rows)}transformers "
        f"{record['versions']['transformers']}, Lightning {record['versions']['lightning']}. {_slow_text(rows, slow)}"
    )
    summary = [
        _summary(group, members, record["listed"][group], record["versions"]) for group, members in groups.items()
    ]
    head = ("library", "version", "models run", "pass, eval", "pass, train", "refused", "capture, median", "longest")
    parts = [source("capture_libraries"), paragraph(text), table(head, summary, right=True)]
    for group, members in groups.items():
        parts += [f"## {group[0].upper() + group[1:] if ' ' in group else group}\n", _details(members)]
    return "\n".join(parts)


def detectors() -> str:
    record = load_record("detectors")
    rows: list[Row] = [row for row in record["models"] if len(row["plans"]) == len(record["models"][0]["plans"])]
    results = [result for row in rows for result in row["plans"].values()]
    num_equal = sum(result["verdict"] == "equal" for result in results)
    text = (
        f"torchvision {record['torchvision']}: {num_equal} of {len(results)} plans pass the parity check. "
        "Cells are the largest relative error."
    )
    lines = [(row["name"], *map(_error, row["plans"].values())) for row in rows]
    head = ("detector", *rows[0]["plans"])
    return source("detectors") + "\n" + paragraph(text) + "\n" + table(head, lines, right=True)


def _error(result: Row) -> str:
    if result["verdict"] != "equal":
        return f"✗ {result['verdict']}"
    return "0" if result["difference"] == 0 else f"{result['difference']:.0e}"


def _missing_text(record: Row, rows: list[Row]) -> str:
    num_missing = sum(record["listed"].values()) - len(rows)
    return f"{num_missing} other models of the benchmark have not been run. " if num_missing else ""


def _slow_text(rows: list[Row], slow: list[Row]) -> str:
    text = (
        f"Capture takes {_seconds(statistics.median(_times(rows)))} (median over both modes). Its limit is three times "
        "the model's own forward and backward, and 5 s; "
    )
    if not slow:
        return text + "no model takes longer."
    names = ", ".join(f"{row['name']} ({_seconds(max(_times([row])))})" for row in slow)
    return text + f"{len(slow)} of {len(rows)} exceed it: {names}."


def _summary(group: str, rows: list[Row], listed: int, versions: dict[str, str]) -> tuple[str, ...]:
    times = _times(rows)
    return (
        f"[{group}](#{group.lower().replace(' ', '-')})",
        versions[_DISTRIBUTIONS[group]],
        f"{len(rows)} of {listed}",
        str(_count(rows, "eval")),
        str(_count(rows, "train")),
        str(sum(map(_is_refused, rows))),
        _seconds(statistics.median(times)) if times else "–",
        _seconds(max(times)) if times else "–",
    )


def _details(rows: list[Row]) -> str:
    head = ("model", "class", "units", "crossing", "capture", "step", "eval", "train", "remark")
    body = table(head, [[cell.replace("|", "\\|") for cell in _cells(row)] for row in rows])
    return f'<details markdown="1"><summary>{len(rows)} models</summary>\n\n{body}\n</details>\n'


def _cells(row: Row) -> list[str]:
    train = row["train"]
    is_captured = train["num_calls"] > 0
    return [
        row["name"],
        row["class"],
        str(train["num_calls"]) if is_captured else "–",
        f"{train['num_crossing']}, {train['crossing_bytes']} B" if is_captured else "–",
        _shown(train, "capture") if is_captured else "–",
        _shown(train, "step"),
        *(_mark(row[case]) for case in _CASES),
        _remark(row),
    ]


def _remark(row: Row) -> str:
    """Join notes of capture and reasons, each once, with the modes of a reason."""
    modes_of: dict[str, list[str]] = {}
    for case in _CASES:
        if row[case]["reason"]:
            modes_of.setdefault(row[case]["reason"], []).append(case)
    notes = [row[case]["remark"] for case in _CASES if row[case]["remark"]]
    reasons = [text if len(modes) == len(_CASES) else f"{modes[0]}: {text}" for text, modes in modes_of.items()]
    parts = [_shorten(part) for part in dict.fromkeys([*notes, *reasons])]
    return "; ".join(parts)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_REMARK else text[: _MAX_REMARK - 1] + "…"


def _mark(outcome: Row) -> str:
    return "✓" if outcome["passed"] else "refused" if outcome["refused"] else "✗"


def _count(rows: list[Row], case: str) -> int:
    return sum(row[case]["passed"] for row in rows)


def _count_exact(rows: list[Row]) -> int:
    return sum(row["train"]["passed"] and row["train"]["stages_equal"] for row in rows)


def _is_refused(row: Row) -> bool:
    return any(row[case]["refused"] for case in _CASES)


def _times(rows: list[Row]) -> list[float]:
    return [_time(row[case], "capture") for row in rows for case in _CASES if row[case]["num_calls"]]


def _is_slow(row: Row) -> bool:
    """Whether capture takes longer than three times the model's forward and backward, and 5 s."""
    return max(_times([row]), default=0.0) > 3 * _time(row["train"], "step") + 5


def _time(outcome: Row, what: str) -> float:
    """Return a CPU time; the elapsed time, which is longer, where only that was measured."""
    seconds: float = outcome[f"{what}_cpu_s"] or outcome.get(f"{what}_s", 0.0)
    return seconds


def _shown(outcome: Row, what: str) -> str:
    is_elapsed = not outcome[f"{what}_cpu_s"] and outcome.get(f"{what}_s", 0.0) > 0
    return _seconds(_time(outcome, what)) + (" †" if is_elapsed else "")


def _seconds(value: float) -> str:
    return f"{value:.2f} s"
