"""What the study *strategies* concludes: tables, sentences and figures from the data of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.studies.framework.study import Findings, Results
from stagewright.studies.strategies.answers import answers
from stagewright.studies.strategies.measured import measured_ways
from stagewright.studies.strategies.tables import drawings, tables

__all__ = ["conclude"]


def conclude(options: Mapping[str, Any], results: Results) -> Findings:
    """Everything that the study says."""
    ways = {task: measured_ways(results, options, task) for task in options["tasks"]}
    return Findings(
        tables=tables(results, options, ways),
        answers=answers(results, options, ways),
        drawings=drawings(options, ways),
    )
