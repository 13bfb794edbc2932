"""What the study of stages makes of numbers, and the study itself, run for real in small."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.studies.fake_parts import STAGES_OPTIONS, stages_parts

from stagewright.errors import UsageError
from stagewright.studies import Findings, Results
from stagewright.studies.framework.phrases import times
from stagewright.studies.stages.findings import conclude
from stagewright.studies.stages.measured import PUBLISHED, measured_runs
from stagewright.studies.stages.study import Options, study


def concluded(parts: dict[str, object], **options: object) -> Findings:
    return conclude({**STAGES_OPTIONS, **options}, Results(parts))


def said(findings: Findings, question: str) -> str:
    return " ".join(next(one for one in findings.answers if question in one.question).sentences)


def test_speedups_are_ratios_within_a_round() -> None:
    parameters, blocks = measured_runs(stages_parts(), STAGES_OPTIONS, "inference")
    assert blocks.speedups == (32 / 20, 33 / 21)
    assert blocks.speedup == pytest.approx((32 / 20 + 33 / 21) / 2)
    assert parameters.policies == "parameters, macs"
    assert blocks.run == "runs/b2"
    assert blocks.is_apart_from(parameters)


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
    blocks = dict(zip(table.columns, table.rows[2], strict=True))
    assert (blocks["speed-up"], blocks["range"], blocks["how"]) == ("1.59", "1.57 … 1.60", "measured")
    assert (blocks["forecast"], blocks["published"]) == (f"{36 / 20.5:.2f}", "1.94")
    assert dict(zip(table.columns, table.rows[5], strict=True))["how"] == "forecast"


def test_the_best_policy_is_the_one_that_was_fastest() -> None:
    text = said(concluded(stages_parts()), "Which policy")
    assert "blocks 1.59 × and parameters, macs 1.24 ×: blocks is best" in text
    assert "100 ms with blocks (balance 0.98) and 120 ms with parameters, macs (balance 0.80), 20 % more" in text
    assert "Here it is so too (1.59 × against 1.24 ×)" in text
    assert "Inference, 4 stages, by forecast: blocks 3.02 ×, macs 2.98 × and parameters 2.93 ×." in text
    other = said(concluded(stages_parts(blocks=(22.0, 22.0), macs=(32.0, 33.0))), "Which policy")
    assert "parameters, macs is best" in other
    assert "Here it is the other way (1.07 × against 1.59 ×)" in other
    assert "Its stages alone would make blocks the faster one" in other


def test_what_noise_could_have_made_is_not_called_best() -> None:
    text = said(concluded(stages_parts(blocks=(32.0, 33.0), macs=(33.0, 32.0))), "Which policy")
    assert "no more apart than runs of the same split are" in text
    assert "not told apart" in text
    assert "is best" not in text


def test_speedup_sentences_say_what_was_measured_and_what_is_forecast() -> None:
    text = said(concluded(stages_parts()), "What speed-up")
    assert "2 stages: 1.59 × (79 % of 2), 32.5 samples/s, cut by blocks, measured, 1.57 … 1.60 over 2 rounds." in text
    assert "Published, with 4 machines and another model: 1.94 ×." in text
    assert times(PUBLISHED[3]) == "3.07 ×", "as pages have it; 3.065 is rounded down"
    assert "4 stages was not run (2 devices); forecast if there were as many devices: 3.02 ×, cut by blocks." in text
    elsewhere = said(concluded(stages_parts(), cluster="other.toml"), "What speed-up")
    assert "forecast on the given cluster: 3.20 ×" in elsewhere


def test_a_run_that_is_not_equal_has_no_speedup() -> None:
    findings = concluded(stages_parts(equal=False))
    row = dict(zip(findings.tables[1].columns, findings.tables[1].rows[2], strict=True))
    assert (row["speed-up"], row["range"]) == ("–", "not equal to serial")
    assert "cut by parameters, macs" in said(findings, "What speed-up")


def test_why_it_is_not_n_names_the_largest_part_first() -> None:
    text = said(concluded(stages_parts()), "not n")
    assert "reaches 1.59 × of 2" in text, "the median, as in the other answers"
    assert "Of a step of 1.25 s in the last round (1.60 ×), 80 % is serial ÷ 2" in text
    assert (
        "the rest is imbalance 12 %, transfer 8.0 % and bubble 4.0 %, less unexplained 4.0 % (faster than forecast)."
        in text
    )
    assert "The largest is imbalance: the slowest stage" in text


def test_pieces_that_run_better_are_not_called_faster_than_forecast() -> None:
    parts = stages_parts()
    parts["why-inference"]["parts"] += [{"name": "smaller pieces", "seconds": -0.1, "lost_speedup": -0.1}]
    text = said(concluded(parts), "not n")
    assert "smaller pieces 8.0 % (micro-batches took less than their share of the whole batch on one device)" in text
    assert text.count("faster than forecast") == 1, "what is unexplained"


def test_the_trace_is_beside_serials() -> None:
    text = said(concluded(stages_parts()), "trace")
    assert "hands 2.00 MiB to its links" in text
    assert "worker 0 computes 80 %, handles messages 15 % and is the engine's own 5.0 %" in text
    assert "Serial: computes 99 % and is the engine's own 1.0 %" in text


def test_the_change_that_gains_most_is_offered() -> None:
    assert "16 micro-batches instead of 8 is forecast to give 4.0 % more" in said(concluded(stages_parts()), "improved")
    parts = stages_parts()
    parts["why-inference"]["change"] = None
    assert "none of the changes" in said(concluded(parts), "improved")


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
    names = [
        part.name for part in study(Options(stages=(2, 3), policies=("blocks",), modes=("training",), rounds=2)).parts
    ]
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
    more = study(Options(stages=(2, 3), policies=("blocks",), modes=("training",), rounds=1, oversubscribe=True)).parts
    assert "run-training-3-blocks-1" in [part.name for part in more]


def test_options_that_can_not_be_are_refused() -> None:
    with pytest.raises(UsageError, match="4 micro-batches can't fill 6 stages"):
        Options(microbatches=4)
    with pytest.raises(UsageError, match="modes are inference and training"):
        Options(modes=("dreaming",))
    with pytest.raises(UsageError, match="from 2 up"):
        Options(stages=(1, 2))
