"""The analytic forecast against public tables of measured training steps.

    python benchmarks/league.py --data FOLDER [--output FILE]        all tables, half a minute
    python benchmarks/league.py --data FOLDER --sample 40            every table's first 40 rows
    python benchmarks/league.py --steps gpu_steps.json               own steps (benchmarks/gpu_steps.py)

    error      forecast over measured time, minus one: mean of its size, and the worst
    rank       Spearman correlation between forecast and measured time
    regret     the measured time of the layout that the forecast ranks first, over the best measured one, among layouts
               of the same model on as many devices: median
    memory     mean size of the error of peak memory
    not fit    runs that ran but that the forecast calls not fitting
    inside     share of rows whose measured time is inside the forecast's interval

"nanotron, unmarked" has the forecasts of all runs without stalled messages, as of a cluster of which nothing
is known. "nanotron, no stall" holds the runs whose time is nearer to the forecast without stalled messages
than to that with them: the state of that cluster at the time of a run is in no column of the table
(`tables/published.py`). A line below the table tells how often the memory of a run agrees with its mark: runs whose
messages stall hold less (`analytic/memory.py`), and no run was marked by its memory.

A row marked "fitted" was used to fit constants of `stagewright.analytic`, so it is no test; `benchmarks/tables` says
which. Rows marked "test" were not.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from record import write_record
from stagewright.analytic.forecast import AnalyticForecast, forecast_layout, step_model
from stagewright.analytic.hardware.named_cluster import named_cluster
from stagewright.cluster.cluster import Cluster
from tables.own import own_steps
from tables.published import megatron, nanotron, simumax, with_stall, without_stall
from tables.row import Row


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's correlation."""
    if len(first) < 3:
        return float("nan")
    ranks = []
    for values in (first, second):
        order = sorted(range(len(values)), key=lambda index: values[index])
        rank = [0.0] * len(values)
        for position, index in enumerate(order):
            rank[index] = float(position)
        ranks.append(rank)
    return statistics.correlation(ranks[0], ranks[1])


def median_regret(pairs: Iterable[tuple[Row, AnalyticForecast]]) -> float:
    """Return how much slower than the best measured layout the first-ranked one is, in the median of groups."""
    groups: dict[str, list[tuple[Row, AnalyticForecast]]] = defaultdict(list)
    for row, forecast in pairs:
        groups[row.group].append((row, forecast))
    regrets = []
    for members in groups.values():
        if len(members) > 1:
            chosen = min(members, key=lambda pair: pair[1].step_s)[0]
            regrets.append(chosen.step_s / min(row.step_s for row, _ in members) - 1)
    return statistics.median(regrets) if regrets else float("nan")


def score(pairs: Sequence[tuple[Row, AnalyticForecast]]) -> dict[str, Any]:
    """Return the figures of a table."""
    errors = [forecast.step_s / row.step_s - 1 for row, forecast in pairs]
    memory = [
        forecast.peak_memory_bytes / row.memory_bytes - 1 for row, forecast in pairs if row.memory_bytes is not None
    ]
    return {
        "rows": len(pairs),
        "mean_error": statistics.mean(abs(error) for error in errors),
        "median_error": statistics.median(abs(error) for error in errors),
        "worst_error": max(errors, key=abs),
        "rank_correlation": rank_correlation([row.step_s for row, _ in pairs], [f.step_s for _, f in pairs]),
        "median_regret": median_regret(pairs),
        "memory_error": statistics.mean(abs(error) for error in memory) if memory else None,
        "not_fitting": sum(not forecast.fits for row, forecast in pairs if row.memory_bytes is not None),
        "inside": statistics.mean(forecast.low_s <= row.step_s <= forecast.high_s for row, forecast in pairs),
    }


def free_forecast(row: Row, cluster: Cluster) -> tuple[AnalyticForecast, bool]:
    """Return the forecast of a run without stalled messages, and whether its time says that they stalled.

    Without a pipeline half a second may be any error of the forecast, so only marked runs count as stalled there.
    """
    free, stalled = (forecast_layout(row.shape, change(row.layout), cluster) for change in (without_stall, with_stall))
    is_nearer = abs(math.log(free.step_s / row.step_s)) > abs(math.log(stalled.step_s / row.step_s))
    return free, is_nearer and (row.layout.pipeline > 1 or row.layout.gradient_stall_s > 0)


def memory_agreement(rows: Iterable[Row], least: float = 1.2) -> tuple[int, int]:
    """Return of how many runs with a pipeline memory agrees with the mark, and of how many it can tell.

    Args:
        rows: Runs; those of other tables are skipped.
        least: How many times as large the forecast memory without stalled messages must be as that with them.
    """
    agree = known = 0
    for row in rows:
        if row.table != "nanotron" or row.layout.pipeline == 1 or row.memory_bytes is None:
            continue
        free, stalled = (
            step_model(row.shape, change(row.layout), named_cluster(row.cluster))
            for change in (without_stall, with_stall)
        )
        sizes = [model.peak_memory_bytes() for model in (free, stalled)]
        if sizes[0] >= least * sizes[1]:
            known += 1
            is_stalled = row.memory_bytes**2 < sizes[0] * sizes[1]
            agree += is_stalled == (row.layout.message_stall_s > 0)
    return agree, known


def rows_from(options: argparse.Namespace) -> list[Row]:
    """Read all tables that are there."""
    rows: list[Row] = []
    if options.data is not None:
        rows += megatron(options.data)
        rows += simumax(options.data)
        for path in sorted(options.data.glob("nanotron*.csv")):
            rows += nanotron(path)
    if options.steps is not None:
        rows += own_steps(options.steps)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the published tables (SOURCES.md says where from)")
    parser.add_argument("--steps", type=Path, help="file of benchmarks/gpu_steps.py")
    parser.add_argument("--sample", type=int, help="only so many rows of each table")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    tables: dict[str, list[tuple[Row, AnalyticForecast]]] = defaultdict(list)
    rows = rows_from(options)
    for row in rows:
        name = f"{row.table}{' (fitted)' if row.fitted else ''}"
        if options.sample is None or len(tables[name]) < options.sample:
            cluster = named_cluster(row.cluster)
            tables[name].append((row, forecast_layout(row.shape, row.layout, cluster)))
            if row.table == "nanotron":
                free, is_stalled = free_forecast(row, cluster)
                tables["nanotron, all open runs"].append(tables[name][-1])
                tables[name.replace("nanotron", "nanotron, unmarked")].append((row, free))
                if not is_stalled:
                    tables[name.replace("nanotron", "nanotron, no stall")].append((row, free))
    figures = {name: score(pairs) for name, pairs in tables.items()}
    if options.rows:
        for name, pairs in tables.items():
            for row, forecast in pairs:
                error = 100 * (forecast.step_s / row.step_s - 1)
                print(f"{name:28} {row.name:56} {row.step_s:9.3f} {forecast.step_s:9.3f} s {error:+6.1f} %")
    header = ("rows", "mean", "median", "worst", "rank", "regret", "memory", "not fit", "inside")
    print(f"{'table':28}" + "".join(f"{name:>9}" for name in header))
    for name, row_figures in figures.items():
        memory = row_figures["memory_error"]
        print(
            f"{name:28}{row_figures['rows']:9}{100 * row_figures['mean_error']:8.1f}%"
            f"{100 * row_figures['median_error']:8.1f}%{100 * row_figures['worst_error']:+8.0f}%"
            f"{row_figures['rank_correlation']:9.3f}{100 * row_figures['median_regret']:8.1f}%"
            + (f"{100 * memory:8.1f}%" if memory is not None else f"{'–':>9}")
            + f"{row_figures['not_fitting']:9}{100 * row_figures['inside']:8.0f}%"
        )
    agree, known = memory_agreement(rows)
    if known:
        print(f"nanotron: memory agrees with the mark of {agree} of {known} runs in which it can tell")
    if options.output is not None:
        write_record(options.output, {"tables": figures, "memory_agrees": agree, "memory_tells": known})


if __name__ == "__main__":
    main()
