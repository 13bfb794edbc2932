"""Cases, packed images and summary of ``benchmarks/accuracy_tables.py``; its trainings need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from accuracy_runs.cases import RECIPES, Case, all_cases, best_rate, key_of
from accuracy_runs.lossless_images import compress, decompress
from accuracy_runs.summary import summarize


@pytest.mark.parametrize("kind", ["noise", "gradient", "extremes", "one"])
def test_images_are_packed_without_loss(kind: str) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (5, 6, 7, 3), dtype=np.uint8)
    if kind == "gradient":
        images = np.broadcast_to(np.arange(7, dtype=np.uint8)[:, None] * 30, (5, 6, 7, 3)).copy()
    elif kind == "extremes":
        images = (images > 127).astype(np.uint8) * 255
    elif kind == "one":
        images = images[:1, :1, :1]
    assert np.array_equal(decompress(compress(images)), images)


def test_smooth_images_need_fewer_bytes() -> None:
    smooth = np.broadcast_to(np.arange(32, dtype=np.uint8)[:, None] * 4, (50, 32, 32, 3)).copy()
    assert len(compress(smooth)["streams"]) < smooth.size / 5


def test_cases_are_unique_and_strategies_come_before_codecs() -> None:
    cases = all_cases(["cifar10", "cola"], ["none", "block4"], [0, 1])
    assert len({case.key for case in cases}) == len(cases)
    assert {case.task for case in cases if case.is_search} == {"cola"}  # CIFAR-10 has one learning rate
    codecs = [case.codec != "none" for case in cases]
    assert codecs == sorted(codecs)
    two = [case for case in cases if (case.strategy, case.workers, case.is_search) == ("pipeline", 2, False)]
    assert len(two) == 2 * 2 * 2
    assert all(case.codec == "none" for case in cases if case.strategy == "data")


def test_every_strategy_of_the_published_table_has_a_case_for_each_seed() -> None:
    cases = all_cases(list(RECIPES), ["none"], [0, 1, 2])
    final = [(case.task, case.strategy, case.workers) for case in cases if not case.is_search]
    for task, workers in (("cifar10", 2), ("cifar10", 4), ("rte", 2), ("rte64", 4)):
        for strategy in ("pipeline", "data"):
            assert final.count((task, strategy, workers)) == 3
    assert final.count(("rte64", "pipeline", 2)) == 3
    assert RECIPES["rte"].batch == 32
    assert RECIPES["rte64"].batch == 64


def test_a_longer_schedule_is_only_judged_on_held_out_samples() -> None:
    cases = [case for case in all_cases(list(RECIPES), ["none", "block4"], [0, 1, 2]) if case.task == "rte-long"]
    assert len(cases) == 4
    assert all(case.is_search for case in cases)


def row(case: Case, score: float | None, **values: Any) -> dict[str, Any]:
    measured = {"ratio": 1.0, "accuracy": score, "num_train": 9, "num_evaluated": 1000, "batch": 3, "steps": 6}
    return {**case.to_dict(), **measured, "training_s": 2.0, "training_loss": 0.5, "score": score, **values}


def test_the_best_learning_rate_is_that_of_all_seeds() -> None:
    cases = [case for case in all_cases(["rte"], ["none"], [0]) if case.is_search]
    scores = {rate: 50.0 + number for number, rate in enumerate(RECIPES["rte"].learning_rates)}
    rows = [row(case, scores[case.learning_rate or 0]) for case in cases]
    assert best_rate("rte", rows[:-1]) is None
    assert best_rate("rte", rows) == RECIPES["rte"].learning_rates[-1]
    failed = [{**found, "score": None} if found["learning_rate"] == max(scores) else found for found in rows]
    assert best_rate("rte", failed) == RECIPES["rte"].learning_rates[-2]
    assert best_rate("cifar10", []) == 1e-3


def test_a_result_belongs_to_its_case_whatever_its_learning_rate() -> None:
    case = Case(task="rte", strategy="pipeline", workers=2, codec="block4", seed=1)
    assert key_of(row(case, 60.0, learning_rate=1e-4)) == case.key


def test_summary_compares_codecs_with_none_of_the_same_strategy() -> None:
    rows = [
        row(Case(task="cifar10", strategy="pipeline", workers=2, codec=codec, seed=seed, learning_rate=1e-3), score)
        for codec, scores in {"none": (91.0, 91.2, 91.1), "sort3+1": (60.0, 60.2, 60.1)}.items()
        for seed, score in enumerate(scores)
    ]
    rows.append(row(Case(task="cifar10", strategy="data", workers=2, codec="none", seed=0, learning_rate=1e-3), 90.0))
    none, lossy, data = summarize(rows)
    assert (none["codec"], none["mean"], none["verdict"], none["chance"]) == ("none", pytest.approx(91.1), None, 10.0)
    assert (lossy["codec"], lossy["verdict"], lossy["seeds"]) == ("sort3+1", "loses", [0, 1, 2])
    assert 1.5 < none["half_width"] < 2.5  # of 1,000 evaluated samples
    assert (data["strategy"], data["verdict"], data["samples_per_s"]) == ("data", None, 9.0)
