"""What the study of memory makes of numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.studies.conftest import answer_to
from tests.studies.fake_parts import MEMORY_OPTIONS, PEAKS, SPEEDS, memory_parts

from made_profiles import profile_of, unit
from stagewright.errors import RunError, UsageError
from stagewright.studies import Findings, PartContext, Results
from stagewright.studies.memory.options import Options
from stagewright.studies.memory.study import _cuts, _known_fit, build_study, conclude
from stagewright.studies.parts.search import next_size
from stagewright.studies.runner.load import choose_study


def concluded(parts: dict[str, object]) -> Findings:
    return conclude(MEMORY_OPTIONS, Results(parts))


def test_highest_and_lowest_are_what_was_measured() -> None:
    text = answer_to(concluded(memory_parts()), "highest")
    assert "data 1.70 ×, tensor 1.40 × and pipeline 0.80 ×." in text
    assert "Data is the fastest, pipeline the slowest." in text
    assert "The largest loss of data is collectives: 20 % of a step" in text
    assert "Here data is the fastest and pipeline the slowest." in text
    published = answer_to(concluded(memory_parts({**SPEEDS, "tensor": 19.0})), "highest")
    assert "Tensor is the fastest, pipeline the slowest." in published
    assert "Here it is the same." in published
    level = answer_to(concluded(memory_parts({**SPEEDS, "data": 14.1, "tensor": 14.0, "pipeline": 13.9})), "highest")
    assert "within the variation between runs" in level
    assert "Here they can't be told apart." in level
    assert "Here data" not in level


def test_a_slower_strategy_may_save_memory() -> None:
    text = answer_to(concluded(memory_parts()), "is slower")
    assert (
        text == "Pipeline is slower than one device (0.80 ×), but its workers need at most 250 MiB instead of 400 MiB."
    )
    none = answer_to(concluded(memory_parts({**SPEEDS, "pipeline": 11.0})), "is slower")
    assert none.startswith("None of them")
    assert none.endswith(
        "A slower strategy may still be needed for its memory: tensor with checkpointing needs 165 MiB on its largest "
        "worker instead of 400 MiB."
    )
    assert "no less than one device" in answer_to(
        concluded(memory_parts(peaks={**PEAKS, "pipeline": 410})), "slower than one device"
    )


def test_the_ideal_is_made_of_the_measured_step() -> None:
    text = answer_to(concluded(memory_parts()), "free communication")
    assert "Data: measured 1.70 ×; with free communication at most 2.00 × (85 % reached)" in text
    assert "with perfect balance too 2.12 ×, and on any number of devices 8.50 ×: one sample per device" in text
    assert "on any number of devices no bound: what is left" in text
    busy = concluded(memory_parts() | {"calibration": {"noise": 0.33}})
    text = answer_to(busy, "What is the ideal")
    assert "any number of devices 8.50" not in text
    assert text.endswith("is inconclusive: repeated measurements of this machine varied by 33 %.")
    fast = answer_to(concluded(memory_parts({**SPEEDS, "data": 21.0})), "free communication")
    assert "Data: measured 2.10 ×; with free communication at most 2.47 × (85 % reached)" in fast, "not 105 % of 2"


def test_a_measurement_above_its_ideal_stops_the_page() -> None:
    parts = memory_parts()
    parts["ideal-data"] = [{"round": 1, "step_s": 1.0, "free_s": 1.52, "balanced_s": 1.0, "endless_s": 0.5}]
    with pytest.raises(RunError, match=r"defect: round 1 of data took 1 s, less than its ideal of 1\.52 s"):
        concluded(parts)


def test_the_cut_does_not_follow_noise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two noisy profiles of the same model: the measured times differ, the cut does not."""
    monkeypatch.setattr("stagewright.planner.costs.layer_scaling.with_num_layers", lambda costs, count: costs)
    cuts = []
    for slow in (0, 5):
        units = [unit(f"h.{index}", 0.5 if index == slow else 0.1, (0.1, 0.1)) for index in range(6)]
        costs = SimpleNamespace(profile=profile_of(units))
        monkeypatch.setattr("stagewright.studies.memory.study.load_model_costs", lambda data, costs=costs: costs)
        context = PartContext(folder=tmp_path, results=Results({"forecast-pipeline": {"measured": {}}}))
        cuts.append(_cuts(Options(), "pipeline", 6, context))
    assert cuts == [("h.2",), ("h.2",)]


def test_quick_is_a_size_at_which_activations_dominate() -> None:
    """Width 512: about 16 saved values of that width per token and block, and 12 × 512² parameters per block."""
    chosen = choose_study("memory", {"devices": ("cpu:0", "cpu:1")}, quick=True).options
    saved_bytes = 4 * 16 * 512 * chosen["batch"] * chosen["sequence_length"]
    assert saved_bytes > 2 * 4 * 12 * 512**2 * 0.9, "more than parameters and gradients of a block (SGD)"


def test_the_baseline_is_the_fastest_single_device_run() -> None:
    findings = concluded(memory_parts())
    assert "over the fastest single-device run of the same batch (one device)" in findings.tables[0].notes[0]
    parts = memory_parts()
    parts["run-serial+recompute-1"]["samples_per_s"] = 12.5
    findings = concluded(parts)
    assert "same batch (one device with checkpointing)" in findings.tables[0].notes[0]
    speedups = {row[:2]: row[3] for row in findings.tables[0].rows}
    assert (speedups["one device", "no"], speedups["data", "no"]) == ("0.80", "1.36")


def test_what_recomputation_costs_and_saves() -> None:
    text = answer_to(concluded(memory_parts()), "checkpointing")
    assert (
        "One device: activation checkpointing costs 25 % more time and saves 25 % of the memory (400 MiB to 300 MiB)."
        in text
    )
    assert "(measured 20 % less, though it repeats forwards" in answer_to(
        concluded(_faster_with_checkpointing()), "checkpointing"
    )
    assert "saves no memory" in answer_to(concluded(memory_parts(saves=0.0)), "checkpointing")


def _faster_with_checkpointing() -> dict[str, object]:
    parts = memory_parts()
    parts["run-data+recompute-1"]["samples_per_s"] = SPEEDS["data"] * 1.25
    return parts


@pytest.mark.parametrize(("rate", "text"), [(5.0, "226 % more, though"), (20.0, "15 % less, though")])
def test_a_cost_of_checkpointing_that_can_not_be_is_no_cost(rate: float, text: str) -> None:
    parts = memory_parts()
    parts["run-data+recompute-1"]["samples_per_s"] = 17.0 / 3.26 if rate == 5.0 else rate
    found = concluded(parts)
    answer = answer_to(found, "cost and save")
    assert f"Data: activation checkpointing has an unknown cost in time (measured {text}" in answer
    (table,) = (table for table in found.tables if table.title.startswith("Cost and savings"))
    assert [row[1] for row in table.rows] == ["25 %", "disturbed", "25 %", "25 %"]


def test_checkpointing_that_was_not_run_is_forecast() -> None:
    """Quick runs it where it saves the most; its memory elsewhere is forecast, and the page says which is which."""
    parts = memory_parts()
    del parts["run-data+recompute-1"]
    parts["forecast-data"]["data+recompute"] = {"peak_memory_bytes": PEAKS["data"] << 19, "parts": [], "speedup": 1.0}
    found = concluded(parts)
    text = answer_to(found, "cost and save")
    saved = "Data: by forecast, activation checkpointing saves 50 % of the memory"
    assert f"{saved} ({PEAKS['data']} MiB to {PEAKS['data'] // 2} MiB)." in text
    assert "With data it was not run; this does: stagewright study memory --checkpointing serial,data" in text
    peaks = f"By forecast, with checkpointing: data {PEAKS['data'] // 2} MiB."
    assert peaks in answer_to(found, "least memory")
    (table,) = (table for table in found.tables if table.title.startswith("Cost and savings"))
    assert [(row[0], row[1], row[-1]) for row in table.rows] == [
        ("one device", "25 %", "measured"),
        ("data", "–", "forecast"),
        ("tensor", "25 %", "measured"),
        ("pipeline", "25 %", "measured"),
    ]
    assert found.summary is not None
    assert "saves 25 to 50 % of the memory (data by forecast) and takes 25 % more time." in found.summary.measured


def test_a_model_that_was_timed_is_not_run_again_to_see_whether_it_fits() -> None:
    options = Options(memory_bytes=100 << 20)
    results = Results(
        {
            "run-data-1": {"peak_memory_bytes": [120 << 20, 90 << 20], "run": "runs/a"},
            "run-tensor+recompute-1": {"peak_memory_bytes": [96 << 20, 96 << 20], "run": "runs/b"},
        }
    )
    context = PartContext(folder=Path("unused"), results=results)
    data, tensor = (_known_fit(options, variant, context) for variant in ("data", "tensor+recompute"))
    assert data is not None
    assert not data["ran"]
    assert tensor is not None
    assert tensor["ran"]
    assert _known_fit(options, "pipeline", context) is None
    on_gpus = Options(devices=("cuda:0", "cuda:1"), memory_bytes=100 << 20)
    assert _known_fit(on_gpus, "data", context) is None, "a limit there counts what the allocator reserves"


def test_an_old_noisy_calibration_does_not_make_this_study_noisy() -> None:
    """The machine was busy when it was calibrated, and is calm now: runs are compared, forecasts stay uncertain."""
    parts = memory_parts()
    parts["calibration"] = {"measured_at": "2026-11-17T16:39", "noise": 0.42, "is_measured_here": False}
    summary = concluded(parts).summary
    assert summary is not None
    assert summary.measured.endswith("takes 25 % more time.")
    assert "Uncertain: the calibration of this machine varied by 42 %." in summary.why
    parts["calibration"]["is_measured_here"] = True
    busy = concluded(parts).summary
    assert busy is not None
    assert busy.measured.endswith("its cost in time is inconclusive.")


def test_steps_that_vary_widen_the_margin() -> None:
    parts = memory_parts({**SPEEDS, "data": 17.0, "tensor": 15.5, "pipeline": 9.2})
    assert "Data is the fastest, pipeline the slowest." in answer_to(concluded(parts), "highest")
    for name, row in parts.items():
        if name.startswith("run-"):
            row["samples_per_s_spread"] = 0.06 * row["samples_per_s"]
    assert "Data or tensor is the fastest, pipeline the slowest." in answer_to(concluded(parts), "highest")


def test_a_speedup_above_the_devices_is_flagged() -> None:
    summary = concluded(memory_parts({**SPEEDS, "data": 20.4})).summary
    assert summary is not None
    assert summary.ideal.startswith("2 × (measured 2.04 × of data: within 5.0 %, by which runs differ here);")


def test_least_memory() -> None:
    text = answer_to(concluded(memory_parts()), "least memory")
    assert "Tensor with checkpointing uses the least: 165 MiB on the largest worker, 41 % of the 400 MiB" in text
    assert "Here it is the same." in text
    assert "it is pipeline with checkpointing" in answer_to(
        concluded(memory_parts(peaks={**PEAKS, "pipeline": 100})), "least"
    )


def test_workers_that_did_the_same_and_those_that_did_not() -> None:
    text = answer_to(concluded(memory_parts()), "execute")
    assert "Data: workers of data. Data, actions of every worker: 4 forwards." in text
    assert "Pipeline, 90 and 100 operators per step: workers of pipeline." in text
    parts = memory_parts()
    parts["executed-pipeline"]["pipeline"][1]["kinds"] = {"forward": {"count": 8, "seconds": 1.0, "bytes": 0}}
    text = answer_to(concluded(parts), "execute")
    assert "Pipeline, actions of each worker; worker 0: 4 forwards; worker 1: 8 forwards." in text
    assert text.endswith("a collective of actions may be several of torch's, or none where workers share memory.")


def test_layers_found_by_running() -> None:
    findings = concluded(memory_parts())
    text = answer_to(findings, "layers fit")
    assert "Data: 3 layers ran with 384 MiB per device (as forecast); 4 ran out of memory." in text
    assert "Tensor with checkpointing: 8 or more layers ran with 384 MiB per device (forecast 7)." in text
    assert "The most layers, 8, fit with tensor with checkpointing." in text
    assert "The most layers, 3, fit with data and tensor with checkpointing" in answer_to(
        concluded(memory_parts(largest=3)), "layers fit"
    )
    rows = {row[0]: row for row in findings.tables[3].rows}
    assert rows["data"] == ("data", "3", "3", "300 MiB", "3: ran; 4: out of memory")
    assert rows["one device"][2:] == ("–", "–", "not run")


@pytest.mark.parametrize("missing", [*memory_parts(), "everything"])
def test_no_missing_part_stops_the_rest(missing: str) -> None:
    parts = {} if missing == "everything" else {name: data for name, data in memory_parts().items() if name != missing}
    findings = concluded(parts)
    assert len(findings.answers) == 7
    assert all(answer.sentences for answer in findings.answers)


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    (figure,) = concluded(memory_parts()).figures
    figure.draw(tmp_path / "memory.svg")
    assert "tensor with checkpointing" in (tmp_path / "memory.svg").read_text()


def test_options_that_can_not_be_are_refused() -> None:
    with pytest.raises(UsageError, match="no free number of layers"):
        Options(model="gpt2")
    with pytest.raises(UsageError, match="1 device is not enough"):
        Options(devices=("cpu:0",))
    with pytest.raises(UsageError, match="'wishes' is not a strategy"):
        Options(fits=("wishes",))
    with pytest.raises(UsageError, match="wishes"):
        Options(checkpointing=("wishes",))


def test_parts_follow_from_the_options() -> None:
    names = [part.name for part in build_study(Options(rounds=1, fits=("tensor+recompute",))).parts]
    assert names.count("run-tensor+recompute-1") == 1
    assert names[-1] == "fit-tensor+recompute"
    quick = Options(rounds=1, quick=True, strategies=("data",), checkpointing=("serial", "tensor"))
    few = [part.name for part in build_study(quick).parts]
    assert [name for name in few if name.startswith(("run", "fit"))] == [
        "run-serial-1",
        "run-serial+recompute-1",
        "run-data-1",
        "fit-forecast",
        "fit-data",
    ]


@pytest.mark.parametrize(
    ("forecast", "true", "least", "tried"),
    [
        (7, 7, 1, [7, 8]),
        (7, 6, 1, [7, 6]),
        (7, 8, 1, [7, 8, 10, 9]),
        (7, 16, 1, [7, 8, 10, 14, 22, 18, 16, 17]),
        (3, 1, 2, [3, 2]),
        (2, 0, 2, [2]),
    ],
)
def test_sizes_are_tried_until_one_runs_and_the_next_does_not(
    forecast: int, true: int, least: int, tried: list[int]
) -> None:
    ran: dict[int, bool] = {}
    size: int | None = forecast
    while size is not None:
        ran[size] = size <= true
        size = next_size(ran, least)
    assert list(ran) == tried
    assert max((one for one, fits in ran.items() if fits), default=0) == (true if true >= least else 0)


def test_a_size_that_ran_only_by_chance_is_not_tried_again() -> None:
    assert next_size({7: False, 8: True}, 1) is None


def test_sizes_suit_cores_and_are_larger_on_gpus() -> None:
    cores = choose_study("memory", {"devices": ("cpu:0", "cpu:1")}, quick=False)
    gpus = choose_study("memory", {"devices": ("cuda:0", "cuda:1"), "batch": 4}, quick=False)
    assert (cores.options["model"], cores.options["memory_bytes"]) == ("gpt-layers:6", 256 << 20)
    assert (gpus.options["model"], gpus.options["batch"]) == ("gpt-layers:12", 4)
    assert choose_study("memory", {"devices": ("cuda:0", "cuda:1")}, quick=True).options["model"] == "gpt-layers:3"


def test_what_it_takes_is_known_before_it_begins() -> None:
    def minutes(**given: object) -> float:
        return sum(part.expected_s for part in choose_study("memory", given, quick=False).parts) / 60

    assert 5 < minutes() < 20  # 8.5 minutes, as measured
    assert minutes(model="gpt-layers:12", batch=16) > 2 * minutes()
    assert minutes(rounds=1) < 0.7 * minutes()


def test_the_summary_has_the_numbers() -> None:
    summary = concluded(memory_parts()).summary
    assert summary is not None
    assert summary.measured == (
        "gpt-layers:4 on two devices, over one: data 1.70 ×, tensor 1.40 × and pipeline 0.80 ×. Tensor with "
        "checkpointing needs the least memory: 165 MiB on its largest worker, 41 % of one device. Activation "
        "checkpointing saves 25 % of the memory and takes 25 % more time."
    )
    assert "The two workers of data and tensor execute the same operators, those of pipeline execute" in summary.why
    assert "tensor communicates within operators (0 collectives) and pipeline between operators" in summary.why
    busy = concluded(memory_parts() | {"calibration": {"noise": 0.9}}).summary
    assert busy is not None
    assert busy.measured.endswith("saves 25 % of the memory and its cost in time is inconclusive.")
    assert "with free communication the same steps would reach data 2.00 ×" in summary.ideal
    assert "data collectives (20 % of a step)" in summary.why
    assert summary.advice.startswith("Where the model fits, use data.")
    level = concluded(memory_parts({**SPEEDS, "data": 14.1, "tensor": 14.0, "pipeline": 13.9})).summary
    assert level is not None
    assert "use data, tensor or pipeline, which differ by less than noise." in level.advice


def test_a_busy_machine_gives_no_order_from_one_round() -> None:
    parts = memory_parts({**SPEEDS, "data": 17.0, "tensor": 7.2, "pipeline": 9.2})
    calm = concluded(parts)
    assert "Data is the fastest, tensor the slowest." in answer_to(calm, "highest")
    assert "Tensor is slower than one device (0.72 ×)" in answer_to(calm, "is slower")
    parts["calibration"] = {"measured_at": "2026-11-17T16:39", "noise": 0.42}
    busy = concluded(parts)
    assert "Data is the fastest, pipeline or tensor the slowest." in answer_to(busy, "highest")
    assert "inconclusive for pipeline (0.92 ×) and tensor (0.72 ×)" in answer_to(busy, "is slower")


def test_a_busy_machine_advises_nothing_about_speed() -> None:
    parts = memory_parts({**SPEEDS, "data": 8.8, "tensor": 5.1, "pipeline": 5.0})
    quiet = concluded(parts).summary
    assert quiet is not None
    assert quiet.advice.startswith("Where the model fits, use one device: no strategy is measurably faster.")
    busy = concluded(parts | {"other-load": {"share": 0.8}})
    assert busy.summary is not None
    assert busy.summary.advice.startswith("Whether any strategy is faster than one device is uncertain")
    assert "inconclusive for data (0.88 ×)" in answer_to(busy, "slower than one device")
    text = answer_to(busy, "cost and save")
    assert (
        "Data: activation checkpointing costs an uncertain amount of time (measured 25 % more, but other programs "
        "took 80 % of the cores' time)" in text
    )
    assert "and saves 25 % of the memory" in text
