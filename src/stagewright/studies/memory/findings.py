"""What the study *memory* concludes: tables, sentences and figures from the data of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.studies.memory.answers import answers
from stagewright.studies.memory.measured import measured_ways
from stagewright.studies.memory.tables import drawings, tables
from stagewright.studies.framework.study import Findings, Results

__all__ = ["conclude"]


def conclude(options: Mapping[str, Any], results: Results) -> Findings:
    """Everything that the study says."""
    ways = measured_ways(results, options)
    return Findings(
        tables=tables(results, options, ways),
        answers=answers(results, options, ways),
        drawings=drawings(results, options, ways),
    )
