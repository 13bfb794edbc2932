"""Models and tasks: built-in ones by name, any Hugging Face model, and user-defined factories.

Names and descriptions are available without importing torch; `load` and `load_task` import what they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagewright.zoo.model import Batch, ImageInput, Model, TextInput
from stagewright.zoo.named.catalog import describe, names

if TYPE_CHECKING:
    from stagewright.zoo.loading import load as load
    from stagewright.zoo.tasks import Task as Task, load_task as load_task

__all__ = ["Batch", "ImageInput", "Model", "Task", "TextInput", "describe", "load", "load_task", "names"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from stagewright.zoo import loading

        return loading.load
    if name in ("Task", "load_task"):
        from stagewright.zoo import tasks

        return getattr(tasks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
