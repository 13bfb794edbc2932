"""Blocks of accuracies after training."""

from __future__ import annotations

import statistics

from measured_figures.markdown import Record, load_record, paragraph, source, table

_TASKS = {"cifar10": "CIFAR-10", "cola": "CoLA", "rte": "RTE, batch 32", "rte64": "RTE, batch 64"}
_METRICS = {"accuracy": "accuracy %", "matthews": "Matthews × 100"}
_SORT_BITS = {"sort12+4": 16, "sort9+3": 12, "sort6+2": 8, "sort3+1": 4}


def accuracy_tables() -> str:
    """Write the whole section, with its heading; nothing before there is a record."""
    try:
        record = load_record("accuracy_tables")
    except FileNotFoundError:
        return ""
    summary: list[Record] = record["summary"]
    tasks = [task for task in _TASKS if any(row["task"] == task for row in summary)]
    cells: dict[tuple[str, int, str], dict[str, Record]] = {}
    for row in summary:
        cells.setdefault((row["strategy"], row["workers"], row["codec"]), {})[row["task"]] = row
    head = ["workers", "codec", "compression ratio"]
    for task in tasks:
        metric = next(row["metric"] for row in summary if row["task"] == task)
        head += [f"{_TASKS[task]}, {_METRICS[metric]}"] + (
            [f"{_TASKS[task]}, accuracy %"] if metric != "accuracy" else []
        )
    lines = []
    for (strategy, workers, codec), found in cells.items():
        ratio = next(iter(found.values()))["ratio"]
        bits = f" ({_SORT_BITS[codec]} bits)" if codec in _SORT_BITS else ""
        line = [f"{strategy}={workers}", f"`{codec}`{bits}", "" if ratio is None else f"{ratio:.3f}"]
        for task in tasks:
            line += _cells(found.get(task), next(row["metric"] for row in summary if row["task"] == task))
        lines.append(line)
    return (
        "### Accuracy after training\n\n"
        + source("accuracy_tables")
        + "\n"
        + paragraph(
            "Every worker is a process with a share of one GPU, and every activation and gradient between stages goes "
            "through the codec. Means over seeds with 95 % intervals, which count the variation between seeds and the "
            "number of evaluated samples; in parentheses the number of seeds where it is not 3. Bold: below the same "
            "strategy without a codec by more than the interval."
        )
        + "\n"
        + table(head, lines, right=True)
        + "\n"
        + "".join(f"- {_details(task, summary)}\n" for task in tasks)
        + _learning_rates(record["rows"])
    )


def _cells(row: Record | None, metric: str) -> list[str]:
    """Format mean and interval of a task, and its accuracy where that is not the metric."""
    if row is None:
        return [""] if metric == "accuracy" else ["", ""]
    text = f"{row['mean']:.1f} ± {row['half_width']:.1f}"
    text = f"**{text}**" if row["verdict"] == "loses" else text
    text += "" if len(row["seeds"]) == 3 else f" ({len(row['seeds'])})"
    return [text] if metric == "accuracy" else [text, f"{row['accuracy']:.1f}"]


def _details(task: str, summary: list[Record]) -> str:
    """Say how a task is trained and what guessing reaches."""
    row = next(row for row in summary if row["task"] == task)
    epochs = row["steps"] * row["batch"] / row["num_train"]
    learned = row["mean"] - row["half_width"] > row["chance"]
    doubt = "" if learned else " That is within the interval: the model learned too little to judge codecs by it."
    if not learned and task.startswith("rte"):
        doubt += (
            f" It fits its training samples (training loss {row['training_loss']:.2f}), so more steps do not help: the "
            "samples are too few for this encoder. Published for small encoders that were not trained on another "
            "inference task first: 57 to 62 % (BERT-Tiny to BERT-Medium, arXiv:1908.08962); for RoBERTa: 78.6 %."
        )
    return (
        f"{_TASKS[task]}: {row['num_train']:,} training samples, {epochs:.1f} epochs, batch {row['batch']}, AdamW with "
        f"{row['learning_rate']:g}; {row['num_evaluated']:,} evaluated samples; the most frequent class alone reaches "
        f"{row['chance']:g}.{doubt}"
    )


def _learning_rates(rows: list[Record]) -> str:
    """List the learning rates and schedules that were tried on held-out training samples."""
    tried: dict[tuple[str, int, int, float], list[float]] = {}
    for row in rows:
        if row["is_search"] and row.get("score") is not None:
            epochs = round(row["steps"] * row["batch"] / row["num_train"])
            tried.setdefault((row["task"], row["batch"], epochs, row["learning_rate"]), []).append(row["score"])
    names = _TASKS | {"rte": "RTE", "rte64": "RTE", "rte-long": "RTE"}
    texts = [
        f"{names[task]}, batch {batch}, {epochs} epochs, {rate:g}: {statistics.fmean(scores):.1f}"
        for (task, batch, epochs, rate), scores in sorted(tried.items())
    ]
    return f"- Learning rates, on held-out training samples, mean of two seeds: {'; '.join(texts)}.\n" if texts else ""
