"""What the study of codecs makes of numbers, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.studies.conftest import answer_to, table_rows
from tests.studies.fake_training_parts import ACCURACIES, CODECS_OPTIONS, codecs_parts

from stagewright.errors import UsageError
from stagewright.studies import Findings, Results
from stagewright.studies.codecs.measured import measured_codecs, part_name
from stagewright.studies.codecs.options import Options
from stagewright.studies.codecs.study import build_study, conclude
from stagewright.studies.codecs.tables import rates_by_size
from stagewright.studies.codecs.transfer_job import _LinkEnd


def concluded(parts: dict[str, Any], **options: Any) -> Findings:
    return conclude({**CODECS_OPTIONS, **options}, Results(parts))


def test_bytes_are_those_of_both_ways() -> None:
    found = {one.codec: one for one in measured_codecs(codecs_parts(), CODECS_OPTIONS, "cifar10")}
    both = found["hadamard4/block8"]
    assert both.ratio == pytest.approx((0.14 + 0.27) / 2, abs=1e-4)
    assert both.raw_bytes == 4 * 4 * 2**20
    assert both.values == (95.6, 95.8)
    assert both.shown == "95.7 ± 0.14"
    assert both.codec_s == pytest.approx(4 * 2 * (0.004 + 0.002))
    assert (found["none"].ratio, found["none"].break_even_rate) == (1.0, 0)
    assert found["sort3+1"].break_even_rate == pytest.approx(16 * 2**20 * 0.875 / 8, rel=1e-4)


def test_the_table_has_the_published_columns() -> None:
    table = concluded(codecs_parts()).tables[0]
    row = table_rows(table)[4]
    assert row["data set"] == "CIFAR-10"
    assert row["batch (micro-batches)"] == "64 (4)"
    assert row["crossing tensors"] == "[64,16,16,16], [64,1280,1,1]"
    assert (row["codec"], row["compression ratio"]) == ("sort3+1 (4 bits)", "0.125")
    assert (row["accuracy %"], row["published accuracy"]) == ("32.0 ± 2.83", "87.1")
    assert row["transfer rate"] == f"{8 * 2**20 / 0.501 / 1e6:.0f} Mb/s"
    assert row["wire rate"] == f"{2**20 / 0.501 / 1e6:.0f} Mb/s"
    plain = table_rows(table)[0]
    assert plain["transfer rate"] == plain["wire rate"] == "8.39 Gb/s"
    assert "between cpu:0 and cpu:1" in table.notes[0]


def exact(judged: int = 10_000_000) -> dict[str, Any]:
    """Evaluated on so many samples that only seeds count."""
    return {"data-cifar10": {"kept": True, "train": 320, "judged": judged, "of": [50000, judged]}}


def test_what_each_codec_costs_is_told_beside_its_interval() -> None:
    text = answer_to(concluded(codecs_parts()), "cost in accuracy")
    assert "without a codec 95.9 ± 3.2 (95 % interval on 300 samples; guessing reaches 10)." in text
    assert "Below it by more than the interval: sort3+1 −63.9 ± 8.3." in text
    assert (
        "contains both no loss and one of more than 0.5 points: bf16 +0.0 ± 3.2, hadamard4/block8 −0.2 ± 3.2 and "
        "sort6+2 −0.7 ± 3.3"
    ) in text
    assert "parity check against one device with the same codec: hadamard4/block8." in text
    close = {**ACCURACIES, "sort3+1": (32.0, 32.1), "sort6+2": (95.2, 95.2)}
    text = answer_to(concluded(codecs_parts(close) | exact()), "cost in accuracy")
    assert "At most 0.5 points below it, interval of the difference included: bf16 +0.0 ± 0.4" in text
    assert "Below it by more than the interval: hadamard4/block8 −0.2 ± 0.0, sort6+2 −0.7 ± 0.4 and" in text


def test_chance_is_not_an_accuracy() -> None:
    """11 % of ten classes, as a short training on CIFAR-10 reached: no verdict on any codec."""
    guesses = dict.fromkeys(ACCURACIES, (10.5, 11.0)) | {"sort3+1": (14.0, 14.0)}
    findings = concluded(codecs_parts(guesses))
    for question in ("cost in accuracy", "How few bytes", "collapse"):
        text = answer_to(findings, question)
        assert "guessing reaches 10: too little was learned to judge codecs" in text
        for word in ("goal", "Within", "Below", "collapses"):
            assert word not in text
    row = table_rows(findings.tables[0])[4]
    assert (row["accuracy %"], row["95 %"], row["guessing"]) == ("14.0 ± 0.00", "± 4.0", "10")


def test_a_pipeline_that_is_not_equal_is_told() -> None:
    parts = codecs_parts() | {part_name("cifar10", "sort3+1", None): {"equal": False}}
    assert "Parity check failed, so these results are not reliable: sort3+1." in answer_to(concluded(parts), "accuracy")


def test_fewest_bytes_and_the_goal() -> None:
    close = {**ACCURACIES, "sort3+1": (32.0, 32.1), "sort6+2": (95.2, 95.4), "hadamard4/block8": (95.8, 96.0)}
    text = answer_to(concluded(codecs_parts(close) | exact()), "How few bytes")
    assert (
        "hadamard4/block8 stays within 0.5 points of the accuracy without a codec, interval included, with 21 %" in text
    )
    assert "the goal of 0.15 is missed" in text
    good = {**close, "sort3+1": (95.9, 95.9)}
    text = answer_to(concluded(codecs_parts(good) | exact()), "How few bytes")
    assert "sort3+1 stays within 0.5 points" in text
    assert "the goal of 0.15 is met" in text
    bad = {name: values if name == "none" else (60.0, 60.1) for name, values in ACCURACIES.items()}
    assert "none of these codecs stays within" in answer_to(concluded(codecs_parts(bad) | exact()), "How few bytes")


def test_a_goal_that_an_unclear_codec_may_meet_is_not_missed() -> None:
    noisy = {**ACCURACIES, "sort3+1": (91.0, 99.0), "bf16": (95.8, 96.0)}
    text = answer_to(concluded(codecs_parts(noisy) | exact()), "How few bytes")
    assert "bf16 stays within 0.5 points" in text
    assert "inconclusive for sort3+1 (12 % of the bytes)" in text
    assert "whether the goal of 0.15 is met is inconclusive" in text
    assert "missed" not in text


def test_a_busy_machine_gives_no_verdict_on_its_link() -> None:
    parts = codecs_parts()
    parts["transfer-cifar10"]["codecs"]["bf16"]["seconds"] = 0.0002
    quiet, busy = concluded(parts), concluded(parts | {"other-load": {"share": 0.5}})
    assert quiet.summary is not None
    assert busy.summary is not None
    assert "bf16 saves time." in answer_to(quiet, "On which links")
    assert "use bf16: a tensor arrives sooner" in quiet.summary.advice
    reason = "since other programs took 50 % of the cores' time"
    assert f"inconclusive, {reason}." in answer_to(busy, "On which links")
    assert f"it is inconclusive whether a codec saves time, {reason}" in busy.summary.advice


def test_the_summary_answers_what_crosses_and_how_the_rate_grows() -> None:
    summary = concluded(codecs_parts()).summary
    assert summary is not None
    assert "sends [64,16,16,16] and [64,1280,1,1], and their gradients back." in summary.measured
    assert "Sort quantization with 8 and 4 bits sends 25 % and 12 %." in summary.measured
    assert "With 8 bits and fewer sort3+1 collapses." in summary.measured
    ours = concluded(
        codecs_parts(dict.fromkeys(("none", "bf16", "sort6+2", "sort3+1", "hadamard4/block8"), (90.0, 90.2)))
    )
    assert ours.summary is not None
    assert "With 8 bits and fewer no codec collapses." in ours.summary.measured
    assert "latency counts less: 4.00 KiB at 328 Mb/s, 16.0 MiB at 10.49 Gb/s, 32.00 ×" in summary.why


def test_an_interval_wider_than_the_limit_gives_no_verdict() -> None:
    noisy = {**ACCURACIES, "none": (90.0, 96.0)}
    text = answer_to(concluded(codecs_parts(noisy) | exact()), "How few")
    assert "inconclusive for hadamard4/block8 (21 % of the bytes), sort6+2 (25 % of the bytes)" in text
    assert "goal" not in text


def test_the_same_words_for_every_codec() -> None:
    text = answer_to(concluded(codecs_parts()), "collapse")
    assert "Collapse: sort3+1 (4 bits) keeps 26 %." in text
    assert "No collapse: hadamard4/block8 keeps 100 % and sort6+2 (8 bits) keeps 99 %." in text
    ours = {**ACCURACIES, "hadamard4/block8": (14.0, 14.0)}
    text = answer_to(concluded(codecs_parts(ours)), "collapse")
    assert "Collapse: hadamard4/block8 keeps 4.7 % and sort3+1 (4 bits) keeps 26 %." in text


def test_transfer_rates_and_where_codecs_pay() -> None:
    text = answer_to(concluded(codecs_parts()), "transfer rate")
    assert "4.00 KiB at 328 Mb/s, 16.0 MiB at 10.49 Gb/s, 32.00 × as fast." in text
    assert "none 8.39 Gb/s" in text
    pays = answer_to(concluded(codecs_parts()), "On which links")
    assert "bf16 " in pays
    assert "On this machine's link, measured end to end (8.39 Gb/s without a codec, latency included): no codec" in pays
    parts = codecs_parts()
    parts["transfer-cifar10"]["codecs"]["bf16"]["seconds"] = 0.00095
    assert "no codec saves time beyond the variation" in answer_to(concluded(parts), "On which links"), "5 % is noise"
    parts["transfer-cifar10"]["codecs"]["bf16"]["seconds"] = 0.0006
    assert "bf16 saves time." in answer_to(concluded(parts), "On which links")
    summary = concluded(parts).summary
    assert summary is not None
    assert "Between these workers use bf16: a tensor arrives sooner." in summary.advice


def test_one_device_is_shared_and_no_column_is_empty() -> None:
    options = Options(devices=("cpu:0",), how="one-process")
    assert options.ends == ("cpu:0", "cpu:0")
    names = [part.name for part in build_study(options).parts]
    assert "transfer-digits" in names
    assert not [name for name in names if name.startswith("prove")]
    table = concluded(codecs_parts(), devices=["cpu:0"]).tables[0]
    assert "–" not in {row["transfer rate"] for row in table_rows(table)}
    assert "between two workers that share cpu:0" in table.notes[0]


def test_without_epochs_rates_alone() -> None:
    names = [part.name for part in build_study(Options(epochs=0)).parts]
    assert names == ["data-digits", "crossing-digits", "transfer-digits"]
    parts = {name: data for name, data in codecs_parts().items() if not name.startswith(("train", "prove"))}
    findings = concluded(parts, epochs=0)
    assert answer_to(findings, "cost in accuracy") == "Nothing was trained, since epochs is 0."
    assert "hadamard4/block8 1.68 Gb/s" in answer_to(findings, "transfer rate")
    assert findings.tables[0].notes[0].startswith("Nothing was trained. Compression ratio and bytes")


def test_a_transfer_is_timed_from_a_waiting_receiver_to_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("torch.distributed.send", lambda values, to: said.append(f"{values.nbytes} B to {to}"))
    monkeypatch.setattr("torch.distributed.recv", lambda values, of: said.append(f"{values.nbytes} B from {of}"))
    monkeypatch.setattr("time.perf_counter", lambda: said.append("clock") or 0.0)
    place: Any = SimpleNamespace(rank=0, torch_device=torch.device("cpu"))
    ends = _LinkEnd(place, [64, 4])
    ends.plain(4096)
    ends.tensor("none")
    ends.tensor("bf16")
    whole = ["8 B from 1", "clock", "{} B to 1", "8 B from 1", "clock"]
    sizes = [4096, 64 * 4 * 4, ends.num_bytes("bf16")]
    assert said == [word.format(size) for size in sizes for word in whole]


def test_figures(tmp_path: Path) -> None:
    figure = concluded(codecs_parts()).figures[0]
    figure.draw(tmp_path / f"{figure.name}.svg")
    assert "<svg" in (tmp_path / f"{figure.name}.svg").read_text()


@pytest.mark.parametrize("missing", sorted(codecs_parts()))
def test_no_missing_part_raises(missing: str) -> None:
    parts = codecs_parts()
    del parts[missing]
    findings = concluded(parts)
    assert all(answer.sentences for answer in findings.answers)
    assert all(answer.sentences for answer in conclude(CODECS_OPTIONS, Results({})).answers)


def test_the_study_trains_every_codec_with_every_seed() -> None:
    made = build_study(Options(codecs=("none", "delta(block4)", "block4/block8"), seeds=(0, 7)))
    names = [part.name for part in made.parts if part.name.startswith("train")]
    assert names == [part_name("digits", codec, seed) for seed in (0, 7) for codec in made.options["codecs"]]
    assert "train-digits-delta-block4-7" in names
    plan = Options().plan("digits", "block4/block8", 3, ("a", "b"))
    assert (plan.codec, plan.codec_backward, plan.seed, plan.model.seed) == ("block4", "block8", 3, 3)
    assert plan.stage_workers == (0, 1, 0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"codecs": ("bf16",)}, "add none to --codecs"),
        ({"codecs": ("none", "blokc4")}, "unknown codec 'blokc4'"),
        ({"codecs": ("none", "none")}, "listed twice"),
        ({"codecs": ("none", "auto")}, "FORWARD or FORWARD/BACKWARD"),
        ({"tasks": ("cifar10",)}, "needs its data: give --data-dir DIR"),
        ({"tasks": ("cifra",)}, "cifar10"),
        ({"seeds": ()}, "at least one"),
        ({"how": "alone"}, "use pipeline or one-process"),
        ({"devices": ("cpu:0",)}, "can't be client and server"),
    ],
)
def test_what_can_not_be_studied_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("(", r"\(")) as raised:
        Options(**wrong)
    assert "\n" not in str(raised.value)


def test_the_summary_has_the_numbers() -> None:
    found = concluded(codecs_parts())
    assert found.summary is not None
    assert "sends 25 % and 12 %. CIFAR-10, " in found.summary.measured
    assert "saves time on links below" in found.summary.why
    nothing = conclude(CODECS_OPTIONS, Results({})).summary
    assert nothing is not None
    assert nothing.measured == "No codec was measured."


def test_the_rate_grows_up_to_a_size() -> None:
    rates = {4096: 77e6, 4 << 20: 3954e6, 16 << 20: 3047e6}
    assert rates_by_size(rates) == (
        "The rate grows with the size, since latency counts less: 4.00 KiB at 616 Mb/s, 4.00 MiB at 31.63 Gb/s, "
        "51.35 × as fast; larger tensors are slower, 16.0 MiB at 24.38 Gb/s."
    )
    assert rates_by_size({4096: 77e6, 16 << 20: 70e6}).startswith("The rate does not grow with the size")
