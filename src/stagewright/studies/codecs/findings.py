"""What the study *codecs* concludes: tables, sentences and figures from the data of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.studies.codecs.answers import answers
from stagewright.studies.codecs.measured import measured_codecs
from stagewright.studies.codecs.tables import drawings, tables
from stagewright.studies.framework.study import Findings, Results

__all__ = ["conclude"]


def conclude(options: Mapping[str, Any], results: Results) -> Findings:
    """Everything that the study says."""
    found = {task: measured_codecs(results, options, task) for task in options["tasks"]}
    return Findings(
        tables=tables(results, options, found),
        answers=answers(results, options, found),
        drawings=drawings(options, found),
    )
