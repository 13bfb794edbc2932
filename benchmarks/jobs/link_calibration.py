"""The calibration job with few rounds: a slow link takes seconds for each."""

from __future__ import annotations

import json
import os

from stagewright.engine.worker.context import WorkerContext
from stagewright.files.atomic import save_text
from stagewright.planner.calibration.job import Probe, gather_rounds
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan

ROUNDS = "STAGEWRIGHT_BENCHMARK_ROUNDS"


def run(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """Measure; worker 0 writes the rounds of both workers."""
    probe = Probe(context)
    measured = gather_rounds([probe.round() for _ in range(int(os.environ[ROUNDS]) + 1)][1:])
    if context.rank == 0:
        save_text(json.dumps(measured) + "\n", run_folder.path / "calibration.json")
