"""The changes that a run's state is built from, each read from one file of the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from stagewright.engine.worker.faults import Doing, Fault
from stagewright.engine.worker.process import ProcessState
from stagewright.runs.result import RunResult
from stagewright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRead:
    """Plan and environment were read."""

    name: str
    """Name of the run folder."""
    plan: Plan
    begun: str | None = None
    """When the run started, in ISO 8601."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """A worker appended a line to its metrics."""

    rank: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivitySeen:
    """A worker's activity record was read."""

    rank: int
    doing: Doing
    at_s: float
    """When it was read; for an old record, when it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSeen:
    """The state of a worker's process was checked."""

    rank: int
    state: ProcessState
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSeen:
    """A worker or the launcher wrote a fault."""

    fault: Fault
    verdict: bool = False
    """Whether the launcher identified it as the root cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRead:
    """The run has ended with a result."""

    result: RunResult


MAX_DURATION_S = 1e9
"""A step of thirty years is damaged."""

Change: TypeAlias = PlanRead | MetricsLine | ActivitySeen | ProcessSeen | FaultSeen | ResultRead


def read_number(values: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a metrics line; None where it is missing or not a number."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if not isinstance(value, int) or abs(value) < 2**63 else None


def read_count(values: Mapping[str, Any], name: str) -> int | None:
    """Return a count of a metrics line; None where it is missing, negative or not finite."""
    value = read_number(values, name)
    return int(value) if value is not None and 0 <= value < 2**53 else None


def read_duration_s(values: Mapping[str, Any], name: str) -> float | None:
    """Return a duration of a metrics line; None where it is missing, negative or not finite."""
    value = read_number(values, name)
    return value if value is not None and 0 <= value < MAX_DURATION_S else None
