"""``sw.Run``: a finished run, read from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagewright.display import Displayed
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.trace.breakdown import WorkerShare, breakdown
from stagewright.trace.read import read_trace


@dataclass(frozen=True, slots=True)
class Run(Displayed):
    """An executed plan: its folder has the resolved plan, metrics, events and the result.

    Example:
        run = sw.Run(comparison.fastest.run)
        print(run.plan.mesh, run.result.samples_per_s)
    """

    path: Path | str
    """The run folder."""

    def __post_init__(self) -> None:
        RunFolder.open(self.path)  # raises an error with the nearest name if there is no such run

    @property
    def folder(self) -> RunFolder:
        """The folder, for everything that it contains."""
        return RunFolder.open(self.path)

    @property
    def plan(self) -> Plan:
        """The resolved plan."""
        return self.folder.plan()

    @property
    def result(self) -> RunResult | None:
        """The result; None while the run goes on, or if it was killed."""
        return self.folder.result()

    def breakdown(self, step: int | None = None) -> tuple[WorkerShare, ...]:
        """Return where each worker's time went in one step, by default the median one."""
        trace = read_trace(self.folder)
        return tuple(breakdown(trace, trace.median_step if step is None else step))

    def to_dict(self) -> dict[str, Any]:
        """Return the run's result.json."""
        result = self.result
        return {} if result is None else result.to_dict()
