"""Run cases of the verify benchmark: baselines in one process, candidates in one torchrun of two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cases import Case
from model import Setting, serial_step

from stagewright.verification.context import ROUNDING_VARIABLE
from stagewright.verification.diagnosis import diagnose
from stagewright.verification.verdict import Verdict

HERE = Path(__file__).parent
PERTURBED = 3


def record_baseline(setting: Setting, folder: Path) -> None:
    """Record the plain step as `stagewright verify` does."""
    for name in ("exact", "repeated", *(f"rounding-{n}" for n in range(1, PERTURBED + 1))):
        os.environ[ROUNDING_VARIABLE] = name.partition("-")[2]
        serial_step(setting, str(folder / name))
    os.environ.pop(ROUNDING_VARIABLE)


def run_cases(cases: Sequence[Case], scratch: Path, python: str = sys.executable) -> list[Verdict | str]:
    """Return the verdict of each case, or why there is none."""
    baselines: dict[Setting, Path] = {}
    for case in cases:
        if case.setting not in baselines:
            baselines[case.setting] = scratch / f"baseline-{len(baselines)}"
            record_baseline(case.setting, baselines[case.setting])
    folders = [scratch / f"candidate-{index}" for index in range(len(cases))]
    scripts = dict.fromkeys(case.script for case in cases)
    groups = [[i for i, case in enumerate(cases) if case.script == script and not case.alone] for script in scripts]
    for group in (*groups, *([index] for index, case in enumerate(cases) if case.alone)):
        if group:
            jobs = [
                {
                    "script": cases[index].script,
                    "bug": cases[index].bug,
                    "setting": asdict(cases[index].setting),
                    "folder": str(folders[index]),
                    "alone": cases[index].alone,
                }
                for index in group
            ]
            _torchrun(jobs, scratch / f"jobs-{group[0]}.json", python, cases[group[0]].ranks)
    verdicts: list[Verdict | str] = []
    for case, folder in zip(cases, folders, strict=True):
        try:
            verdicts.append(diagnose(baselines[case.setting], folder))
        except Exception as error:
            verdicts.append(f"{type(error).__name__}: {error}")
    return verdicts


def _torchrun(jobs: list[dict[str, object]], path: Path, python: str, ranks: int) -> None:
    path.write_text(json.dumps(jobs))
    words = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(HERE / "worker.py"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    timeout = 300 + 30 * len(jobs)
    try:
        done = subprocess.run(
            [*words, str(path)], env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return
    path.with_suffix(".log").write_text(done.stdout + done.stderr)
