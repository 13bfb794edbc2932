"""One result for all readers: the keys of result.json and of `compare --json` stay what they were."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from stagewright.errors import RunError, UsageError
from stagewright.runs.result import MemoryUse, ParityReport, RunResult, WholeBatchLoss
from stagewright.spec.plan import Mesh, ModelSpec, Plan

PLAN = Plan(model=ModelSpec(name="deit-small"), batch=8, mesh=Mesh(pipeline=2), microbatches=2, schedule="gpipe")
PARITY = ParityReport(equal=True, tolerance=1e-5, loss=0.0, outputs=1e-7, gradients=2e-6, buffers=0.0, worst="loss")
WHOLE = WholeBatchLoss(
    loss=1.0, loss_of_pieces=1.0, pieces=2, samples=4, difference=0.0, depends=False, without_dropout=False
)
TIMED = RunResult.of_plan(
    PLAN,
    stages=2,
    cuts=("blocks.3",),
    training=True,
    samples_per_s=40.0,
    samples_per_s_spread=2.0,
    latency_s=0.2,
    equal=True,
    parity=PARITY,
    loss_source="given",
    whole_batch=WHOLE,
    peak_memory_bytes=(10, 30),
    process_peak_bytes=(100, None),
    memory=(MemoryUse(parameters=10), MemoryUse(activations=30)),
    link_bytes={"0": 64},
    collective_bytes=({"data": 8}, {"data": 8, "tied": 4}),
    bound=1.6,
    run="runs/a",
)
TIMED_KEYS = (
    *("strategy", "shard", "fsdp_shards", "fsdp_gather", "zero", "workers", "batch", "microbatches", "schedule"),
    *("stages", "cuts", "training"),
    *("samples_per_s", "samples_per_s_spread", "latency_s", "equal", "equality", "loss_source", "whole_batch"),
    *("peak_memory_bytes", "process_peak_bytes", "memory", "link_bytes", "collective_bytes", "bound", "run"),
)
FAILURE_KEYS = (
    *(
        "strategy",
        "shard",
        "fsdp_shards",
        "fsdp_gather",
        "zero",
        "workers",
        "batch",
        "microbatches",
        "schedule",
        "refused",
        "error",
        "equal",
        "speedup",
    ),
)


def as_read(result: RunResult) -> RunResult:
    return RunResult.from_dict(json.loads(json.dumps(result.to_dict())))


def test_a_timed_run_has_its_keys_and_comes_back() -> None:
    written = TIMED.to_dict()
    assert set(written) == set(TIMED_KEYS)
    assert written["equality"]["gradients"] == 2e-6
    assert written["memory"][1]["activations"] == 30
    assert as_read(TIMED) == TIMED
    assert (TIMED.is_timed, TIMED.max_memory_bytes, TIMED.sent_bytes) == (True, 30, 84)
    assert TIMED.axis_bytes == {"data": 16, "tied": 4}
    assert TIMED.relative_spread == 0.025


def test_null_values_of_a_timed_run_are_written() -> None:
    serial = replace(TIMED, schedule=None, whole_batch=None, cuts=(), link_bytes={}, samples_per_s_spread=0.0)
    assert set(serial.to_dict()) == set(TIMED_KEYS)
    assert serial.to_dict()["schedule"] is None


def test_compared_rows_have_a_speedup_also_where_it_is_unknown() -> None:
    row = replace(TIMED, is_compared=True, speedup=None, share_of_bound=None)
    assert set(row.to_dict()) == {*TIMED_KEYS, "speedup", "share_of_bound"}
    assert as_read(row) == row
    rounds = replace(row, speedup=1.5, share_of_bound=0.9, speedups=(1.4, 1.6))
    assert rounds.to_dict()["speedups"] == [1.4, 1.6]
    assert as_read(rounds) == rounds


def test_refused_and_failed_plans() -> None:
    refused = RunResult.of_failure(PLAN, UsageError("no heads"))
    assert set(refused.to_dict()) == set(FAILURE_KEYS)
    assert (refused.status, refused.refused, refused.error) == ("refused", True, "no heads")
    failed = RunResult.of_failure(PLAN, RunError("killed"))
    assert (failed.status, failed.to_dict()["refused"], failed.to_dict()["speedup"]) == ("failed", False, None)
    assert RunResult(status="failed", error="killed").to_dict() == {"error": "killed"}


def test_training_runs() -> None:
    epoch = {"epoch": 1, "step": 3, "training_loss": 0.5, "evaluation_loss": 0.4, "accuracy": 0.9}
    content = {
        "epochs": [{**epoch, "samples_per_s": 50.0, "evaluation_s": 0.1}],
        "metric": "accuracy",
        "steps": 3,
        "model": "mlp-mnist",
        "task": "digits",
        "seed": 0,
        "strategy": "serial",
        "workers": 1,
        "run": "runs/b",
        "accuracy": 0.9,
        "samples_per_s": 50.0,
    }
    result = RunResult.from_dict(content)
    assert result.to_dict() == content
    assert result.history is not None
    assert (result.history.score, result.history.epochs[0].evaluation_loss, result.extra) == (0.9, 0.4, {})
    assert not result.is_timed


def test_older_files_lack_keys_and_jobs_of_users_have_others() -> None:
    content = {"status": "done", "samples_per_s": 12.5, "peak_memory_bytes": [3, 7], "energy_j": 4}
    result = RunResult.from_dict({**content, "equality": {**PARITY.to_dict(), "updates": 0.0, "nudge": 1}})
    assert (result.samples_per_s, result.latency_s, result.extra) == (12.5, 0.0, {"energy_j": 4})
    assert result.parity == PARITY
    assert result.to_dict()["energy_j"] == 4


def test_the_largest_error_is_nan_where_any_is() -> None:
    assert PARITY.max_error == 2e-6
    assert math.isnan(replace(PARITY, outputs=math.nan).max_error)


@pytest.mark.parametrize(
    "damaged", [{"samples_per_s": 0.0, "samples_per_s_spread": 1.0}, {"link_bytes": {"other": 4}}, {"bound": 0.0}]
)
def test_values_that_no_run_has_are_refused(damaged: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"samples/s|cut|bound"):
        RunResult.from_dict({"samples_per_s": 2.0, **damaged})
