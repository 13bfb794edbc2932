"""What the study of stages makes of stages that share devices."""

from __future__ import annotations

from tests.studies.conftest import answer_to
from tests.studies.fake_parts import MIB, STAGES_OPTIONS, row, stages_parts

from stagewright.studies import Findings, Results
from stagewright.studies.stages.study import conclude


def concluded(parts: dict[str, object], **options: object) -> Findings:
    return conclude({**STAGES_OPTIONS, **options}, Results(parts))


def test_stages_that_share_devices_are_measured_against_the_devices() -> None:
    parts = stages_parts()
    for turn in (1, 2):
        parts[f"run-inference-4-blocks-{turn}"] = row(30.0, run=f"runs/s{turn}", sent=MIB, shared=True)
    findings = concluded(parts)
    text = answer_to(findings, "reach over")
    assert "4 stages: ran with its stages sharing 2 devices, cut by blocks, and passed its parity check." in text
    assert (
        "what it sends (1.00 MiB per step), not a speed-up: 1.46 × (1.43 … 1.50 over 2 rounds) is of shared devices. "
        "Forecast" in text
    )
    assert "with a device like these for each stage: 3.02 ×" in text
    assert "Inference, 4 stages, forecast: blocks 3.02 ×" in answer_to(findings, "Which policy")


def test_a_run_on_shared_devices_is_not_explained() -> None:
    parts = {name: data for name, data in stages_parts().items() if not name.startswith("run-inference-2")}
    for turn in (1, 2):
        parts[f"run-inference-4-blocks-{turn}"] = row(30.0, run=f"runs/s{turn}", sent=MIB, shared=True)
    parts["why-inference"] |= {"stages": 4, "num_devices": 4, "run": "runs/s2"}
    findings = concluded(parts)
    assert answer_to(findings, "below") == (
        "Inference: unknown, since no pipeline was measured with a device for each stage."
    )
    assert not any(table.title.startswith("Why ") for table in findings.tables)
    assert findings.summary is not None
    assert findings.summary.measured == "No pipeline was measured on 2 devices with a device for each stage."
    assert findings.summary.advice == "Run as many stages as there are devices: --stages 2."


def test_shares_of_a_gpu_are_no_shared_device() -> None:
    text = answer_to(concluded(stages_parts(), devices=("cuda:0/8",) * 4), "reach over")
    assert "sharing" not in text
    assert "Inference with 2 stages: measured" in text
