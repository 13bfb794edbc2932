"""Blocks of runs on one GPU."""

from __future__ import annotations

from measured_figures.markdown import load_record, paragraph, percent, signed, source, table

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
    forecast, before, after = (
        rows[name] for name in ("forecast of the same plan", "compare serial", "compare serial, on the GPU")
    )
    text = (
        f"The forecast of the serial plan is {signed(forecast['forecast_error'])} off, its memory "
        f"{signed(forecast['memory_error'])}. `compare` of it takes {after['seconds']:.0f} s from the "
        f"command to its table, most of it imports ({before['seconds']:.0f} s while tensors were compared on the "
        f"host); a plain script reaches its first step after {rows['plain eager']['since_start_s']:.0f} s."
    )
    head = ("what", "step", "samples/s", "peak memory")
    return source("gpu_table_h200") + "\n" + table(head, lines, right=True) + "\n" + paragraph(text)


def gpu_shares() -> str:
    head = ("plan", "workers", "batch", "training: speed-up", "of its bound", "inference: speed-up", "of its bound")
    records = ("gpu_shares_h200", "gpu_shares_sharded_h200")
    rows = [row for name in records for row in load_record(name)["rows"] if row["strategy"] != "serial"]
    plans: dict[tuple[str, int, int], dict[bool, tuple[str, str]]] = {}
    for row in rows:
        plan = f"{row['strategy']}{', FSDP' if row['shard'] else ''}", row["workers"], row["batch"]
        figures = f"{row['speedup']:.2f} ×", percent(row["share_of_bound"])
        plans.setdefault(plan, {})[row["training"]] = figures
    empty = ("", "")
    lines = [
        (name, str(workers), str(batch), *found.get(True, empty), *found.get(False, empty))
        for (name, workers, batch), found in plans.items()
    ]
    return "\n".join(source(name) for name in records) + "\n" + table(head, lines, right=True)
