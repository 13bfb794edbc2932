from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from stagewright.report.render.terminal import draw_table
from stagewright.report.tables.compare import compare_remarks, compare_table, failure_tracebacks
from stagewright.report.tables.notes import parity_note
from stagewright.runs.result import ParityReport, RunResult
from stagewright.table import Cell
from stagewright.zoo.model import LOSS_NOTES

EQUAL: dict[str, Any] = {
    "equal": True,
    "loss": 0.0,
    "outputs": 0.0,
    "gradients": 3e-7,
    "buffers": 0.0,
    "tolerance": 1e-5,
    "worst": "gradient of fc1",
}


def row(**more: Any) -> RunResult:
    values = {
        "strategy": "data×pipeline",
        "workers": 4,
        "batch": 16,
        "microbatches": 4,
        "schedule": "1f1b",
        "samples_per_s": 100.0,
        "samples_per_s_spread": 4.0,
        "latency_s": 0.16,
        "speedup": 1.5,
        "share_of_bound": 0.6,
        "peak_memory_bytes": [1024, 2048, 1024, 2048],
        "link_bytes": {"0": 4096},
        "collective_bytes": [{"data": 1024}] * 4,
        "equal": True,
        "equality": EQUAL,
        **more,
    }
    return RunResult.from_dict(values)


def shown(rows: list[RunResult]) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(draw_table(compare_table(rows, "a model [with brackets]")))
    return console.export_text()


def test_what_a_step_sends_is_links_and_collectives() -> None:
    assert row().sent_bytes == 8192
    assert "8.00 KiB" in shown([row()])
    (line,) = compare_remarks([row()])
    assert "matches the baseline within 3e-07" in line
    assert "traffic per step 4.00 KiB P2P over cut 0, 4.00 KiB in data collectives" in line
    (line,) = compare_remarks([row(collective_bytes=[{"tied": 1024}, {"tied": 1024}])])
    assert "traffic per step 4.00 KiB P2P over cut 0, 2.00 KiB in all-reduces of tied weights" in line


def test_strategies_that_lose_against_a_short_step_are_told_why() -> None:
    serial = row(strategy="serial", latency_s=0.012, batch=8, speedup=1.0, link_bytes={}, collective_bytes=[{}])
    slower, faster = row(strategy="pipeline", speedup=0.5), row(strategy="data", speedup=1.2)
    *_, note = compare_remarks([serial, faster, slower])
    assert note == (
        "note: the baseline's step of 8 samples takes only 12.0 ms, so launch and communication overheads dominate: "
        "pipeline; a larger batch says more: --batch 256"
    )
    assert not any("note" in line for line in compare_remarks([serial, faster]))
    assert not any("note" in line for line in compare_remarks([replace(serial, latency_s=0.2), slower]))
    assert not any("note" in line for line in compare_remarks([slower]))
    failed = RunResult(strategy="serial", workers=1, error="out of memory", status="failed")
    assert not any("note" in line for line in compare_remarks([failed, slower]))


def test_a_plan_that_is_not_equal_has_no_speedup_and_says_what_differs() -> None:
    wrong = row(equal=False, speedup=None, share_of_bound=None, equality={**EQUAL, "gradients": 0.5})
    assert "NO" in shown([wrong])
    assert "1.50 ×" not in shown([wrong])
    (line,) = compare_remarks([wrong])
    assert (
        "NOT match the single-device baseline: gradient of fc1 has a relative error of 5e-01 (tolerance 1e-05)" in line
    )


def test_a_failure_tells_where_and_which_log() -> None:
    error = "worker 1 failed: boom\n  at: step 0, stage 1\n  log: runs/a/workers/1/log.txt\nTraceback …"
    failed = RunResult(strategy="pipeline", workers=2, batch=8, microbatches=4, schedule="1f1b", error=error)
    assert "failed" in shown([failed])
    assert compare_remarks([failed]) == [
        "pipeline failed: worker 1 failed: boom",
        "  at: step 0, stage 1",
        "  log: runs/a/workers/1/log.txt",
    ]


def test_a_streamed_baseline_and_a_step_in_float64_are_named() -> None:
    (line,) = compare_remarks([row(equality={**EQUAL, "streamed": True})])
    assert "matches the streamed baseline within 3e-07" in line
    (line,) = compare_remarks([row(equality={**EQUAL, "gradients": 2e-3, "float64_error": 5e-16})])
    assert "matches the baseline within 2e-03, and within 5e-16 in float64: the rest is rounding at kinks" in line


def test_a_traceback_is_told_once() -> None:
    trace = 'Traceback (most recent call last):\n  File "mine.py", line 3, in forward\nValueError: boom'
    stack = '  File "mine.py", line 9, in forward\n    time.sleep(1000)'
    head = "worker 1 failed: boom\n  at: step 0, stage 1\n  log: log.txt\n"
    failed = [RunResult(error=head + text) for text in (trace, trace, stack)]
    refused = RunResult(error=head + trace, refused=True)
    assert failure_tracebacks([row(), *failed, refused]) == [trace, stack]


def test_shards_are_labelled() -> None:
    sharded = row(strategy="data", shard=True)
    assert "data, FSDP" in shown([sharded])
    assert compare_remarks([sharded])[0].startswith("data, FSDP: matches the baseline")
    assert "FSDP" not in shown([row(strategy="data", shard=False)])


def test_a_refusal_is_its_reason_alone() -> None:
    error = "worker 1 (cpu:1) refused: no heads; use data instead\n  at: build stages\n  log: runs/a/log.txt"
    refused = RunResult(strategy="tensor", workers=2, batch=8, microbatches=1, error=error, refused=True)
    assert "refused" in shown([refused])
    assert compare_remarks([refused]) == ["tensor refused: no heads; use data instead"]


def test_a_nan_is_named() -> None:
    parity = ParityReport(**{**EQUAL, "loss": float("nan"), "worst": "x"})
    assert parity_note("data", parity).startswith("data does NOT match the single-device baseline: a value is NaN")
    assert parity_note("data", replace(parity, loss=0.5)).endswith("x has a relative error of 5e-01 (tolerance 1e-05)")


def whole(loss_of_pieces: float, pieces: int, samples: int, **more: Any) -> dict[str, Any]:
    values = {"loss": 3.46574, "loss_of_pieces": loss_of_pieces, "pieces": pieces, "samples": samples}
    return {**values, "difference": 0.4, "depends": True, "without_dropout": False, **more}


def test_a_loss_that_depends_on_the_pieces_is_told_with_every_number_and_what_to_do() -> None:
    rows = [
        row(strategy="serial", batch=32, whole_batch=None),
        row(strategy="data", batch=32, whole_batch=whole(2.77259, 2, 16)),
        row(strategy="pipeline", batch=32, whole_batch=whole(2.07944, 8, 4)),
        row(strategy="data×pipeline", batch=32, whole_batch=whole(2.07944, 8, 4)),
    ]
    *lines, note = compare_remarks(rows)
    assert len(lines) == 4
    assert note.startswith(
        "note: the loss of this model depends on which samples share a batch: 2.7726 on 2 micro-batches of 16 (data), "
        "2.0794 on 8 micro-batches of 4 (pipeline, data×pipeline), 3.4657 on the whole batch of 32; every plan is "
        "verified against the baseline on the same micro-batches"
    )
    assert note.endswith("use fewer and larger micro-batches, or tensor parallelism, which does not split it")


def test_it_is_not_told_where_it_does_not_and_close_numbers_are_told_apart() -> None:
    (line,) = compare_remarks([row(whole_batch=whole(3.46574, 8, 2, depends=False))])
    assert "depends" not in line
    _, note = compare_remarks([row(batch=15, whole_batch=whole(3.465741, 4, 4, without_dropout=True))])
    assert (
        "3.465741 on 4 micro-batches of up to 4 (data×pipeline), 3.46574 on the whole batch of 15 (without dropout)"
        in note
    )


def test_a_loss_that_nobody_gave_is_told_once() -> None:
    *lines, note = compare_remarks([row(loss_source="stand-in")] * 2)
    assert len(lines) == 2
    assert note == f"note: {LOSS_NOTES['stand-in']}"
    assert compare_remarks([row(loss_source="model")])[-1] == f"note: {LOSS_NOTES['model']}"
    assert len(compare_remarks([row(loss_source="given")])) == 1


def test_more_than_the_bound_is_marked_and_explained() -> None:
    beyond = row(share_of_bound=1.11)
    assert Cell("111%", "warning") in compare_table([beyond], "a model").rows[0]
    assert any("more than the upper bound" in line for line in compare_remarks([beyond]))
    assert not any("more than the upper bound" in line for line in compare_remarks([row(share_of_bound=1.0)]))
