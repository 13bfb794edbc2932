"""Forecasts for runs that have none; they take a while, because the model is measured on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from stagewright.errors import StagewrightError
from stagewright.report.page.content.runs import RunData

if TYPE_CHECKING:
    from stagewright.planner.forecast import PreparedPlan
    from stagewright.spec.plan import Plan


def make_forecaster(prepare: Callable[[Plan], PreparedPlan]) -> Callable[[RunData], RunData]:
    """Return a function that adds forecast and explanation to a run, or the reason why it has none."""
    from stagewright.planner.explain import explain_run

    def add_forecast(run: RunData) -> RunData:
        try:
            prepared = prepare(run.plan)
            parallel = run.plan.mesh.num_workers > 1
            return replace(
                run,
                forecast=prepared.forecast(),
                explanation=explain_run(prepared, run.folder) if parallel else None,
            )
        except StagewrightError as error:
            return replace(run, missing={**run.missing, "forecast": f"it can't be forecast: {error}"})

    return add_forecast
