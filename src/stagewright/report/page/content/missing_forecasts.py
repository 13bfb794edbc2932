"""Forecasts for runs that have none: the model is measured here, so this takes a while and is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from stagewright.errors import StagewrightError
from stagewright.report.page.content.runs import RunData

if TYPE_CHECKING:
    from stagewright.planner.forecast import Prepared
    from stagewright.spec.plan import Plan

__all__ = ["make_forecaster"]


def make_forecaster(prepared_from: Callable[[Plan], Prepared]) -> Callable[[RunData], RunData]:
    """Adds forecast and explanation to a run, or the reason why there is none."""
    from stagewright.planner.explain import explain_run

    def add(run: RunData) -> RunData:
        try:
            prepared = prepared_from(run.plan)
            parallel = run.plan.mesh.num_workers > 1
            return replace(
                run,
                forecast=prepared.forecast(),
                explanation=explain_run(prepared, run.folder) if parallel else None,
            )
        except StagewrightError as error:
            return replace(run, missing={**run.missing, "forecast": f"it can't be forecast: {error}"})

    return add
