"""The second model of the study of stages: its parts, its table, and what is said of the policies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.studies.conftest import answer_to, table_rows
from tests.studies.fake_parts import CONTRAST_OPTIONS, STAGES_OPTIONS, contrast_parts, stages_parts

from stagewright.studies import Findings, Part, PartContext, Results
from stagewright.studies.stages.contrast import contrast_part
from stagewright.studies.stages.options import Options
from stagewright.studies.stages.study import build_study, conclude


def concluded(parts: dict[str, object]) -> Findings:
    return conclude({**STAGES_OPTIONS, "contrast_options": CONTRAST_OPTIONS}, Results(parts))


def same_cuts() -> dict[str, object]:
    """The first model, cut alike by all policies."""
    return stages_parts() | {f"run-inference-2-blocks-{turn}": {"same_as": "parameters"} for turn in (1, 2)}


def test_the_second_model_says_which_policy_is_best_and_why() -> None:
    text = answer_to(concluded(same_cuts() | contrast_parts()), "Which policy")
    assert text.startswith("mobilenet-v2, inference, 2 stages: blocks 1.61 ×, macs 1.41 × and parameters 1.11 ×.")
    assert "The best policy is blocks." in text
    assert "Published: splitting by whole blocks beats splitting by equal MACs. Here this holds too" in text
    assert "parameters gives the first stage 50 % of the parameters and 90 % of the time" in text
    assert "macs gives the first stage 50 % of the MACs and 70 % of the time" in text
    assert "can tell them apart." in text
    assert "A model in which they differ" not in text


def test_its_table_has_the_first_stages_shares_and_the_fastest_first() -> None:
    findings = concluded(same_cuts() | contrast_parts())
    table = next(table for table in findings.tables if table.title.startswith("Policies on"))
    assert table.title == "Policies on mobilenet-v2: 2 stages, inference"
    rows = table_rows(table)
    assert [row["policy"] for row in rows] == ["blocks", "macs", "parameters"]
    assert (rows[2]["parameters"], rows[2]["MACs"], rows[2]["units"], rows[2]["time"]) == (
        "50 %",
        "60 %",
        "50 %",
        "90 %",
    )
    assert rows[2]["speed-up"] == "1.11"
    answer = next(answer for answer in findings.answers if answer.question.startswith("Which policy"))
    assert answer.tables == (table.title,)


def test_the_summary_names_the_best_policy_or_says_that_it_can_not_be_told() -> None:
    summary = concluded(same_cuts() | contrast_parts()).summary
    assert summary is not None
    assert "mobilenet-v2 with 2 stages, inference: blocks 1.61 ×; macs 1.41 ×; parameters 1.11 ×." in summary.measured
    assert summary.advice.endswith(
        "Where policies cut differently, use blocks: on mobilenet-v2 faster than macs and parameters."
    )
    two = concluded(same_cuts() | contrast_parts(macs=32.0))
    assert two.summary is not None
    assert two.summary.advice.endswith("use macs or blocks: on mobilenet-v2 faster than parameters.")
    assert "The best policies are macs and blocks, whose difference is within" in answer_to(two, "Which policy")
    level = concluded(same_cuts() | contrast_parts(macs=32.0, parameters=32.0)).summary
    assert level is not None
    assert level.advice.endswith("which the policies cut differently, their difference is within the noise.")


@pytest.mark.parametrize("missing", ["contrast-profile-inference", "runs"])
def test_a_second_model_that_was_not_measured_stops_nothing(missing: str) -> None:
    parts = {name: data for name, data in contrast_parts().items() if missing not in name and "-run-" not in name}
    findings = concluded(same_cuts() | parts)
    text = answer_to(findings, "Which policy")
    assert ("mobilenet-v2, inference, 2 stages: unknown" in text) == (missing == "runs")
    assert "A model in which they differ: stagewright study stages --model mobilenet-v2" in text


def test_options_of_the_second_model() -> None:
    options = Options(modes=("training",), image_size=64, units="leaf")
    second = options.contrast_options
    assert second is not None
    assert (second.model, second.stages, second.modes, second.pixels) == ("mobilenet-v2", (2,), ("training",), 128)
    assert (second.units, second.batch, second.contrast_options) == ("auto", options.batch, None)
    quick = replace(options, quick=True, batch=32, microbatches=8).contrast_options
    assert quick is not None
    assert quick.batch == 16, "so that a quick study stays within three minutes"
    large = replace(options, batch=512, microbatches=8).contrast_options
    assert large is not None
    assert large.batch == 32, "a batch that suits a small transformer would take minutes here"
    other = replace(options, contrast="resnet-50").contrast_options
    assert other is not None
    assert other.pixels is None
    for left_out in ({"contrast": "none"}, {"model": "mobilenet-v2"}, {"policies": ("blocks",)}):
        assert replace(options, **left_out).contrast_options is None


def test_its_parts_read_results_under_the_first_models_names(tmp_path: Path) -> None:
    seen: dict[str, object] = {}
    part = contrast_part(
        Part(name="run-x", about="a run", needs=("profile-x",), run=lambda context: seen.update(context.results)), "net"
    )
    assert (part.name, part.needs, part.about) == ("contrast-run-x", ("contrast-profile-x",), "net, a run")
    results = Results({"calibration": 1, "profile-x": 2, "contrast-profile-x": 3})
    part.run(PartContext(folder=tmp_path, results=results))
    assert seen == {"calibration": 1, "profile-x": 3}


def test_the_study_has_its_parts_last() -> None:
    options = Options(stages=(2,), policies=("macs", "blocks"), modes=("inference",), rounds=1)
    names = [part.name for part in build_study(options).parts]
    assert names[-4:] == [
        "contrast-profile-inference",
        "contrast-run-inference-serial-1",
        "contrast-run-inference-2-macs-1",
        "contrast-run-inference-2-blocks-1",
    ]
