"""Blocks of docs/comparison.md: parity of every axis on every kind of model, and activations kept or not."""

from __future__ import annotations

from typing import Any

from measured_figures.markdown import load_record, ms, paragraph, source, table

_RESULTS = {"refused": "refused", "n/a": "n/a", "different": "**different**", "failed": "**failed**"}


def axes_grid() -> str:
    return _grid("axes_grid")


def axes_grid_gpu() -> str:
    return _grid("axes_grid_gpu")


def _grid(name: str) -> str:
    record = load_record(name)
    rows: list[dict[str, Any]] = record["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    lines = [
        (axis, *(_cell([row for row in rows if (row["axis"], row["model"]) == (axis, model)]) for model in models))
        for axis in axes
    ]
    counts = {result: sum(row["result"] == result for row in rows) for result in ("equal", *_RESULTS)}
    errors = [row["error"] for row in rows if row["result"] == "equal"]
    wide = sum(row["result"] == "equal" and row["error"] > 1e-5 for row in rows)
    text = (
        f"Of {len(rows)} cases {counts['equal']} equal the single-device baseline, with a largest relative error of "
        f"{max(errors):.1e}{f' ({wide} above 1e-5, within the rounding sensitivity of the tensor)' if wide else ''}; "
        f"{counts['different']} differ, {counts['failed']} fail, {counts['refused']} are refused, "
        f"{counts['n/a']} make no sense. Cells: cases that are equal, of those that make sense, and their largest "
        f"error; transformers {record['versions']['transformers']}.{_earlier_runs(record)}"
    )
    reasons = "".join(f"- {reason}\n" for reason in _reasons(rows))
    return source(name) + "\n" + table(("axis", *models), lines) + "\n" + paragraph(text) + "\n" + reasons


def _earlier_runs(record: dict[str, Any]) -> str:
    """Cite the earlier runs of a record that was continued, by which most of its cases may have been checked."""
    runs = [
        f"`{run['command']}` ({run['machine']}, transformers {run['versions']['transformers']}, {run['begun'][:10]})"
        for run in record.get("earlier", ())
    ]
    return f" The command above checked {record['checked']} cases, the others: {'; '.join(runs)}." if runs else ""


def _cell(rows: list[dict[str, Any]]) -> str:
    """Write the cases of one axis and one model: sizes, with and without pipeline, training and inference."""
    sensible = [row for row in rows if row["result"] != "n/a"]
    equal = [row for row in sensible if row["result"] == "equal"]
    if not sensible:
        return "n/a"
    if not equal:
        return ", ".join(sorted({_RESULTS[row["result"]] for row in sensible}))
    others = sorted({_RESULTS[row["result"]] for row in sensible if row["result"] in ("different", "failed")})
    return ", ".join([f"{len(equal)} of {len(sensible)}: {max(row['error'] for row in equal):.0e}", *others])


def _reasons(rows: list[dict[str, Any]]) -> list[str]:
    """List the reasons of refusals, once for each model and axis."""
    found: dict[tuple[str, str], str] = {}
    for row in rows:
        if row["result"] == "refused":
            found.setdefault((row["model"], row["axis"]), row["reason"])
    texts: dict[str, list[str]] = {}
    for (model, axis), reason in found.items():
        texts.setdefault(reason, []).append(f"{model}, {axis}")
    return [f"{'; '.join(names)}: {reason}." for reason, names in texts.items()]


def offload_gpu() -> str:
    record = load_record("offload_gpu")
    rows = [*record["policies"].values(), *record["mixes"]]
    lines = [
        (
            row["policy"],
            row["recompute"],
            ms(row["step_s"], 1),
            ms(row["forecast_step_s"], 1),
            _gib(row["peak_bytes"]),
            _gib(row["forecast_peak_bytes"]),
            _gib(row["limit_bytes"]) if "limit_bytes" in row else "–",
            f"{row['ratio']:.2f} × {row['best_uniform']}" if "ratio" in row else "–",
            "verified" if row["equal"] else "**different**",
        )
        for row in rows
    ]
    head = ("policy", "not kept", "step", "forecast", "peak", "forecast", "limit", "speed-up over the best", "parity")
    text = (
        f"A Llama of {record['layers']} layers of width {record['width']}, {record['batch']} sequences of "
        f"{record['length']} tokens, bfloat16. Copies to and from the host: "
        f"{record['host_bytes_per_s'] / 1e9:.0f} GB/s. A mix is solved for its limit, and compared with the fastest "
        "uniform policy whose peak is within it."
    )
    return source("offload_gpu") + "\n" + table(head, lines) + "\n" + paragraph(text)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def memory_of_parts() -> str:
    return _memory_of_parts("memory_of_parts")


def memory_of_parts_resumed() -> str:
    return _memory_of_parts("memory_of_parts_resumed")


def _memory_of_parts(name: str) -> str:
    record = load_record(name)
    lines = []
    for rank, row in enumerate(record["workers"]):
        sizes = [f"{row[key] / 2**30:.2f} GiB" for key in ("part_bytes", "peak_bytes", "import_bytes")]
        lines.append((str(rank), *sizes, f"{row['peak_bytes'] / row['part_bytes']:.2f} ×"))
    weights = record["parameters"] * 2 / 2**30
    text = (
        f"{record['parameters'] / 1e9:.2f} billion parameters in bfloat16, {weights:.2f} GiB of weights; "
        f"`{record['mesh']}`. The peak is VmHWM; "
        f"{record['worst']:.2f} × the part at most, {record['limit']:.1f} × is the limit. *Imports*: "
        "the part of the peak that Python, torch and transformers take."
    )
    head = ("worker", "its part", "peak", "imports", "peak / part")
    return source(name) + "\n" + table(head, lines, right=True) + "\n" + paragraph(text)
