"""What the study *stages* concludes: tables, sentences and figures from the data of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.studies.framework.study import Findings, Results
from stagewright.studies.stages.answers import answers
from stagewright.studies.stages.measured import measured_runs
from stagewright.studies.stages.tables import drawings, tables

__all__ = ["conclude"]


def conclude(options: Mapping[str, Any], results: Results) -> Findings:
    """Everything that the study says."""
    runs = {mode: measured_runs(results, options, mode) for mode in options["modes"]}
    return Findings(
        tables=tables(results, options, runs),
        answers=answers(results, options, runs),
        drawings=drawings(results, options, runs),
    )
