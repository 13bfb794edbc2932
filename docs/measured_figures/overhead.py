"""Blocks of docs/trace.md, docs/report.md and docs/watch.md."""

from __future__ import annotations

from measured_figures.markdown import load_record, ms, paragraph, percent, signed, source, table


def trace_overhead() -> str:
    meshes = {"pipeline": "pipeline=2", "data": "data=2", "tensor": "tensor=2", "serial": "serial"}
    rows = []
    for name, mesh in meshes.items():
        worker = max(load_record(f"trace_overhead_{name}")["workers"], key=lambda worker: worker["events"])
        rows.append(
            (
                mesh,
                f"{worker['events']}",
                ms(worker["without_s"], 1),
                f"{worker['event_s'] * 1e6:.1f} µs",
                percent(worker["events"] * worker["event_s"] / worker["without_s"], 2),
                signed(worker["overhead"]),
                signed(worker["by_chance"]),
            )
        )
    head = (
        *("`digits-vit`", "events per step and worker", "step", "per event", "share of the step"),
        *("measured overhead", "random difference"),
    )
    return source(*(f"trace_overhead_{name}" for name in meshes)) + "\n" + table(head, rows)


def attach_overhead() -> str:
    record = load_record("attach_overhead")
    text = (
        f"`attach` costs {record['cost_s'] * 1e6:.0f} µs of CPU time per step, measured on layers of width 1, which is "
        f"{percent(record['share'], 2)} of a step of {ms(record['step_s'], 1)}. Steps of that size themselves differ "
        f"by {signed(record['difference'])} with it (random difference {signed(record['by_chance'])}). A profile of "
        f"three steps costs {ms(record['profiling_s'])} once. The parts of a profiled step add up to "
        f"{percent(record['sum_of_parts'], 2)}."
    )
    return source("attach_overhead") + "\n" + paragraph(text)


def report_size() -> str:
    record = load_record("report_size")
    text = (
        f"{record['events']} events: the page takes {record['total_s']:.2f} s to build and has "
        f"{record['bytes'] / 1e6:.2f} MB; a browser opens it in {record['open_s']:.2f} s, and a frame takes "
        f"{record['zoom_median_ms']:.1f} ms when zooming and {record['scroll_median_ms']:.1f} ms when scrolling "
        "(medians)."
    )
    return source("report_size") + "\n" + paragraph(text)


def live_page() -> str:
    record = load_record("live_page")
    row = record["rows"][0]
    text = (
        f"With {record['workers']} workers that each append {record['updates_per_s']:g} lines a second, the server "
        f"uses {percent(row['server'])} of one core, and its viewer lags {ms(row['behind_s'])} behind. The browser's "
        "CPU time is not included."
    )
    return source("live_page") + "\n" + paragraph(text)
