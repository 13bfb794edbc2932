"""Tables and figures of the study *memory*."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.studies.framework.phrases import percent
from stagewright.studies.framework.study import Figure, Results
from stagewright.studies.framework.tables import study_table
from stagewright.studies.memory.measured import (
    STRATEGIES,
    Variants,
    baseline_variant,
    checkpointing_savings,
    ideal_speedups,
    is_possible_cost,
    shown_variant,
)
from stagewright.studies.parts.measurements import calibration_note
from stagewright.table import Table


def tables(results: Results, options: Mapping[str, Any], variants: Variants) -> tuple[Table, ...]:
    """Speed and memory, activation checkpointing, actions of the workers, most layers."""
    return (
        _speed_table(results, variants, baseline_variant(results, options)),
        _checkpointing_table(results, variants),
        _actions_table(results),
        _fit_table(results, options),
    )


def figures(options: Mapping[str, Any], variants: Variants) -> tuple[Figure, ...]:
    """Memory and speed-up of every variant."""
    return (
        Figure(
            name="memory",
            caption="Peak memory of the worker with the most, by category, and speed-up over one device.",
            draw=partial(_draw, dict(variants), f"{options['model']} on two devices"),
        ),
    )


def _speed_table(results: Results, variants: Variants, baseline: str) -> Table:
    rows = []
    for variant, measured in variants.items():
        forecast = (results.get(f"forecast-{measured.strategy}") or {}).get(variant)
        ideal = ideal_speedups(results, variants.get(measured.strategy))
        rows.append(
            (
                shown_variant(measured.strategy),
                "yes" if measured.recompute else "no",
                f"{measured.samples_per_s:.1f}",
                f"{measured.speedup:.2f}" if measured.speedup is not None else "–",
                measured.range,
                f"{forecast['speedup']:.2f}" if forecast is not None else "–",
                f"{ideal.free:.2f}" if ideal is not None and not measured.recompute else "–",
                ", ".join(format_bytes(size) for size in measured.peak_bytes),
                format_bytes(measured.memory["activations"]),
                format_bytes(measured.sent_bytes) if measured.sent_bytes else "–",
            )
        )
    columns = ("strategy", "recompute", "samples/s", "speed-up", "range", "forecast", "ideal")
    return study_table(
        "Speed and memory",
        (*columns, "peak memory of each worker", "activations", "communication"),
        rows,
        f"Speed-up: over the fastest single-device run of the same batch ({shown_variant(baseline)}), median over "
        "rounds of the ratio within a round; each run first passed its parity check. Ideal: the measured "
        "compute of the same steps with free communication. Peak memory: the workers' tensors on a CPU, the "
        f"allocator's peak on CUDA. Activations: of the worker with the most memory.{calibration_note(results)}",
    )


def _checkpointing_table(results: Results, variants: Variants) -> Table:
    rows = [
        (
            shown_variant(row.strategy),
            _shown_cost(row.extra_time),
            format_bytes(row.without_bytes),
            format_bytes(row.with_bytes),
            percent(row.saved),
            "measured" if row.extra_time is not None else "forecast",
        )
        for row in checkpointing_savings(results, variants)
    ]
    return study_table(
        "Cost and savings of activation checkpointing",
        ("strategy", "extra time", "memory without", "memory with", "saved", "source"),
        rows,
        "Memory of the worker with the most. One device, data and tensor checkpoint every block, a pipeline its "
        "stages. Forecast: not run with checkpointing.",
    )


def _shown_cost(cost: float | None) -> str:
    """Extra time of a step: a share, – if it was not run, "disturbed" if it is impossible."""
    if cost is None:
        return "–"
    return percent(cost) if is_possible_cost(cost) else "disturbed"


def _actions_table(results: Results) -> Table:
    rows = []
    for strategy in STRATEGIES:
        for variant, workers in (results.get(f"executed-{strategy}") or {}).items():
            for worker in workers:
                kinds = worker["kinds"]
                backwards = sum(int(entry["count"]) for kind, entry in kinds.items() if kind.startswith("backward"))
                counts = [int(kinds.get(kind, {}).get("count", 0)) for kind in ("recompute", "collective", "send")]
                compute_s = sum(
                    entry["seconds"]
                    for kind, entry in kinds.items()
                    if kind in ("forward", "optimizer") or "back" in kind
                )
                rows.append(
                    (
                        shown_variant(variant),
                        str(worker["worker"]),
                        ", ".join(str(stage) for stage in worker["stages"]) or "–",
                        str(int(kinds.get("forward", {}).get("count", 0))),
                        str(backwards),
                        *(str(count) for count in counts),
                        format_s(compute_s),
                    )
                )
    columns = ("strategy", "worker", "stages", "forward", "backward", "recompute", "collectives", "sends", "compute")
    return study_table(
        "Actions of each worker in a step",
        columns,
        rows,
        "From the trace of the step with the median time. The loss of the last stage counts as a forward.",
    )


def _fit_table(results: Results, options: Mapping[str, Any]) -> Table:
    rows = []
    for variant, forecast in (results.get("fit-forecast") or {}).items():
        if forecast["refused"]:
            rows.append((shown_variant(variant), "–", "–", "–", forecast["refused"]))
            continue
        fit = results.get(f"fit-{variant}")
        largest, peak, attempts = "–", "–", "not run"
        if fit is not None:
            largest = f"{fit['largest']}" if fit["is_exact"] else f"{fit['largest']} or more"
            attempts = "; ".join(f"{attempt['layers']}: {_outcome(attempt)}" for attempt in fit["attempts"])
            peaks = [
                format_bytes(max(attempt["peak_memory_bytes"]))
                for attempt in fit["attempts"]
                if attempt["ran"] and attempt["layers"] == fit["largest"]
            ]
            peak = peaks[0] if peaks else "–"
        rows.append((shown_variant(variant), str(forecast["largest"]), largest, peak, attempts))
    return study_table(
        f"Most layers on two devices of {format_bytes(options['memory_bytes'])}",
        ("strategy", "forecast", "measured", "peak memory", "runs (layers: result)"),
        rows,
        f"Batch {options['batch']}, {options['sequence_length']} tokens, {options['optimizer']}. A worker that exceeds "
        f"the limit ends the run with an out-of-memory error.{_timed_note(results, options)}",
    )


def _timed_note(results: Results, options: Mapping[str, Any]) -> str:
    """Say that the model whose speed was measured is not run again, if a search came to its size."""
    fits = [results.get(f"fit-{variant}") or {} for variant in options["fits"]]
    if not any(attempt.get("is_timed_run") for fit in fits for attempt in fit.get("attempts", ())):
        return ""
    return f" {options['model']} is not run again: the peak memory of its timed run is compared with the limit."


def _outcome(attempt: Mapping[str, Any]) -> str:
    """What one attempt of a search has shown."""
    if attempt["ran"]:
        return "ran"
    if attempt.get("is_timed_run"):
        return f"needs {format_bytes(max(attempt['peak_memory_bytes']))}"
    return "out of memory"


def _draw(variants: Variants, title: str, path: Path) -> None:
    from stagewright.report.figures.memory import MemoryBar, draw_memory

    bars = [
        MemoryBar(label=shown_variant(name), memory=dict(variant.memory), speedup=variant.speedup)
        for name, variant in variants.items()
    ]
    draw_memory(bars, path, title=title)
