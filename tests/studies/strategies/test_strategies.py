"""What the study of strategies makes of numbers, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.planner.conftest import MadeSource, random_units
from tests.studies.conftest import answer_to, table_rows
from tests.studies.fake_parts import share
from tests.studies.fake_training_parts import RATES, STRATEGIES_OPTIONS, strategies_parts

from stagewright.cluster.cluster import FREE
from stagewright.errors import UsageError
from stagewright.planner.calibration.calibrate import Calibration
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.studies import Findings, PartContext, Results
from stagewright.studies.parts.plain_loop import time_plain_loop
from stagewright.studies.strategies.measured import Experiment, list_experiments
from stagewright.studies.strategies.options import Options
from stagewright.studies.strategies.study import build_study, conclude


def concluded(parts: dict[str, Any], **options: Any) -> Findings:
    return conclude({**STRATEGIES_OPTIONS, **options}, Results(parts))


def test_the_experiments() -> None:
    assert [experiment.name for experiment in list_experiments((2, 4), (2, 4, 8), ("even", "client"))] == [
        "data-2",
        "pipeline-2-2-even",
        "pipeline-2-4-even",
        "pipeline-2-8-even",
        "pipeline-2-2-client",
        "pipeline-2-4-client",
        "pipeline-2-8-client",
        "data-4",
        "pipeline-4-2-even",
        "pipeline-4-4-even",
        "pipeline-4-8-even",
    ]


def test_the_table_has_the_published_columns() -> None:
    table = concluded(strategies_parts()).tables[0]
    rows = table_rows(table)
    data, pipeline, client, four = rows[0], rows[2], rows[4], rows[7]
    assert (data["experiment"], data["workers"], data["batch (micro-batches)"]) == ("data", "2", "64")
    assert (data["samples/s"], data["speed-up"], data["over data on 2"]) == ("180.0", "1.80", "1.00")
    assert (pipeline["batch (micro-batches)"], pipeline["accuracy %"]) == ("64 (4)", "95.9 ± 0.14")
    assert (pipeline["speed-up"], pipeline["over data on 2"], pipeline["source of speed"]) == (
        "1.50",
        "0.83",
        "measured",
    )
    assert client["experiment"] == "pipeline, client/server"
    assert (four["workers"], four["batch (micro-batches)"], four["learning rate"]) == ("4", "128 (4)", "0.002")
    assert (four["source of speed"], four["speed-up"], four["forecast"]) == ("unverified forecast", "3.40", "3.40")
    assert data["forecast"] == "–"
    assert concluded(strategies_parts()).tables[1].title == "Published"
    assert len(concluded(strategies_parts()).tables[1].rows) == 5


def test_a_run_that_is_not_equal_has_no_speedup() -> None:
    table = concluded(strategies_parts(equal=False)).tables[0]
    row = table_rows(table)[0]
    assert (row["speed-up"], row["over data on 2"], row["source of speed"]) == ("–", "–", "parity check failed")


def test_the_faster_one_is_what_was_measured() -> None:
    text = answer_to(concluded(strategies_parts()), "which is faster")
    assert "CIFAR-10, 2 workers, measured: data 1.80 ×, pipeline 1.50 × with 4 micro-batches." in text
    assert "Data parallel is faster: the pipeline runs at 0.83 × the speed of data parallel." in text
    assert "Superlinear" not in text
    assert "CIFAR-10, 4 workers, forecast with one device per worker" in text
    other = answer_to(concluded(strategies_parts({**RATES, "pipeline-2-4-even": 199.0})), "which is faster")
    assert "The pipeline is faster: the pipeline runs at 1.11 × the speed" in other
    beyond = answer_to(concluded(strategies_parts({**RATES, "data-2": 215.0})), "which is faster")
    assert "Superlinear speed-up: data 2.15 × on 2 workers." in beyond
    wrong = answer_to(concluded(strategies_parts({**RATES, "data-2": 230.0})), "which is faster")
    assert "Left out: data 2.30 × on 2 workers, more than they can reach" in wrong
    assert "CIFAR-10, 2 workers, measured" not in wrong
    level = answer_to(concluded(strategies_parts({**RATES, "pipeline-2-4-even": 178.0})), "which is faster")
    assert "within the variation between runs" in level


def in_rounds(**rates: tuple[float, ...]) -> dict[str, Any]:
    """Parts of three rounds; serial does 100, 50 and 200 samples a second."""
    parts = {name: part for name, part in strategies_parts().items() if not name.startswith("speed-")}
    for at, serial in enumerate((100.0, 50.0, 200.0)):
        made = {"data-2": 180.0, "pipeline-2-4-even": 150.0} | {
            name.replace("_", "-"): every[at] for name, every in rates.items()
        }
        for name, rate in (("serial-2", 100.0), *made.items()):
            row = {"samples_per_s": rate * serial / 100, "equal": True, "peak_memory_bytes": [1, 1]}
            parts[f"speed-cifar10-{name}-{at + 1}"] = row
    return parts


def test_three_rounds_are_compared_round_by_round() -> None:
    rates = {"data_2": (150.0, 180.0, 190.0), "pipeline_2_4_even": (120.0, 160.0, 130.0)}
    text = answer_to(concluded(in_rounds(**rates), rounds=3), "which is faster")
    assert "data 1.80 × (1.50 … 1.90), pipeline 1.30 × (1.20 … 1.60) with 4 micro-batches." in text
    assert "Data parallel is faster in each of 3 rounds: the pipeline runs at 0.80 × (0.68 … 0.89)" in text
    other = {"data_2": (120.0, 160.0, 130.0), "pipeline_2_4_even": (150.0, 180.0, 190.0)}
    text = answer_to(concluded(in_rounds(**other), rounds=3), "which is faster")
    assert "The pipeline is faster in each of 3 rounds: the pipeline runs at 1.25 × (1.12 … 1.46)" in text
    mixed = {"data_2": (150.0, 180.0, 190.0), "pipeline_2_4_even": (160.0, 110.0, 120.0)}
    assert "within the variation between runs" in answer_to(concluded(in_rounds(**mixed), rounds=3), "which is faster")


def test_summary_and_answer_call_the_same_strategy_faster() -> None:
    rates = {"data_2": (150.0, 180.0, 190.0), "pipeline_2_4_even": (120.0, 160.0, 130.0)}
    faster = concluded(in_rounds(**rates), rounds=3, workers=[2])
    assert faster.summary is not None
    assert "Data parallel is faster in each of 3 rounds" in answer_to(faster, "which is faster")
    assert faster.summary.advice.startswith("Use data parallel")
    hardly = {"data_2": (150.0, 180.0, 190.0), "pipeline_2_4_even": (148.0, 176.0, 188.0)}
    same = concluded(in_rounds(**hardly), rounds=3, workers=[2])
    assert same.summary is not None
    assert "within the variation between runs" in answer_to(same, "which is faster")
    assert same.summary.advice.startswith("Use either: their speeds differ by no more than those of repeated runs")


def test_a_pipeline_that_is_compared_with_data_is_cut_evenly() -> None:
    text = answer_to(concluded(strategies_parts({**RATES, "pipeline-2-4-client": 170.0})), "which is faster")
    assert "data 1.80 ×, pipeline 1.50 × with 4 micro-batches" in text
    alone = {"data-2": 180.0, "pipeline-2-4-client": 170.0}
    text = answer_to(concluded(strategies_parts(alone), cuts=["client"]), "which is faster")
    assert "pipeline, client/server 1.70 ×" in text


def test_accuracy_beside_its_interval_and_chance() -> None:
    text = answer_to(concluded(strategies_parts()), "accuracy")
    assert "(guessing reaches 10): data 95.9 ± " in text
    assert "No significant difference: the 95 % intervals of all differences contain 0." in text
    worse = strategies_parts(accuracy={"pipeline-2-4-even": (60.0, 60.1)})
    text = answer_to(concluded(worse), "accuracy")
    assert "a difference of −35.9 ±" in text
    assert "Below data parallel by more than the interval: pipeline (4)." in text
    alone = answer_to(concluded(strategies_parts(), seeds=[0]), "accuracy")
    assert "Inconclusive: with one seed, the variation between seeds is unknown." in alone
    names = ("data-2", "pipeline-2-2-even", "pipeline-2-4-even", "pipeline-2-4-client", "data-4", "pipeline-4-4-even")
    guesses = answer_to(concluded(strategies_parts(accuracy=dict.fromkeys(names, (10.5, 11.0)))), "accuracy")
    assert "too little was learned to compare strategies" in guesses
    assert "interval" not in guesses


def test_pieces_cuts_and_workers() -> None:
    findings = concluded(strategies_parts())
    assert "2 reach 1.20 × and 4 reach 1.50 ×; best: 4." in answer_to(findings, "micro-batches")
    level = answer_to(concluded(strategies_parts({**RATES, "pipeline-2-2-even": 150.1})), "micro-batches")
    assert "2 reach 1.50 × and 4 reach 1.50 ×; best: 2 and 4." in level
    only = answer_to(concluded(strategies_parts({"data-2": 180.0}), cuts=["even"]), "at a client")
    assert only.endswith("this studies both: stagewright study strategies --policies even,client")
    text = answer_to(findings, "at a client")
    assert "client and server reach 1.10 × (cut after layer.3 and layer.12), equal stages 1.50 ×" in text
    both = answer_to(concluded(strategies_parts({**RATES, "pipeline-2-2-client": 100.0})), "at a client")
    assert "2 micro-batches: client and server reach 1.00 ×, equal stages 1.20 ×" in both
    assert "4 micro-batches: client and server reach 1.10 × (cut after" in both
    assert "memory: client 10.0 MiB, server 30.0 MiB; equal stages 20.0 MiB and 20.0 MiB" in text
    assert "4 workers shared 2 devices" in answer_to(findings, "more workers")
    assert "relative to data parallel on 2: data 1.72, pipeline (2) 1.78" in answer_to(findings, "more workers")


def test_what_was_studied_and_is_not_known_is_said_so() -> None:
    """Workers shared their devices, and nothing was forecast: accuracy alone."""
    parts = {name: data for name, data in strategies_parts().items() if name.startswith("train")}
    findings = concluded(parts)
    for question in ("which is faster", "micro-batches change", "more workers"):
        assert answer_to(findings, question) == "Unknown: nothing was measured."
    assert "source of speed" not in [column.name for column in findings.tables[0].columns]
    assert "Only one number" in answer_to(concluded(parts, microbatches=[4]), "micro-batches change")
    assert "Only 2 workers" in answer_to(concluded(parts, workers=[2]), "more workers")
    one = {"workers": [2, 4], "devices": ["cuda:0", "cuda:0"]}
    assert "shared 1 device:" in answer_to(concluded(strategies_parts(), **one), "more workers")


def test_a_forecast_is_over_serial_with_its_batch_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a small model takes as long for 32 samples as for 64: two that share them gain nothing."""
    made = MadeSource(units=random_units(5, 0), tensors=(1,)).model(8, 1)
    sizes = [replace(made, profile=replace(made.profile, batch_size=size)) for size in (8, 32, 64)]
    calibration = Calibration(
        link=FREE, collective=FREE, overheads=EngineOverheads(), kind="cpu", hardware="made"
    ).to_dict()
    calibration |= {name: {"bandwidth_bytes_per_s": None, "latency_s": 0.0} for name in ("link", "collective")}
    options = Options(workers=(2,), cuts=(), batches=(64,))
    monkeypatch.setattr("stagewright.studies.strategies.study.load_model_costs", lambda costs: costs)
    part = next(part for part in build_study(options).parts if part.name == "forecast-digits")
    results = Results({"profile-digits": {"measured": sizes, "cuts": {}}, "calibration": calibration})
    forecasts = part.run(PartContext(folder=tmp_path, results=results, note=print))
    assert forecasts["data-2"]["speedup"] == pytest.approx(1.0, abs=0.05)


def test_large_batches() -> None:
    findings = concluded(strategies_parts())
    text = answer_to(findings, "out of memory")
    assert "devices of 100 MiB: batch 1024 runs out of memory under data parallel and runs as a pipeline." in text
    assert "gradient accumulation over micro-batches of 32 samples runs 1024 too" in text
    came = {(row[0], row[2]): row[4] for row in findings.tables[-1].rows}
    assert came[("data", "1024")] == "out of memory"
    assert came[("pipeline", "1024")] == "ran"
    parts = strategies_parts()
    parts["large-pipeline-1024"] = parts["large-data-1024"]
    assert "no tested batch runs only as a pipeline" in answer_to(concluded(parts), "out of memory")


def test_figures(tmp_path: Path) -> None:
    figure = concluded(strategies_parts()).figures[0]
    figure.draw(tmp_path / f"{figure.name}.svg")
    assert "<svg" in (tmp_path / f"{figure.name}.svg").read_text()


@pytest.mark.parametrize("missing", sorted(strategies_parts()))
def test_no_missing_part_raises(missing: str) -> None:
    parts = strategies_parts()
    del parts[missing]
    findings = concluded(parts)
    assert all(answer.sentences for answer in findings.answers)


def test_nothing_measured() -> None:
    assert all(answer.sentences for answer in conclude(STRATEGIES_OPTIONS, Results({})).answers)


def test_plans_of_the_experiments() -> None:
    options = Options(workers=(2, 4), batches=(32,))
    four = options.plan("digits", Experiment(strategy="pipeline", workers=4, microbatches=2, cut="even"), 1)
    assert (four.batch, four.schedule, four.devices) == (64, "gpipe", ("cpu:0", "cpu:1", "cpu:0", "cpu:1"))
    assert four.optimizer.learning_rate == pytest.approx(2e-3)
    client_server = Experiment(strategy="pipeline", workers=2, microbatches=4, cut="client")
    client = options.plan("digits", client_server, 1, ("a", "b"))
    assert (client.schedule, client.stage_workers) == ("1f1b", (0, 1, 0))
    assert options.large_plan("data", 1024, ("a",)).microbatches == 1
    assert options.large_plan("accumulated", 1024, ("a",)).microbatches == 16
    assert options.large_plan("pipeline", 1024, ("a",)).microbatches == 32
    names = [part.name for part in build_study(options).parts]
    assert "speed-digits-data-2-1" in names
    assert "speed-digits-data-4-1" not in names
    assert "train-digits-data-4-2" in names


def test_a_plain_loop_is_a_row_and_judges_the_baseline() -> None:
    parts = strategies_parts()
    parts["plain-cifar10-1"] = {"samples_per_s": 80.0}
    found = concluded(parts)
    assert [row[0] for row in found.tables[0].rows][:2] == ["plain torch loop", "one device (baseline)"]
    assert [row[10] for row in found.tables[0].rows][:2] == ["0.80", "1.00"]
    assert "0.80 × the single-device baseline, so speed-ups over a plain loop are 1.25 × as high" in answer_to(
        found, "which is faster"
    )
    busy = concluded(parts | {"calibration": {"noise": 0.4}})
    assert "but repeated measurements of this machine varied by 40 %, so the comparison is inconclusive" in answer_to(
        busy, "which is faster"
    )


@pytest.mark.slow
def test_a_plain_loop_trains() -> None:
    options = Options(tasks=("digits",), workers=(2,), microbatches=(4,), batches=(8,), steps=3, warmup=1)
    row = time_plain_loop(options.plan("digits", None, 0))
    assert len(row["steps_s"]) == 3
    assert row["samples_per_s"] == pytest.approx(8 / sorted(row["steps_s"])[1])


def test_the_summary_has_the_numbers() -> None:
    found = concluded(strategies_parts())
    assert found.summary is not None
    assert found.summary.measured.startswith("CIFAR-10 on 2 workers: data parallel ")
    assert "the pipeline bubble, (p − 1) ÷ (m + p − 1), is " in found.summary.why
    assert found.summary.advice.endswith(".")
    nothing = conclude(STRATEGIES_OPTIONS, Results({})).summary
    assert nothing is not None
    assert nothing.measured == "Nothing was measured."


def test_the_summary_says_where_the_time_of_a_step_went() -> None:
    parts = strategies_parts()
    for name, compute, bubble, collective in (("data-2", 0.8, 0.0, 0.2), ("pipeline-2-4-even", 0.7, 0.25, 0.05)):
        parts[f"speed-cifar10-{name}-1"]["shares"] = [
            share(worker, compute=compute, bubble=bubble, collective=collective) for worker in (0, 1)
        ]
    summary = concluded(parts, workers=[2]).summary
    assert summary is not None
    assert summary.why.endswith(
        "Time of a step (CIFAR-10, mean of 2 workers): data parallel compute 80 %, most of the rest collectives (20 "
        "%); pipeline compute 70 %, most of the rest pipeline bubble (25 %)."
    )
    assert "All workers together" not in summary.why


def test_the_summary_says_that_small_batches_compute_longer() -> None:
    """Compute may take most of a step, and yet longer than on one device: that is why two workers are not faster."""
    parts = strategies_parts()
    for name in ("data-2", "pipeline-2-4-even"):
        parts[f"speed-cifar10-{name}-1"]["shares"] = [share(worker, compute=0.9) for worker in (0, 1)]
    step_s = share(0, compute=0.9)["step_s"]
    parts["speed-cifar10-serial-2-1"]["latency_s"] = step_s
    summary = concluded(parts, workers=[2]).summary
    assert summary is not None
    assert (
        "All workers together compute 1.80 × (data parallel) and 1.80 × (pipeline) as long as one device for the same "
        "batch: smaller batches use a device less well" in summary.why
    )


def test_several_batches_are_cases_of_a_task() -> None:
    options = Options(tasks=("digits",), workers=(2,), microbatches=(4,), batches=(32, 64))
    assert options.cases == ("digits", "digits-b64")
    small, large = options.recipe("digits"), options.recipe("digits-b64")
    assert (small.batch, large.batch, large.task) == (32, 64, "digits")
    assert large.learning_rate == 2 * small.learning_rate
    names = [part.name for part in build_study(options).parts]
    assert {"data-digits", "speed-digits-b64-data-2-1", "train-digits-b64-pipeline-2-4-even-0"} <= set(names)
    assert "data-digits-b64" not in names
    data = Experiment(strategy="data", workers=2)
    assert options.plan("digits-b64", data, 0).batch == 64
    with pytest.raises(UsageError, match="two workers need a batch of 2 or more"):
        Options(batches=(1,))


def test_what_a_larger_batch_changes() -> None:
    assert "this studies two: stagewright study strategies --batch 64,128" in answer_to(
        concluded(strategies_parts()), "larger batch"
    )
    parts = strategies_parts()
    twice = {name.replace("cifar10", "cifar10-b128", 1): part for name, part in parts.items() if "-cifar10" in name}
    first = STRATEGIES_OPTIONS["recipes"]["cifar10"]
    recipes = {"cifar10": first, "cifar10-b128": replace(first, batch=128, learning_rate=2 * first.learning_rate)}
    findings = concluded({**parts, **twice}, recipes=recipes)
    text = answer_to(findings, "larger batch")
    assert "CIFAR-10, data, 2 workers: batch 64 180.0 samples/s, 1.80 ×, accuracy 95.9" in text
    assert "batch 128 180.0 samples/s" in text
    assert "No significant difference in accuracy (" in text
    assert "CIFAR-10, batch 128, 2 workers, measured" in answer_to(findings, "which is faster")
    assert {row["batch (micro-batches)"] for row in table_rows(findings.tables[0])} >= {"64", "128"}
    assert len(findings.tables[1].rows) == 5


def test_neither_strategy_is_advised_where_one_device_is_as_fast() -> None:
    slow = dict.fromkeys(RATES, 95.0) | {"data-2": 100.0}
    summary = concluded(strategies_parts(slow), workers=[2]).summary
    assert summary is not None
    assert summary.advice.startswith("Use one device: neither strategy is measurably faster")
    busy = concluded(strategies_parts(slow) | {"calibration": {"noise": 0.5}}, workers=[2]).summary
    assert busy is not None
    assert busy.advice.startswith(
        "Whether either is faster than one device is uncertain: repeated measurements of this"
    )
    fast = concluded(strategies_parts()).summary
    assert fast is not None
    assert "Use one device" not in fast.advice


def test_a_quick_study_names_quick_commands() -> None:
    full = answer_to(concluded(strategies_parts(), microbatches=[4]), "more micro-batches")
    assert full.endswith("stagewright study strategies --microbatches 2,4,8")
    quick = answer_to(concluded(strategies_parts(), microbatches=[4], quick=True), "more micro-batches")
    assert quick.endswith("stagewright study strategies --microbatches 2,4,8 --quick")
