"""Blocks of accuracies after training."""

from __future__ import annotations

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
        + f"- {_longer(record['rows'])}\n"
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
    return (
        f"{_TASKS[task]}: {row['num_train']:,} training samples, {epochs:.1f} epochs, batch {row['batch']}, AdamW with "
        f"{row['learning_rate']:g}; {row['num_evaluated']:,} evaluated samples; the most frequent class alone reaches "
        f"{row['chance']:g}.{doubt}"
    )


def _longer(rows: list[Record]) -> str:
    """Say what longer trainings of RTE reach on held-out samples of the training set."""
    longer = [row for row in rows if row["task"] == "rte-long"]
    rates = sorted({row["learning_rate"] for row in longer})
    texts = [_scores([row for row in longer if row["learning_rate"] == rate]) for rate in rates]
    best = {rate: [row for row in rows if _is_search(row, "rte64", rate)] for rate in rates}
    short = next(_scores(found) for found in best.values() if found)
    epochs = round(longer[0]["steps"] * longer[0]["batch"] / longer[0]["num_train"])
    loss = max(row["training_loss"] for row in longer)
    return (
        f"Why RTE stays near guessing: longer training does not help. After {epochs} epochs in batches of "
        f"{longer[0]['batch']}, the training loss is at most {loss:.3f}, yet held-out training samples reach "
        f"{'; '.join(texts)} (after 10 epochs: {short}). MiniLM has 22 M parameters, and RTE 2,490 samples: it learns "
        "these by heart. The published 79 % are of RoBERTa, whose weights are not at hand."
    )


def _is_search(row: Record, task: str, rate: float) -> bool:
    return bool(row["is_search"]) and row["task"] == task and row["learning_rate"] == rate


def _scores(rows: list[Record]) -> str:
    scores = " and ".join(f"{row['score']:.1f} %" for row in rows)
    return f"{scores} with {rows[0]['learning_rate']:g}"
