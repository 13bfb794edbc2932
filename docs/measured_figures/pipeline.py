"""Blocks of docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from measured_figures.markdown import RECORDS, load_record, ms, paragraph, percent, signed, size, source, spread, table

CONCURRENT = "2 concurrent serial runs"
COMPUTING = ("forward", "backward", "weights", "recompute", "optimizer")
WAITING = ("receive", "until_sent", "at_the_end", "sums")
_OPERATIONS = {"a sum": "all-reduce", "a message": "P2P message"}  # words of earlier records


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def over_peers(row: dict[str, Any]) -> str:
    """Format the speed-up over stock torch and the other pipelines, from the ratios of each round."""
    peers = {"stock": row["stock_speedups"], "stock cut by equal parameters": row.get("parameters_speedups")}
    peers |= row["peers"]
    parts = [f"over {name} {spread(ratios(row['speedups'], speedups))}" for name, speedups in peers.items() if speedups]
    return ", ".join(parts)


def of_ideal(row: dict[str, Any]) -> str:
    """Format the speed-up relative to the number of workers."""
    return percent(statistics.median(row["speedups"]) / row["stages"])


def of_bound(row: dict[str, Any]) -> str:
    return percent(statistics.median(row["speedups"]) / row["bound"])


def pipeline_deit_small() -> str:
    inference, training = load_record("pipeline_deit_small")["rows"]
    (longer,) = load_record("pipeline_deit_small_stream")["rows"]
    peers = [name for name in ("torchgpipe",) if name in inference["peers"]]
    rows = [
        (
            "training, 1F1B" if row is training else f"inference, {row['samples'] // 2} micro-batches",
            f"{row['bound']:.2f}",
            spread(row["speedups"]),
            of_bound(row),
            of_ideal(row),
            spread(row["stock_speedups"]),
            *(spread(row["peers"][name]) if name in row["peers"] else "–" for name in peers),
            spread(row["ceilings"]),
        )
        for row in (inference, longer, training)
    ]
    head = ("", "bubble bound", "Stagewright", "of the bound", "of 2 ×", "stock", *peers, CONCURRENT)
    forwards = sum(stage["forward"] for stage in inference["compute"])
    serial = 2 * statistics.median(times["serial"] for times in inference["rounds"])
    waits = inference["compute"][1]["receive"]
    first, second = training["compute"]
    return (
        source("pipeline_deit_small", "pipeline_deit_small_stream")
        + "\n"
        + table(head, rows, right=True)
        + "\n"
        + paragraph(
            f"Speed-up of Stagewright, from the ratios of each round: inference {over_peers(inference)}; longer stream "
            f"{over_peers(longer)}; training {over_peers(training)}."
        )
        + "\n"
        + paragraph(
            f"In inference the forwards of both stages take {ms(forwards)} in total (medians), serial takes "
            f"{ms(serial)} for the same two samples, and the second stage waits {ms(waits, 2)} for each receive. In "
            f"training the first stage's forward takes {ms(first['forward'])}, the second's {ms(second['forward'])}, "
            f"their backwards {ms(first['backward'])} and {ms(second['backward'])}; the second waits "
            f"{ms(second['receive'])} for each receive."
        )
    )


def pipeline_small_blocks() -> str:
    rows = [
        (
            f"{row['mode']}, {row['samples'] // 2} micro-batches",
            f"{row['bound']:.2f}",
            spread(row["speedups"]),
            of_bound(row),
            spread(row["stock_speedups"]),
            spread(ratios(row["speedups"], row["stock_speedups"])),
            spread(row["ceilings"]),
        )
        for row in load_record("pipeline_small_blocks")["rows"]
    ]
    head = ("", "bubble bound", "Stagewright", "of the bound", "stock", "Stagewright over stock", CONCURRENT)
    return source("pipeline_small_blocks") + "\n" + table(head, rows, right=True)


def pipeline_others() -> str:
    titles = {
        "pipeline_mobilenet_v2": "MobileNetV2, data parallel",
        "pipeline_bert_minilm": "MiniLM, pipeline",
        "pipeline_bert_minilm_tensor": "MiniLM, tensor parallel",
    }
    names = [name for name in titles if (RECORDS / f"{name}.json").exists()]
    rows = [
        (
            f"{titles[name]}, {row['mode']}",
            f"{row['bound']:.2f}",
            spread(row["speedups"]),
            of_bound(row),
            of_ideal(row),
            spread(row["ceilings"]),
        )
        for name in names
        for row in load_record(name)["rows"]
    ]
    head = ("two cores", "bound", "Stagewright", "of the bound", "of 2 ×", CONCURRENT)
    return source(*names) + "\n" + table(head, rows, right=True)


def pipeline_resnet_50() -> str:
    (row,) = load_record("pipeline_resnet_50")["rows"]
    titles = {"torchgpipe": "torchgpipe, same split", "prepare_pippy": "`prepare_pippy`, same split"}
    columns = {
        "Stagewright": spread(row["speedups"]),
        "of 2 ×": of_ideal(row),
        "stock, same split": spread(row["stock_speedups"]),
        "stock, cut by equal parameters": spread(row["parameters_speedups"]),
        **{title: spread(row["peers"][name]) for name, title in titles.items() if name in row["peers"]},
        CONCURRENT: spread(row["ceilings"]),
    }
    busy = " and ".join(percent(share) for share in row["busy"])
    return (
        source("pipeline_resnet_50")
        + "\n"
        + table(list(columns), [list(columns.values())])
        + "\n"
        + paragraph(
            f"Speed-up of Stagewright, from the ratios of each round: {over_peers(row)}. Its stages compute {busy} of "
            "the time."
        )
    )


def pipeline_sixteen() -> str:
    names = [f"pipeline_16_{mode}{cores}" for cores in ("", "_other_cores") for mode in ("inference", "training")]
    rows = []
    for row in (row for name in names for row in load_record(name)["rows"]):
        busy = [times["together"] / times["ours"] / row["bound"] for times in row["rounds"]]
        simulated = [(total(parts, COMPUTING) + parts["schedule_idle_s"]) / parts["step_s"] for parts in row["parts"]]
        rows.append(
            (
                f"{row['mode']}, {row['stages']} stages",
                f"{row['bound']:.2f}",
                spread(row["speedups"]),
                spread(row["stock_speedups"]) if row["stock_speedups"] else "",
                spread(row["ceilings"]),
                of_bound(row),
                f"{percent(statistics.median(busy))} ({percent(min(busy))} to {percent(max(busy))})",
                percent(max(1 - share for share in simulated), 1),
            )
        )
    head = (
        *("", "bubble bound", "Stagewright", "stock", "concurrent serial runs", "of the bound"),
        *("of the bound, all cores busy", "engine overhead, of the step"),
    )
    return source(*names) + "\n" + table(head, rows, right=True)


def gloo_threads() -> str:
    def cell(seconds: list[float]) -> str:
        return f"{ms(statistics.median(seconds), 2)} (mean {ms(statistics.mean(seconds), 2)})"

    rows = [
        (
            f"{_OPERATIONS.get(row['kind'], row['kind'])}, {size(row['bytes'])}",
            cell(row["plain_s"]),
            cell(row["patient_s"]),
        )
        for row in load_record("gloo_threads")["rows"]
    ]
    return source("gloo_threads") + "\n" + table(("", "default threads", "SCHED_BATCH threads"), rows, right=True)


def all_reduces() -> str:
    """Compare all-reduces through Gloo with those through shared memory."""
    rows = []
    for row in load_record("all_reduces")["rows"]:
        gloo, memory = (statistics.median(row[name]) for name in ("gloo_s", "memory_s"))
        processor = [statistics.fmean(row[name]) for name in ("gloo_cpu_s", "memory_cpu_s")]
        rows.append(
            (
                size(row["bytes"]),
                ms(gloo, 2),
                ms(memory, 2),
                f"{gloo / memory:.2f} ×",
                " → ".join(ms(each, 2) for each in processor),
            )
        )
    titles = ("tensor", "Gloo", "shared memory", "faster", "processor time")
    return source("all_reduces") + "\n" + table(titles, rows, right=True)


def ring_attention() -> str:
    """Compare attention of two context parallel workers with that of one core."""
    rows = []
    for row in load_record("ring_attention")["rows"]:
        alone = row["one core"]
        cells = [f"{ms(alone['seconds'], 0)}, {size(alone['bytes'])}"]
        for kind in ("ring", "all-to-all"):
            found = row[kind]
            cells.append(f"{alone['seconds'] / found['seconds']:.2f} ×, {size(found['bytes'])}")
        rows.append((f"{row['length']:,}", *cells))
    titles = ("tokens", "one core", "ring of two", "all-to-all of two")
    return source("ring_attention") + "\n" + table(titles, rows, right=True)


def pipeline_parts() -> str:
    """Break down the steps of the pipelines above."""
    titles = {"pipeline_deit_small": "DeiT-S", "pipeline_bert_minilm": "MiniLM"}
    names = [name for name in titles if all("parts" in row for row in load_record(name)["rows"])]
    rows = {f"{titles[name]}, {row['mode']}": row for name in names for row in load_record(name)["rows"]}
    if not rows:
        return paragraph("These records have no step breakdown; `python benchmarks/pipeline_speedup.py` adds it.")
    return (
        source(*names)
        + "\n"
        + table(*core_table(rows), right=True)
        + "\n"
        + paragraph("Step time beyond serial time / number of stages, mean over the stages:")
        + "\n"
        + table(*excess_table(rows), right=True)
    )


def core_table(rows: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Tabulate the breakdown of each worker's step, then the counters of its threads."""
    workers = [
        (f"{title}, stage {stage}", parts, threads)
        for title, row in rows.items()
        for stage, (parts, threads) in enumerate(zip(row["parts"], row["threads"], strict=True))
    ]

    def share(*names: str) -> list[str]:
        return [percent(total(parts, names) / parts["step_s"], 1) for _, parts, _ in workers]

    def counter(name: str) -> list[str]:
        """Format a counter as a share of the step, or as a count per step."""
        if not name.endswith("_s"):
            return [f"{threads[name]:.0f}" if threads else "" for _, _, threads in workers]
        return [percent(threads[name] / parts["step_s"], 1) if threads else "" for _, parts, threads in workers]

    lines = {
        "step time": [ms(parts["step_s"]) for _, parts, _ in workers],
        "compute": share(*COMPUTING),
        "waiting for receives": share("receive"),
        "done, waiting for the other stage": share("at_the_end"),
        "waiting for sends to complete": share("until_sent"),
        "send calls": share("send"),
        "Python between actions": share("between"),
        "*counters:* Gloo's threads": counter("gloo_cpu_s"),
        "other threads": counter("others_cpu_s"),
        "runnable, but preempted": counter("main_ready_s"),
        "preemptions": counter("main_put_off"),
        "page faults": counter("page_faults"),
    }
    return ["", *(title for title, _, _ in workers)], [[name, *cells] for name, cells in lines.items()]


def excess_table(rows: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Tabulate why a step is longer than ideal: the other columns add up to the total."""
    lines = []
    for title, row in rows.items():
        ideal_s = statistics.mean(times["serial"] for times in row["rounds"]) * row["samples"] / row["stages"]
        waits = [(total(parts, WAITING), parts["schedule_idle_s"]) for parts in row["parts"]]
        bubble = statistics.mean(min(waiting, idle) for waiting, idle in waits)
        means = {
            name: statistics.mean(parts[f"{name}_s"] for parts in row["parts"]) for name in ("step", "send", "between")
        }
        compute = statistics.mean(total(parts, COMPUTING) for parts in row["parts"])
        excess = {
            "total": means["step"] - ideal_s,
            "slower compute": compute - ideal_s,
            "bubble": bubble,
            "other waiting": statistics.mean(waiting for waiting, _ in waits) - bubble,
            "send calls": means["send"],
            "Python": means["between"],
        }
        lines.append([title, *(signed(seconds / ideal_s) for seconds in excess.values())])
    return ["", *excess], lines


def total(parts: dict[str, float], names: Sequence[str]) -> float:
    return sum(parts[f"{name}_s"] for name in names)
