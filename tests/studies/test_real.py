"""Both studies in the very smallest size, for real, as a person types them: folders, files, answers, going on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from program import run_program
from stagewright.machine.machine import default_devices
from stagewright.studies.runner.run import ALONE, DISTURBED

STAGES = [
    *("study", "stages", "--quick", "--model", "digits-vit", "--stages", "2,3", "--policies", "blocks,optimal"),
    *("--modes", "training", "--batch", "8", "--microbatches", "4", "--steps", "2"),
    *("--contrast", "gpt-layers:2", "--json"),
]
MEMORY = [
    *("study", "memory", "--quick", "--model", "gpt-layers:4", "--strategy", "pipeline", "--batch", "2"),
    *("--sequence-length", "8", "--microbatches", "2", "--steps", "1", "--memory", "96MiB"),
    *("--checkpointing", "serial,pipeline", "--fits", "pipeline+recompute", "--json"),
]


def conduct(words: list[str], folder: Path, cache: Path) -> tuple[int, dict[str, Any], str]:
    environment = {**os.environ, "STAGEWRIGHT_CACHE": str(cache)}
    done = run_program(words, cwd=folder, env=environment)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.long
def test_stages(tmp_path: Path, shared_cache: Path) -> None:
    code, found, told = conduct([*STAGES, "--devices", "cpu:0,cpu:0"], tmp_path, shared_cache)
    assert code == 0, told
    assert found["status"] == "done"
    folder = tmp_path / found["folder"]
    for name in ("study.json", "table.md", "answers.md", "report.html", "figures/speedups.svg"):
        assert (folder / name).is_file(), name
    assert not (folder / "figures" / "why-training.png").exists(), "stages on shared devices are not explained"
    speedups = [dict(zip(found["tables"][1]["columns"], row, strict=True)) for row in found["tables"][1]["rows"]]
    rows = {(row["stages"], row["source"].removeprefix("unverified ")) for row in speedups}
    assert rows == {("1", "measured"), ("2", "measured, devices shared"), ("3", "forecast")}
    assert found["data"]["run-training-2-blocks-1"]["equal"] is True
    assert found["data"]["contrast-run-training-2-blocks-1"]["equal"] is True
    assert found["tables"][2]["title"] == "Policies on gpt-layers:2: 2 stages, training"
    asked = json.loads((folder / "study.json").read_text())["questions"]
    answered = [answer["question"] for answer in found["answers"]]
    # Other programs may run beside this one.
    assert [question for question in answered if question not in (ALONE, DISTURBED)] == asked
    _goes_on(folder, found, tmp_path, shared_cache)


def _goes_on(folder: Path, found: dict[str, Any], root: Path, cache: Path) -> None:
    """Without one part and with the mark of an interrupted study, the same command makes that part alone."""
    about = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**about, "status": "running"}))
    (folder / "parts" / "run-training-serial-1.json").unlink()
    (folder / "answers.md").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "parts").iterdir()}
    code, again, told = conduct([*STAGES, "--devices", "cpu:0,cpu:0"], root, cache)
    assert code == 0, told
    assert again["folder"] == found["folder"]
    assert "continuing in" in told
    changed = {path.name for path in (folder / "parts").iterdir() if path.stat().st_mtime_ns != before.get(path.name)}
    assert changed == {"run-training-serial-1.json"}
    assert (folder / "answers.md").is_file()
    code, _, told = conduct(["study", "memory", "--continue", str(folder)], root, cache)
    assert (code, "is of the study 'stages', not 'memory'" in told) == (2, True)
    code, _, told = conduct(["study", "stages", "--resume", str(folder), "--batch", "4"], root, cache)
    assert (code, "leave --batch out" in told) == (2, True)


@pytest.mark.long
def test_memory(tmp_path: Path, shared_cache: Path) -> None:
    devices = ",".join(default_devices(2, share=True))
    code, found, told = conduct([*MEMORY, "--devices", devices], tmp_path, shared_cache)
    assert code == 0, told
    data = found["data"]
    assert all(data[f"run-{way}-1"]["equal"] for way in ("serial+recompute", "pipeline", "pipeline+recompute"))
    assert max(data["run-pipeline-1"]["peak_memory_bytes"]) < max(data["run-serial-1"]["peak_memory_bytes"])
    assert data["operators-pipeline"]["is_same"] is False
    fit = data["fit-pipeline+recompute"]
    ran = {one["layers"]: one["ran"] for one in fit["attempts"]}
    assert fit["is_exact"], ran
    assert ran[fit["largest"]]
    assert not ran[fit["largest"] + 1]
    assert (tmp_path / found["folder"] / "figures" / "memory.svg").is_file()
