"""The answer of a comparison: the strategy, its speed-up, its largest loss, and the change that fits the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_runs import SERIAL_S, make_run
from stagewright.report.headline import Candidate, compare_headline, headline, speedup_losses
from stagewright.report.page import build_report
from stagewright.runs.result import RunResult
from stagewright.trace.breakdown import PARTS
from stagewright.trace.read import read_trace


def candidate(strategy: str, speedup: float | None, losses: dict[str, float] | None = None, **more: Any) -> Candidate:
    values: dict[str, Any] = {
        "strategy": strategy,
        "workers": 1 if strategy == "serial" else 2,
        "batch": 32,
        "microbatches": 8 if strategy == "pipeline" else 1,
        "stages": 2 if strategy == "pipeline" else 1,
        "schedule": "1f1b" if strategy == "pipeline" else None,
        "samples_per_s": 100.0 * (speedup or 1.0),
        "latency_s": 0.1,
        "equal": True,
        "peak_memory_bytes": (2**20,),
        **more,
    }
    return Candidate(result=RunResult(**values), speedup=speedup, losses=losses or {})


SERIAL = candidate("serial", 1.0)


def test_fastest_strategy_with_its_speedup_and_limit() -> None:
    data = candidate("data", 1.77, {"compute": 0.002, "collective": 0.012, "wait": 0.001})
    (sentence,) = headline([SERIAL, data, candidate("tensor", 1.47)])
    assert sentence == (
        "Use data parallel: 1.77 × one device's throughput on 2 devices; the exposed gradient all-reduce takes 12% of "
        "the step, so try --batch 64, which has more compute per all-reduce."
    )


def test_runs_with_other_baselines_are_ranked_by_speedup() -> None:
    """Several comparisons in one folder, of a machine that has become slower or with other batches."""
    data = candidate("data", 0.89, samples_per_s=62.0)
    (sentence,) = headline([SERIAL, data, candidate("pipeline", 1.31, samples_per_s=40.0)])
    assert sentence.startswith("Use pipeline parallel: 1.31 ×")


@pytest.mark.parametrize(
    ("strategy", "loss", "advice"),
    [
        ("pipeline", "bubble", "--microbatches 16"),
        ("pipeline", "transfer", "--codec auto"),
        ("pipeline", "compute", "--microbatches 4"),
        ("pipeline", "wait", "--policy"),
        ("data", "wait", "equal speed"),
        ("data", "overhead", "--batch 64"),
        ("tensor", "collective", "faster links"),
        ("tensor", "compute", "narrower matrices"),
    ],
)
def test_advice_fits_the_largest_loss(strategy: str, loss: str, advice: str) -> None:
    losses = {**dict.fromkeys(PARTS, 0.001), loss: 0.02}
    (sentence,) = headline([SERIAL, candidate(strategy, 1.5, losses)])
    assert "20% of the step" in sentence
    assert advice in sentence


def test_micro_batches_of_one_sample_are_not_split_further() -> None:
    (sentence,) = headline([SERIAL, candidate("pipeline", 1.5, {"bubble": 0.02}, batch=8)])
    assert "--schedule zbv" in sentence


def test_no_gain_means_one_device() -> None:
    first, *_ = headline([SERIAL, candidate("data", 0.74), candidate("pipeline", 0.5)])
    assert first == "Stay on one device: data parallel comes closest, at 0.74 × on 2 devices."


def test_less_memory_is_a_second_sentence() -> None:
    piped = candidate("pipeline", 1.18, peak_memory_bytes=(2**19, 2**18))
    _, second = headline([SERIAL, candidate("data", 1.8), piped])
    assert second == "If memory is short, use pipeline parallel: 512 KiB per device instead of 1.00 MiB, at 1.18 ×."
    assert len(headline([SERIAL, piped])) == 1, "the fastest itself needs least"
    *_, second = headline([SERIAL, candidate("pipeline", 0.9, peak_memory_bytes=(2**19,))])
    assert second.endswith("512 KiB per device instead of 1.00 MiB, at 0.90 ×.")


def test_what_is_not_verified_is_not_recommended() -> None:
    wrong = candidate("data", None, equal=False, samples_per_s=900.0)
    (sentence,) = headline([SERIAL, wrong, candidate("tensor", 1.4)])
    assert sentence.startswith("Use tensor parallel: 1.40 ×")
    assert headline([SERIAL, wrong]) == ()
    assert headline([SERIAL]) == ()


def test_without_a_baseline_there_is_no_speedup() -> None:
    (sentence,) = headline([candidate("data", None, samples_per_s=70.0, shard=True)])
    assert sentence.startswith("FSDP is fastest: 70.0 samples/s on 2 devices; add serial")


def test_losses_are_what_separates_the_step_from_the_ideal(tmp_path: Path) -> None:
    trace = read_trace(make_run(tmp_path, "pipeline=2"))
    losses = speedup_losses(trace, SERIAL_S, 2)
    assert SERIAL_S / 2 + sum(losses.values()) == pytest.approx(0.101)
    assert max(losses, key=lambda name: losses[name]) == "bubble"


def test_rows_and_page_say_the_same(tmp_path: Path) -> None:
    folders = [make_run(tmp_path, step_s=SERIAL_S), make_run(tmp_path, "data=2", number=1)]
    page = build_report([tmp_path]).page
    assert page.sections[0].name == "result"
    rows = []
    for folder in folders:
        result = folder.result()
        assert result is not None
        rows.append(replace(result, speedup=SERIAL_S / result.latency_s))
    first = compare_headline(rows)
    assert page.sections[0].prose == first
    assert first[0].startswith(f"Use data parallel: {SERIAL_S / 0.067:.2f} ×")
