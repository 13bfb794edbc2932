"""Large batches: which run, the largest that does, on several numbers of workers, and their error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.studies.conftest import answer_to, table_rows
from tests.studies.fake_training_parts import MIB, STRATEGIES_OPTIONS, strategies_parts, trained

from stagewright.errors import UsageError
from stagewright.studies import Findings, Results
from stagewright.studies.parts.search import largest_below
from stagewright.studies.parts.training_recipe import RECIPES
from stagewright.studies.strategies.options import Options
from stagewright.studies.strategies.study import build_study, conclude

LARGEST = {
    "largest": 576,
    "step": 32,
    "is_exact": True,
    "forecast": 544,
    "attempts": [
        {"batch": 544, "ran": True, "peak_memory_bytes": [98 * MIB] * 2, "run": "runs/x"},
        {"batch": 576, "ran": True, "peak_memory_bytes": [99 * MIB] * 2, "run": "runs/y"},
        {"batch": 608, "ran": False, "text": "worker 0: out of memory"},
    ],
}


def concluded(parts: dict[str, object], **options: object) -> Findings:
    return conclude({**STRATEGIES_OPTIONS, **options}, Results(parts))


def test_the_largest_batch_was_found_by_running() -> None:
    text = answer_to(concluded(strategies_parts() | {"largest-data": LARGEST}), "out of memory")
    assert (
        "The largest batch of data parallel on two devices of 100 MiB, found by running in steps of 32: 576 (forecast "
        "544); 608 ran out of memory." in text
    )
    unknown = LARGEST | {"largest": 0, "attempts": [{"batch": 32, "ran": False, "text": "out of memory"}]}
    assert "not even batch 32 runs" in answer_to(concluded(strategies_parts() | {"largest-data": unknown}), "out of")


def test_errors_are_shown_where_large_batches_were_trained() -> None:
    parts = strategies_parts()
    untrained = concluded(parts)
    assert "error %" not in table_rows(untrained.tables[-1])[0]
    assert "this does: stagewright study strategies --large-epochs 3" in answer_to(untrained, "out of memory")
    for seed, accuracy in enumerate((78.0, 77.0)):
        parts[f"large-train-data-256-{seed}"] = trained(accuracy)
        parts[f"large-train-data-1024-{seed}"] = None
    findings = concluded(parts)
    errors = {(row["experiment"], row["batch"]): row["error %"] for row in table_rows(findings.tables[-1])}
    assert errors["data", "256"] == "22.5 ± 0.71"
    assert errors["data", "1024"] == "–"
    assert "256 (50.0 MiB, error 22.5 ± 0.71 %)" in answer_to(findings, "out of memory")


def test_more_workers_have_rows_of_their_own_and_no_speed_if_they_share_devices() -> None:
    parts = strategies_parts()
    for kind in ("data", "accumulated", "pipeline"):
        for batch in (256, 1024):
            parts[f"large-{kind}-{batch}-on-8"] = parts[f"large-{kind}-256"] | {"batch": batch, "shared": True}
    findings = concluded(parts, large_workers=[2, 8])
    rows = [row for row in table_rows(findings.tables[-1]) if row["workers"] == "8"]
    assert len(rows) == 6
    assert {row["samples/s"] for row in rows} == {"–"}
    text = answer_to(findings, "out of memory")
    assert "on two devices of 100 MiB: batch 1024 runs out of memory" in text
    assert "on 8 devices of 100 MiB: no tested batch runs only as a pipeline." in text


def test_parts_follow_from_the_options() -> None:
    options = Options(large_batches=(64, 128), large_workers=(2, 8), large_epochs=1, seeds=(0,))
    names = [part.name for part in build_study(options).parts]
    assert "large-data-64" in names
    assert "large-pipeline-128-on-8" in names
    assert "largest-data" in names
    assert "large-train-pipeline-128-on-8-0" in names
    assert not any("large-train" in part.name for part in build_study(replace(options, large_epochs=0)).parts)
    assert not any("large" in part.name for part in build_study(replace(options, large_batches=())).parts)
    plan = options.large_plan("pipeline", 128, tuple("abcdefg"), 8)
    assert (plan.mesh.pipeline, plan.microbatches, len(plan.devices)) == (8, 4, 8)
    assert plan.optimizer.learning_rate == pytest.approx(RECIPES["digits"].learning_rate * 2**0.5)
    assert options.largest_step == 8


def test_more_workers_than_samples_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--large-batches 8: 8 workers \(--large-workers\) need 16 samples"):
        Options(large_batches=(8, 64), large_workers=(8,))
    with pytest.raises(UsageError, match="--large-workers 1: give numbers from 2 up"):
        Options(large_workers=(1,))


def test_another_model_takes_the_place_of_the_tasks(tmp_path: Path) -> None:
    recipe = Options(model="resnet-50").recipe("digits")
    assert (recipe.model, recipe.weights, recipe.task) == ("resnet-50", None, "digits")
    assert Options(model="resnet-50", weights=str(tmp_path)).recipe("digits").weights == str(tmp_path)
    assert Options().recipe("digits").model == "digits-vit"


@pytest.mark.parametrize(("limit", "largest"), [(0, 0), (10, 1), (39, 3), (40, 4), (1000, 100)])
def test_the_largest_size_within_a_limit(limit: int, largest: int) -> None:
    assert largest_below(lambda size: 10 * size, limit) == largest
