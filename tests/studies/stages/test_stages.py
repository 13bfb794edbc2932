"""What the study of stages makes of numbers, and the study itself, run for real in small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.studies.conftest import answer_to, table_rows
from tests.studies.fake_parts import STAGES_OPTIONS, stages_parts

from stagewright.errors import UsageError
from stagewright.studies import Findings, Results
from stagewright.studies.framework.forecasts import check_forecasts
from stagewright.studies.framework.phrases import times
from stagewright.studies.framework.rounds import read_rounds
from stagewright.studies.stages.measured import PUBLISHED, measured_runs
from stagewright.studies.stages.options import Options
from stagewright.studies.stages.study import build_study, conclude


def concluded(parts: dict[str, object], **options: object) -> Findings:
    return conclude({**STAGES_OPTIONS, **options}, Results(parts))


def test_speedups_are_ratios_within_a_round() -> None:
    parameters, blocks = measured_runs(stages_parts(), STAGES_OPTIONS, "inference")
    assert blocks.speedups == (32 / 20, 33 / 21)
    assert blocks.speedup == pytest.approx((32 / 20 + 33 / 21) / 2)
    assert parameters.policies == "parameters, macs"
    assert blocks.run == "runs/b2"
    assert blocks.differs_from(parameters)


def test_table_has_measured_forecast_and_published() -> None:
    table = concluded(stages_parts()).tables[1]
    assert [row[:3] for row in table.rows] == [
        ("inference", "1", "serial"),
        ("inference", "2", "parameters, macs"),
        ("inference", "2", "blocks"),
        ("inference", "4", "parameters"),
        ("inference", "4", "macs"),
        ("inference", "4", "blocks"),
    ]
    rows = table_rows(table)
    blocks = rows[2]
    assert (blocks["speed-up"], blocks["range"], blocks["source"]) == ("1.59", "1.57 … 1.60", "measured")
    assert (blocks["forecast"], blocks["published"]) == (f"{34 / 20.5:.2f}", "1.94")
    assert rows[5]["source"] == "forecast"


def test_cuts_are_one_sentence_for_all_numbers_of_stages_with_the_same_groups() -> None:
    parts = stages_parts()
    assert (
        "Inference, 2 stages: parameters and macs cut after layers.6, balance 0.80; blocks cuts after layers.5, "
        "balance 0.98. Inference, 4 stages" in answer_to(concluded(parts), "Where does each policy")
    )
    splits = parts["profile-inference"]["splits"]
    splits["4"]["macs"] = {**splits["4"]["macs"], "cut_names": splits["4"]["parameters"]["cut_names"]}
    assert answer_to(concluded(parts), "Where does each policy") == (
        "Inference, 2 and 4 stages: parameters and macs cut alike, balance 0.80 and 0.90; blocks, balance 0.98 and "
        "0.90."
    )


def test_equal_sizes_are_judged_by_their_balance() -> None:
    parts = stages_parts()
    for splits in parts["profile-inference"]["splits"].values():
        splits["time"] = {**splits["blocks"], "policy": "time"}
    policies = ["parameters", "macs", "blocks", "time"]
    findings = concluded(parts, policies=policies)
    judged = "Equal numbers of parameters are not always a good policy: the balance falls to 0.80, where cuts by time"
    assert f"{judged} reach 0.98." in answer_to(findings, "Where does each policy")
    assert findings.summary is not None
    assert judged in findings.summary.advice
    parts["profile-inference"]["splits"]["2"]["parameters"]["balance"] = 0.95
    good = concluded(parts, policies=policies).summary
    assert good is not None
    assert "Equal numbers of parameters are a good policy here" in good.advice


def test_the_best_policy_is_the_one_that_was_fastest() -> None:
    text = answer_to(concluded(stages_parts()), "Which policy")
    assert "blocks 1.59 × and parameters, macs 1.24 ×. The best policy is blocks." in text
    assert (
        "100 ms per micro-batch with blocks (balance 0.98) and 120 ms with parameters, macs (balance 0.80), 20 %"
        in text
    )
    assert "Here this holds too (1.59 × and 1.24 ×)" in text
    assert "Inference, 4 stages, forecast: blocks 3.02 ×, macs 2.98 × and parameters 2.93 ×." in text
    other = answer_to(concluded(stages_parts(blocks=(22.0, 22.0), macs=(32.0, 33.0))), "Which policy")
    assert "The best policy is parameters, macs." in other
    assert "Here it is the other way round (1.07 × and 1.59 ×)" in other
    assert "By its bottleneck stage blocks should be faster" in other


def test_what_noise_could_have_made_is_not_called_best() -> None:
    text = answer_to(concluded(stages_parts(blocks=(32.0, 33.0), macs=(33.0, 32.0))), "Which policy")
    assert text.count("within the variation between runs") == 2
    assert "best policy" not in text
    assert "by the profile, it takes 120 ms" in text
    assert "Measured steps" not in text


def test_speedup_sentences_say_what_was_measured_and_what_is_forecast() -> None:
    text = answer_to(concluded(stages_parts()), "What speed-up")
    assert (
        "2 stages: measured 1.59 × (1.57 … 1.60 over 2 rounds), which is 79 % of the ideal 2 ×, at 32.5 samples/s"
        in text
    )
    assert "Published for another model on 4 machines: 1.94 ×." in text
    assert times(PUBLISHED[3]) == "3.07 ×", "as pages have it; 3.065 is rounded down"
    assert "Forecast with a device like these for each stage: 3.02 ×, cut by blocks." in text
    assert text.index("on the 2 measured cases the forecast speed-up was off by +4 % to +5 %.") < text.index("4 stages")
    elsewhere = answer_to(concluded(stages_parts(), cluster="other.toml"), "What speed-up")
    assert "Unverified forecast on the given cluster: 3.20 ×" in elsewhere


def test_forecasts_that_were_wrong_on_measured_cases_are_corrected_or_withheld() -> None:
    alike = concluded(stages_parts(blocks=(24.0, 25.0), macs=(19.0, 20.0)))
    text = answer_to(alike, "What speed-up")
    assert "off by +36 % to +39 %: the forecasts of the others are corrected by the measured ratio, 0.73." in text
    assert "Corrected forecast with a device like these for each stage: 2.20 ×, cut by blocks." in text
    assert [row["source"] for row in table_rows(alike.tables[1])[3:]] == ["forecast, corrected"] * 3
    apart = concluded(stages_parts(blocks=(24.0, 25.0), macs=(26.0, 27.0)))
    text = answer_to(apart, "What speed-up")
    assert "more than 10 % and in different ways: the forecasts of the others are withheld." in text
    assert "(--oversubscribe runs it); the forecast is withheld." in text
    withheld = [(row["speed-up"], row["forecast"]) for row in table_rows(apart.tables[1])[3:]]
    assert withheld == [("–", "–")] * 3
    assert "4 stages" not in answer_to(apart, "Which policy")


def test_a_busy_calibration_says_so() -> None:
    parts = stages_parts() | {"calibration": {"measured_at": "2026-11-01T10:00:00+00:00", "noise": 0.31}}
    note = concluded(parts).tables[1].notes[0]
    assert "a calibration of this machine of 2026-11-01 10:00, whose rounds varied by 31 %, so they are rough (" in note


def test_a_run_that_is_not_equal_has_no_speedup() -> None:
    findings = concluded(stages_parts(equal=False))
    row = table_rows(findings.tables[1])[2]
    assert (row["speed-up"], row["range"]) == ("–", "parity check failed")
    assert "cut by parameters, macs" in answer_to(findings, "What speed-up")


def test_why_it_is_not_n_names_the_largest_part_first() -> None:
    text = answer_to(concluded(stages_parts()), "below")
    assert "reaches 1.59 × on 2 devices" in text, "the median, as in the other answers"
    assert "Of a step of the last round (1.60 ×) of 1.25 s, 80 % is the ideal time" in text
    assert "imbalance 12 %, transfer 8.0 % and bubble 4.0 %, minus unexplained 4.0 % (faster than forecast)." in text
    assert "The largest loss is imbalance: the bottleneck stage" in text


def test_pieces_that_run_better_are_not_called_faster_than_forecast() -> None:
    parts = stages_parts()
    parts["why-inference"]["parts"] += [{"name": "micro-batching overhead", "seconds": -0.1, "lost_speedup": -0.1}]
    text = answer_to(concluded(parts), "below")
    assert "micro-batching overhead 8.0 % (micro-batches ran faster than their share" in text
    assert text.count("faster than forecast") == 1, "what is unexplained"


def test_the_trace_is_beside_serials() -> None:
    text = answer_to(concluded(stages_parts()), "trace")
    assert "sends 2.00 MiB per step" in text
    assert "worker 0: compute 80 %, sends and receives 15 %, engine overhead 5.0 %" in text
    assert "baseline: compute 99 %, engine overhead 1.0 %" in text


def test_the_change_that_gains_most_is_offered() -> None:
    parts = stages_parts()
    small = concluded(parts)
    assert (
        "inconclusive: the best change (16 micro-batches instead of 8) is forecast to gain 4.0 %, but forecasts were "
        "off by up to 4.6 % here" in answer_to(small, "improved")
    )
    assert small.summary is not None
    assert "What else would make it faster is inconclusive." in small.summary.advice
    parts["why-inference"]["change"]["gain"] = 0.08
    text = answer_to(concluded(parts), "improved")
    assert "16 micro-batches instead of 8 is forecast to gain 8.0 %" in text
    busy = answer_to(concluded(parts | {"calibration": {"noise": 0.4}}, rounds=1), "improved")
    assert "16 micro-batches" in busy, "its forecasts were right"
    wrong = stages_parts(blocks=(24.0, 25.0), macs=(26.0, 27.0))
    assert "inconclusive: forecasts are withheld, so none" in answer_to(concluded(wrong), "improved")
    parts["why-inference"]["change"] = None
    assert "none gains 1 %" in answer_to(concluded(parts), "improved")


@pytest.mark.parametrize("missing", [*stages_parts(), "everything"])
def test_no_missing_part_stops_the_rest(missing: str) -> None:
    parts = {} if missing == "everything" else {name: data for name, data in stages_parts().items() if name != missing}
    findings = concluded(parts)
    assert len(findings.answers) == 6
    assert all(answer.sentences for answer in findings.answers)


def test_figures_are_drawn(tmp_path: Path) -> None:
    for figure in concluded(stages_parts()).figures:
        figure.draw(tmp_path / f"{figure.name}.svg")
    assert {path.name for path in tmp_path.iterdir()} == {"speedups.svg", "why-inference.svg"}
    assert "published" in (tmp_path / "speedups.svg").read_text()


def test_parts_follow_from_the_options() -> None:
    options = Options(stages=(2, 3), policies=("blocks",), modes=("training",), rounds=2)
    names = [part.name for part in build_study(options).parts]
    assert names == [
        "calibration",
        "profile-training",
        "forecast-training",
        "run-training-serial-1",
        "run-training-2-blocks-1",
        "run-training-serial-2",
        "run-training-2-blocks-2",
        "why-training",
    ]
    more = build_study(replace(options, oversubscribe=True)).parts
    assert "run-training-3-blocks-1" in [part.name for part in more]


def test_units_are_those_that_were_asked_for() -> None:
    assert Options().plan("training", 2).units == "auto"
    assert Options(units="leaf").plan("training", 2).units == "leaf"


def test_options_that_can_not_be_are_refused() -> None:
    with pytest.raises(UsageError, match="4 micro-batches can't fill 6 stages"):
        Options(microbatches=4)
    with pytest.raises(UsageError, match="modes are inference and training"):
        Options(modes=("dreaming",))
    with pytest.raises(UsageError, match="from 2 up"):
        Options(stages=(1, 2))


def test_what_devices_can_not_reach_is_left_out() -> None:
    """2.28 × on two cores: the baseline was disturbed."""
    findings = concluded(stages_parts(blocks=(45.6, 33.0)))
    row = table_rows(findings.tables[1])[2]
    assert (row["speed-up"], row["range"]) == ("1.57", "(left out: 2.28, more than devices)")
    both = concluded(stages_parts(blocks=(45.6, 48.0), macs=(46.0, 48.0)))
    assert "2 stages: inconclusive: measured 2.30 ×" in answer_to(both, "What speed-up")
    assert table_rows(both.tables[1])[2]["speed-up"] == "–"


def test_a_baseline_that_was_repeated_widens_the_margin_and_is_named() -> None:
    parts = stages_parts(blocks=(32.0, 33.0), macs=(26.0, 27.0))
    assert "The best policy is blocks" in answer_to(concluded(parts, rounds=1), "Which policy")
    parts["run-inference-2-blocks-1"]["baseline_samples_per_s"] = 28.0  # where the round's was 20
    findings = concluded(parts, rounds=1)
    assert "within the variation between runs" in answer_to(findings, "Which policy")
    note = findings.tables[1].notes[0]
    assert "blocks, 2 stages: over 28.0 samples/s of one device, measured again with it." in note


def test_columns_and_losses_that_say_nothing_are_left_out() -> None:
    parts = stages_parts()
    parts["why-inference"]["parts"] += [{"name": "collectives", "seconds": 0.0, "lost_speedup": 0.0}]
    findings = concluded(parts, rounds=1, modes=["inference"])
    assert "range" not in [column.name for column in findings.tables[1].columns]
    assert "range" in [column.name for column in concluded(parts).tables[1].columns]
    losses = next(table for table in findings.tables if table.title.startswith("Why "))
    assert [row[0] for row in losses.rows] == ["baseline ÷ n", "imbalance", "bubble", "transfer", "unexplained", "step"]


def test_a_round_far_from_the_others_is_left_out() -> None:
    rates = {1: 6.6, 2: 82.8, 3: 80.0, 4: 81.0}
    rows = {f"run-{number}": {"samples_per_s": rate, "equal": True} for number, rate in rates.items()}
    assert list(read_rounds(rows, "run", 4)) == [2, 3, 4]
    assert list(read_rounds(rows, "run", 2)) == [1, 2], "of two, none can be called wrong"


def test_a_bound_that_a_run_beats_is_not_shown() -> None:
    def bounds(blocks: tuple[float, float]) -> list[str]:
        return [row["upper bound"] for row in table_rows(concluded(stages_parts(blocks=blocks), stages=[2]).tables[0])]

    assert bounds((32.0, 33.0)) == ["1.90", "1.90"]
    assert bounds((40.0, 41.0)) == ["1.90", "beaten"], "1.98 × is more than 1.90 ×"


def test_a_busy_machine_corrects_no_forecast() -> None:
    parts = stages_parts(blocks=(24.0, 25.0), macs=(19.0, 20.0))
    text = answer_to(concluded(parts), "reach over")
    assert "corrected by the measured ratio" in text
    parts["calibration"] = {"measured_at": "2026-11-17T16:51", "noise": 0.35}
    busy = answer_to(concluded(parts), "reach over")
    assert (
        "measured while repeated measurements of this machine varied by 35 %: the forecasts of the others are withheld"
        in busy
    )
    assert "Corrected forecast" not in busy


def test_policies_that_cut_alike_are_not_compared() -> None:
    parts = stages_parts()
    for turn in (1, 2):
        parts[f"run-inference-2-blocks-{turn}"] = {"same_as": "parameters"}
    assert "can tell them apart" in answer_to(concluded(parts), "Which policy")
    assert "can tell them apart" not in answer_to(concluded(stages_parts()), "Which policy")


def test_more_than_n_is_no_share_of_the_ideal() -> None:
    text = answer_to(concluded(stages_parts(blocks=(42.0, 44.0))), "reach over")
    assert "measured 2.10 × (2.10 … 2.10 over 2 rounds), more than the ideal 2 ×: a whole batch" in text
    assert "105 %" not in text


def test_the_summary_has_the_numbers() -> None:
    summary = concluded(stages_parts()).summary
    assert summary is not None
    assert summary.measured == (
        "deit-small: inference with 2 stages 1.59 × (1.57 … 1.60) over one device. Inference, forecast for more "
        "devices: 4 stages 3.02 ×."
    )
    assert summary.ideal == (
        "2 × on 2 devices; with this split's balance and pipeline bubble, links free, at most inference 1.90 ×."
    )
    assert summary.why.startswith("The largest loss in inference: imbalance takes 12 % of a step")
    assert (
        "What only the pipeline's trace shows: in inference up to 15 % of a worker's step for sends and receives and "
        "up to 30 % in the pipeline bubble." in summary.why
    )
    assert summary.advice == (
        "Inference: cut by blocks, faster than parameters, macs. What else would make it faster is inconclusive."
    )
    parts = stages_parts()
    parts["why-inference"]["change"]["gain"] = 0.08
    other = concluded(parts).summary
    assert other is not None
    assert other.advice.endswith("Then 16 micro-batches instead of 8 gains 8.0 % more, by forecast.")
    level = concluded(stages_parts(blocks=(25.0, 26.0))).summary
    assert level is not None
    assert "any of these policies will do" in level.advice
    nothing = conclude(STAGES_OPTIONS, Results({})).summary
    assert nothing is not None
    assert nothing.measured == "No pipeline was measured on 2 devices with a device for each stage."


def test_an_impossible_speedup_is_neither_explained_nor_a_baseline_of_forecasts() -> None:
    findings = concluded(stages_parts(blocks=(70.0, 75.0), macs=(71.0, 76.0)))
    assert not any(table.title.startswith("Why ") for table in findings.tables)
    assert not any(figure.name.startswith("why-") for figure in findings.figures)
    text = answer_to(findings, "below")
    assert text == "Inference: unknown, since no pipeline has a plausible speed-up."
    speedups = answer_to(findings, "reach over")
    assert "forecasts are withheld: they refer to the same baseline, which was disturbed." in speedups
    assert "the forecast is withheld" in speedups
    assert "no pipeline has a plausible speed-up, so no policy" in answer_to(findings, "Which policy")


def test_a_mode_that_can_not_be_told_is_named_in_the_summary() -> None:
    parts = stages_parts()
    training = stages_parts(blocks=(70.0, 75.0), macs=(71.0, 76.0))
    parts |= {name.replace("inference", "training"): data for name, data in training.items() if "inference" in name}
    summary = concluded(parts, modes=["inference", "training"]).summary
    assert summary is not None
    assert "Inconclusive for training, whose runs were disturbed." in summary.measured
    busy = concluded(stages_parts() | {"calibration": {"noise": 0.4}}).summary
    assert busy is not None
    assert busy.why.startswith(
        "Uncertain, since repeated measurements of this machine varied by 40 %. In this run: the largest loss in"
    )


def test_a_forecast_that_is_exact_is_off_by_nothing() -> None:
    check = check_forecasts([(1.0, 0.999)])
    assert check.sentence == "where it was measured, the forecast speed-up was off by 0 %."


def test_a_figure_without_any_point_is_drawn(tmp_path: Path) -> None:
    findings = concluded(stages_parts(blocks=(70.0, 75.0), macs=(71.0, 76.0)))
    (figure,) = findings.figures
    figure.draw(tmp_path / "speedups.svg")
    assert "<svg" in (tmp_path / "speedups.svg").read_text()
