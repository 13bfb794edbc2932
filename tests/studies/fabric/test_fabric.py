"""What the study of the fabric makes of numbers, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.studies.conftest import answer_to
from tests.studies.fake_training_parts import FABRIC_OPTIONS, fabric_parts, sent

from stagewright.errors import UsageError
from stagewright.studies import Findings, Results
from stagewright.studies.fabric.options import Options
from stagewright.studies.fabric.study import build_study, conclude, workload_on
from stagewright.studies.fabric.tables import shown_share


def concluded(parts: dict[str, Any], **options: Any) -> Findings:
    return conclude({**FABRIC_OPTIONS, **options}, Results(parts))


def test_layers_tails_and_what_was_published() -> None:
    findings = concluded(fabric_parts())
    assert "mlp-mnist: gradients of fc4 2600 and fc1 803840 bytes" in answer_to(findings, "What is sent")
    assert "host 2 has a link of 100 Mb/s, loses 1 % (lossy) or 8 % (failing) of its packets" in answer_to(
        findings, "What is sent"
    )
    layers = answer_to(findings, "each layer")
    assert "Clean network: median of 3 trials: fc4 1.00 ms and fc1 10.0 ms; a whole step 11.0 ms." in layers
    assert "Slow link: fc4 has the longest tail: at most 400 ms, which is 40.00 × its median of 10.0 ms" in answer_to(
        findings, "tail"
    )
    published = answer_to(findings, "published")
    assert "Clean network: 17 % of the all-reduces take 20 ms or more; the longest takes 30.0 ms." in published
    assert "Slow link: 67 % of the all-reduces take 20 ms or more; the longest takes 4.00 s." in published


def test_blame_is_right_only_where_it_names_what_was_made() -> None:
    text = answer_to(concluded(fabric_parts()), "causes")
    assert (
        "slow link of host 2: the diagnosis “it is slow-link 2” is correct. Slowest layer fc1: a plateau of fc1."
        in text
    )
    assert "3 of 3 diagnoses are correct." in text
    parts = fabric_parts() | {"sent-mlp-mnist-slow-link": sent("slow-link", times_s=[0.1], kind="slow-link", rank=1)}
    assert "“it is slow-link 1” is wrong." in answer_to(concluded(parts), "causes")
    busy = answer_to(concluded({**parts, "other-load": {"share": 0.5}}), "causes")
    assert "“it is slow-link 1” is wrong (other programs used the cores" in busy
    assert "2 of 3 diagnoses are correct." in answer_to(concluded(parts), "causes")
    assert [row[3] for row in concluded(parts).tables[1].rows] == ["yes", "no", "yes"]


def test_buckets() -> None:
    text = answer_to(concluded(fabric_parts()), "buckets")
    assert text == (
        "deit-small, clean network: 2 buckets of 788 KiB in total take 1.10 s per step over 3 trials, 50 % of the "
        "ideal speed (550 ms)."
    )


def test_without_root_it_is_told() -> None:
    assert "The lab needs root with CAP_NET_ADMIN" in answer_to(
        concluded(fabric_parts(), where="loopback"), "What is sent"
    )


def test_figures(tmp_path: Path) -> None:
    figure = concluded(fabric_parts()).figures[0]
    figure.draw(tmp_path / f"{figure.name}.svg")
    assert "<svg" in (tmp_path / f"{figure.name}.svg").read_text()


@pytest.mark.parametrize("missing", sorted(fabric_parts()))
def test_no_missing_part_raises(missing: str) -> None:
    parts = fabric_parts()
    del parts[missing]
    findings = concluded(parts)
    assert all(answer.sentences for answer in findings.answers)
    assert all(answer.sentences for answer in conclude(FABRIC_OPTIONS, Results({})).answers)


def test_on_the_loopback_links_are_not_made_wrong() -> None:
    names = [part.name for part in build_study(Options(where="loopback")).parts]
    assert names == [
        "floor-mlp-mnist",
        "sent-mlp-mnist-clean",
        "sent-mlp-mnist-late-host",
        "floor-deit-small",
        "sent-deit-small-clean",
    ]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"where": "moon"}, "use lab or loopback"),
        ({"hosts": 1}, "use 2 to 16"),
        ({"wrong_host": 4}, "use 0 to 3"),
        ({"networks": ("clean", "slwo-link")}, "slow-link"),
        ({"where": "loopback", "networks": ("slow-link",), "bucket_networks": ()}, "put sudo before the command"),
        ({"model": "mlp-minst"}, "mlp-mnist"),
        ({"algorithm": "star"}, "ring"),
        ({"rate": "fast"}, "fast"),
    ],
)
def test_what_can_not_be_studied_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Options(**wrong)


def test_trials_are_batches_times_epochs() -> None:
    assert Options(where="loopback", networks=("clean",), epochs=2).num_trials == 1876
    assert Options(where="loopback", networks=("clean",), trials=7).num_trials == 7
    text = answer_to(concluded(fabric_parts(), epochs=2, num_trials=1876), "What is sent")
    assert "trials = batches × epochs = 938 × 2 = 1876" in text


def test_an_ideal_that_is_beaten_has_no_share() -> None:
    assert [shown_share(share) for share in (None, 0.5, 1.0, 1.12)] == ["–", "50 %", "100 %", "beaten"]
    parts = fabric_parts()
    parts["sent-mlp-mnist-clean"]["layers"][0]["share_of_ideal"] = 1.5
    table = concluded(parts).tables[0]
    assert "beaten: an emulated link lets a burst of a millisecond pass after a pause" in table.notes[0]
    assert next(column.align for column in table.columns if column.name == "% of ideal speed") == "right"
    assert "beaten: the probe was disturbed." in concluded(parts, where="loopback").tables[0].notes[0]


def test_retransmissions_are_told_where_packets_are_lost() -> None:
    parts = fabric_parts()
    parts["sent-mlp-mnist-lossy-link"] = sent("lossy-link", times_s=[0.01, 0.01, 0.05], kind="lossy-link", rank=2)
    networks = [*FABRIC_OPTIONS["sent"], ("mlp-mnist", "mlp-mnist", "lossy-link")]
    tails = answer_to(concluded(parts, sent=networks), "tail")
    assert tails.count("TCP retransmitted 3 segments") == 1
    assert "Lossy link: fc1 has the longest tail: at most 500 ms, which is 5.00 × its median of 100 ms; TCP" in tails
    assert "the longest all-reduce, fc1 with 500 ms, takes at least as long as 1 timeout (0.2 s);" in tails


def test_a_failing_link_is_hardly_warmed_up() -> None:
    options = Options()
    assert workload_on(options, options.model, "clean").warmup == 5
    assert workload_on(options, options.model, "failing-link").warmup == 1
    assert workload_on(options, options.model, "late-host").delays_s == (0.0, 0.0, options.late_s, 0.0)


def test_sizes_of_activations_stand_beside_those_of_gradients() -> None:
    text = answer_to(concluded(fabric_parts()), "What is sent")
    assert "outputs of these layers, in a forward pass of 64 samples: fc1 65536 and fc4 2560 bytes" in text


def test_long_tails_are_explained_by_timeouts_in_a_row() -> None:
    def tails(kind: str) -> str:
        parts = {f"sent-mlp-mnist-{kind}": sent(kind, times_s=[0.01, 0.01, 0.64], kind="lossy-link", rank=2)}
        return answer_to(concluded(parts, sent=[("mlp-mnist", "mlp-mnist", kind)]), "tail")

    assert (
        "fc1 with 6.40 s, takes at least as long as 5 timeouts in a row (0.2 + 0.4 + 0.8 + 1.6 + 3.2 = 6.2 s)"
        in tails("failing-link")
    )
    assert "in a row" not in tails("slow-link"), "nothing was lost there"
    failing = concluded(
        {"sent-mlp-mnist-failing-link": sent("failing-link", times_s=[0.1], kind="lossy-link", rank=2)},
        sent=[("mlp-mnist", "mlp-mnist", "failing-link")],
    )
    assert "1 of 1 diagnoses are correct." in answer_to(failing, "causes")


def test_the_summary_has_the_numbers() -> None:
    summary = concluded(fabric_parts()).summary
    assert summary is not None
    assert summary.measured == (
        "The gradients of mlp-mnist (fc4 2600 and fc1 803840 bytes, the last layer first) are all-reduced in 11.0 ms "
        "per step on links of 1 Gb/s (median of 3 trials, one for each batch; an epoch has 938). All-reduces of a "
        "layer that take 20 ms or more, as often published: 17 % (clean network) and 67 % (slow link). The longest "
        "all-reduce of a layer takes 4.00 s (slow link)."
    )
    epochs = concluded(fabric_parts(), epochs=2, num_trials=1876).summary
    assert epochs is not None
    assert "(median of 3 trials, one for each batch of 2 epochs with 938 batches)" in epochs.measured
    assert summary.ideal.startswith("5.50 ms per step from the bandwidth and latency of the links alone; reached: 50 %")
    assert "slow link 10.00 ×" in summary.why
    assert "Slow link: replace it" in summary.advice
