"""Tasks: data sets with preprocessing, loss and metric.

Names and descriptions are available without importing torch; `load_task` imports what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagewright.zoo.tasks.catalog import describe, entry, names, own_data

if TYPE_CHECKING:
    from stagewright.zoo.tasks.samples import Samples as Samples
    from stagewright.zoo.tasks.task import Task as Task, check_task as check_task, load_task as load_task

__all__ = ["Samples", "Task", "check_task", "describe", "entry", "load_task", "names", "own_data"]


def __getattr__(name: str) -> Any:
    if name in ("Samples", "Task", "check_task", "load_task"):
        from stagewright.zoo.tasks import task

        return getattr(task, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
