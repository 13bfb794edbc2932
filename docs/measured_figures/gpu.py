"""Blocks of runs on one GPU."""

from __future__ import annotations

import statistics
from typing import Any

from measured_figures.markdown import load_record, paragraph, percent, signed, source, spread, table

_ROWS = {
    "plain eager": "plain torch loop",
    "serial, eager": "`stagewright`, serial",
    "plain compiled": "plain torch loop, `torch.compile`",
    "serial, compiled": "`stagewright`, serial, `--compile stages`",
    "plain eager, 8 micro-batches": "plain torch loop, 8 micro-batches of 2",
    "two stages, eager": "two stages in one process, 8 micro-batches of 2",
    "two stages, units compiled": "the same, `--compile units`",
    "two stages, stages compiled": "the same, `--compile stages`",
}


def gpu_table() -> str:
    rows = load_record("gpu_table_h200")["rows"]
    lines = [
        (
            text,
            f"{rows[name]['step_ms']:.1f} ms",
            f"{rows[name]['samples_per_s']:.1f}",
            f"{rows[name]['peak_gib']:.1f} GiB",
        )
        for name, text in _ROWS.items()
    ]
    forecast, after = rows["forecast of the same plan"], rows["compare serial"]
    text = (
        f"The forecast of the serial plan is {signed(forecast['forecast_error'])} off, its memory "
        f"{signed(forecast['memory_error'])}. `compare` of it takes {after['seconds']:.0f} s from the "
        f"command to its table, most of it imports; a plain script reaches its first step after "
        f"{rows['plain eager']['since_start_s']:.0f} s. Between two actions of a schedule the engine takes "
        f"{forecast['overhead_per_action_us']:.0f} µs of the host's time."
    )
    head = ("what", "step", "samples/s", "peak memory")
    return source("gpu_table_h200") + "\n" + table(head, lines, right=True) + "\n" + paragraph(text)


_NAMES = {"gpu_forecasts:llama_317m": "Llama 317 M", "gpu_forecasts:llama_1b": "Llama 1.1 B"}


def gpu_model_forecasts() -> str:
    records = ("gpu_forecasts_models_h200", "gpu_forecasts_more_h200")
    rows = [row for name in records for row in load_record(name)["rows"]]
    lines = [
        (_NAMES.get(row["plan"]["model"], row["plan"]["model"]), _describe(row["plan"]), *_forecast_cells(row))
        for row in rows
    ]
    head = ("model", "plan", "step", "forecast", "peak memory", "forecast")
    errors = [[abs(row[key]) for row in rows] for key in ("time_error", "memory_error")]
    time, memory = (
        f"{100 * statistics.mean(part):.1f} % on average, {100 * max(part):.1f} % at worst" for part in errors
    )
    text = f"Steps are off by {time}; peak memory by {memory}."
    return "\n".join(source(name) for name in records) + "\n" + table(head, lines, right=True) + "\n" + paragraph(text)


def gpu_forecasts() -> str:
    records = ("gpu_forecasts_h200", "gpu_forecasts_stages_h200", "gpu_forecasts_passes_h200")
    found = [row for name in records for row in load_record(name)["rows"] if row["plan"]["model"] in _NAMES]
    # The last record has a plan's newest row; the others' precision and recomputation are in the table of models.
    newest = {_describe(row["plan"]): row for row in found if "microbatches" in row["plan"]}
    newest["batch 16"] = next(row for row in found if _describe(row["plan"]) == "batch 16")
    rows = sorted(newest.values(), key=lambda row: -row["measured"]["step_s"])
    lines = [(_describe(row["plan"]), *_forecast_cells(row)) for row in rows]
    head = ("plan", "step", "forecast", "peak memory", "forecast")
    step_s = {_describe(row["plan"]): row["measured"]["step_s"] for row in rows}
    eager, graphs, both, stages = (
        step_s[f"batch 16, 8 micro-batches{text}"]
        for text in ("", ", CUDA graphs", ", compiled, CUDA graphs", ", compiled, CUDA graphs, two stages")
    )
    compiled_s = load_record("gpu_table_h200")["rows"]["plain compiled"]["step_ms"] / 1e3
    text = (
        f"CUDA graphs make 8 micro-batches {eager / graphs:.1f} × as fast, with compiled stages {eager / both:.1f} ×. "
        f"Both together reach {percent(compiled_s / both)} of the throughput of a plain loop with `torch.compile` and "
        "the whole batch ([above](#one-gpu-eager-and-compiled), another day). Two stages take "
        f"{stages / both:.2f} times as long as one. Forecasts do not count that each slot has its own working memory."
    )
    return "\n".join(source(name) for name in records) + "\n" + table(head, lines, right=True) + "\n" + paragraph(text)


def _forecast_cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return step and peak memory, each with the error of its forecast."""
    return (
        f"{1e3 * row['measured']['step_s']:.1f} ms",
        signed(row["time_error"]),
        f"{row['measured']['peak_memory_bytes'] / 2**30:.2f} GiB",
        signed(row["memory_error"]),
    )


def _describe(plan: dict[str, Any]) -> str:
    parts = [f"batch {plan['batch']}"]
    parts += [f"{plan['microbatches']} micro-batches"] if "microbatches" in plan else []
    parts += [] if plan["precision"] == "bf16" else [plan["precision"]]
    parts += ["recomputed"] if "recompute" in plan else []
    parts += ["compiled"] if "compile" in plan else []
    parts += ["CUDA graphs"] if plan.get("cuda_graphs") else []
    parts += ["two stages"] if "cuts" in plan else []
    return ", ".join(parts)


def gpu_shares() -> str:
    parts = ("speed-up", "of its bound", "limit")
    head = (
        "plan",
        "workers",
        "batch",
        *(f"training: {part}" for part in parts),
        *(f"inference: {part}" for part in parts),
    )
    records = ("gpu_shares_h200", "gpu_shares_sharded_h200", "gpu_shares_products_h200", "gpu_shares_overlapped_h200")
    rows = [row for name in records for row in load_record(name)["rows"] if row["workers"] > 1]
    limits = {
        (row["strategy"], row["workers"], row["training"]): percent(row["share_of_bound"])
        for row in load_record("gpu_share_limits_h200")["rows"]
    }
    plans: dict[tuple[str, int, int], dict[bool, tuple[str, str, str]]] = {}
    for row in rows:  # the last record with a plan counts
        plan = f"{row['strategy']}{', FSDP' if row['shard'] else ''}", row["workers"], row["batch"]
        limit = limits.get((row["strategy"], row["workers"], row["training"]), "")
        figures = f"{row['speedup']:.2f} ×", percent(row["share_of_bound"]), limit
        plans.setdefault(plan, {})[row["training"]] = figures
    empty = ("", "", "")
    lines = [
        (name, str(workers), str(batch), *found.get(True, empty), *found.get(False, empty))
        for (name, workers, batch), found in plans.items()
    ]
    sources = "\n".join(source(name) for name in (*records, "gpu_share_limits_h200"))
    return sources + "\n" + table(head, lines, right=True)


def gpu_shares_microbatches() -> str:
    """Pipelines over one share with the same micro-batches, so that smaller matrices are no cost of the pipeline."""
    records = {"bfloat16": "gpu_shares_microbatches_h200", "float32": "gpu_shares_float32_h200"}
    lines = []
    for precision, name in records.items():
        rows = load_record(name)["rows"]
        alone_s = {row["training"]: row["latency_s"] for row in rows if row["microbatches"] > 1 and row["workers"] == 1}
        lines += [
            (
                f"{precision}, {'training' if row['training'] else 'inference'}",
                str(row["workers"]),
                f"{row['bound']:.2f}",
                f"{row['speedup']:.2f} ×, {percent(row['share_of_bound'])}",
                f"{alone_s[row['training']] / row['latency_s']:.2f} ×, "
                f"{percent(alone_s[row['training']] / row['latency_s'] / row['bound'])}",
            )
            for row in rows
            if row["strategy"] == "pipeline"
        ]
    head = ("pipeline", "workers", "bound", "over the whole batch, of the bound", "over the same micro-batches")
    return "\n".join(source(name) for name in records.values()) + "\n" + table(head, lines, right=True)


def gpu_share_rounds() -> str:
    """Rounds on shares: the same processes alternate, and serial also runs on all shares at once."""
    records = ("gpu_share_rounds_inference_h200", "gpu_share_rounds_data_h200")
    rows = [row for name in records for row in load_record(name)["rows"]]
    lines = [
        (
            f"{row['axis']}, {row['mode']}",
            str(row["stages"]),
            f"{row['bound']:.2f}",
            spread(row["speedups"]),
            percent(statistics.median(row["speedups"]) / row["bound"]),
            spread(row["stock_speedups"]) if row["stock_speedups"] else "",
            spread(row["ceilings"]),
        )
        for row in rows
    ]
    head = ("plan", "workers", "bound", "Stagewright", "of the bound", "stock", "concurrent serial runs")
    return "\n".join(source(name) for name in records) + "\n" + table(head, lines, right=True)
