"""How far rules on the columns of nanotron's table can get: which runs stalled, and how they rank.

    python benchmarks/stall_rules.py --data FOLDER        two minutes

    corrected     the forecast times a factor that randomized trees read off all columns: trained on nine tenths of the
                  runs with their measured times, tested on the rest, ten times. It estimates how well a rule can rank.
    classified    forecasts whose stalled runs are those that a random forest names. It was trained on the fitted half
                  alone, so the other half is a test.
    mean          the geometric mean of both forecasts, weighted by that probability

The marks of `tables/published.py`, for comparison, are `marked`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
from sklearn.ensemble import ExtraTreesRegressor, RandomForestClassifier
from sklearn.model_selection import KFold, cross_val_predict

from league import free_forecast, rank_correlation
from stagewright.analytic.forecast import AnalyticForecast, forecast_layout
from stagewright.analytic.hardware.named_cluster import named_cluster
from tables.published import nanotron, with_stall
from tables.row import Row

GIB = 2**30


def columns(row: Row, free: AnalyticForecast, stalled: AnalyticForecast) -> list[float]:
    """Return what is known of a run before it runs."""
    layout = row.layout
    sizes = (layout.num_devices, layout.data, layout.tensor, layout.pipeline, layout.microbatch, layout.microbatches)
    return [
        *(math.log2(size) for size in (*sizes, row.shape.width)),
        float(layout.zero),
        math.log(free.step_s),
        math.log(stalled.peak_memory_bytes / GIB),
    ]


def report(name: str, forecast_s: np.ndarray, measured_s: np.ndarray, *groups: np.ndarray) -> None:
    """Print mean error and rank correlation of groups of runs."""
    for runs in groups:
        error = statistics.mean(abs(forecast_s[runs] / measured_s[runs] - 1))
        rank = rank_correlation(list(measured_s[runs]), list(forecast_s[runs]))
        print(f"{name:24}{int(runs.sum()):7}{100 * error:8.1f}%{rank:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published tables")
    rows = [row for path in sorted(parser.parse_args().data.glob("nanotron*.csv")) for row in nanotron(path)]
    clusters = [named_cluster(row.cluster) for row in rows]
    pairs = [free_forecast(row, cluster) for row, cluster in zip(rows, clusters, strict=True)]
    stalled = [
        forecast_layout(row.shape, with_stall(row.layout), cluster) for row, cluster in zip(rows, clusters, strict=True)
    ]
    marked_s, measured_s = (
        np.array(
            [
                forecast_layout(row.shape, row.layout, cluster).step_s
                for row, cluster in zip(rows, clusters, strict=True)
            ]
        ),
        np.array([row.step_s for row in rows]),
    )
    free_s, stalled_s = np.array([free.step_s for free, _ in pairs]), np.array([one.step_s for one in stalled])
    tested = np.array([not row.fitted for row in rows])
    known = np.array([columns(row, free, one) for row, (free, _), one in zip(rows, pairs, stalled, strict=True)])
    both = (np.ones_like(tested), tested)
    print(f"{'':24}{'runs':>7}{'error':>9}{'rank':>8}")
    report("marked", marked_s, measured_s, *both)
    trees = ExtraTreesRegressor(400, min_samples_leaf=2, random_state=0)
    folds = KFold(10, shuffle=True, random_state=0)
    factor = cross_val_predict(trees, known, np.log(measured_s / marked_s), cv=folds)
    report("corrected", marked_s * np.exp(factor), measured_s, *both)
    piped = np.array([row.layout.pipeline > 1 for row in rows])
    is_stalled = np.array([found for _, found in pairs])
    learned = piped & ~tested
    forest = RandomForestClassifier(300, min_samples_leaf=2, random_state=0).fit(known[learned], is_stalled[learned])
    probability = np.where(piped, forest.predict_proba(known)[:, 1], 0.0)
    for limit in (0.5, 0.8):
        report(f"classified above {limit}", np.where(probability > limit, stalled_s, free_s), measured_s, tested)
    logs = probability * np.log(stalled_s) + (1 - probability) * np.log(free_s)
    report("mean", np.exp(logs), measured_s, tested)


if __name__ == "__main__":
    main()
