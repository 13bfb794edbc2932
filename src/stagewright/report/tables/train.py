"""Training runs, one for each seed, as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

__all__ = ["summary", "train_table"]


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean and spread (standard deviation over seeds, 0 for one) of the metric after the last epoch."""
    found = [one["epochs"][-1][one["metric"]] for one in results]
    return {"mean": statistics.fmean(found), "spread": statistics.stdev(found) if len(found) > 1 else 0.0}


def train_table(results: Sequence[Mapping[str, Any]], title: str) -> Table:
    """A row for each epoch of each seed."""
    metric = results[0]["metric"]
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for name in ("seed", "epoch", "training loss", "evaluation loss", metric, "samples/s"):
        table.add_column(name, justify="right")
    for result in results:
        for row in result["epochs"]:
            table.add_row(
                str(result["seed"]),
                str(row["epoch"]),
                f"{row['training_loss']:.4f}",
                f"{row['evaluation_loss']:.4f}",
                f"{row[metric]:.4f}",
                f"{row['samples_per_s']:.1f}",
            )
    overall = summary(results)
    several = f" ± {overall['spread']:.4f} over {len(results)} seeds" if len(results) > 1 else ""
    table.caption = f"{metric} {overall['mean']:.4f}{several}"
    return table
