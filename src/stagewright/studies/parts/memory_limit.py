"""Run a plan under its memory limit, where running out of memory is a result and not an error."""

from __future__ import annotations

from typing import Any

from stagewright.errors import RunError
from stagewright.spec.plan import Plan
from stagewright.studies.framework.study import PartContext


def run_or_out_of_memory(plan: Plan, context: PartContext) -> dict[str, Any]:
    """Return the result of a run with `ran`; if it ran out of memory, only `ran` and the first line of the error."""
    try:
        return {"ran": True, **context.run(plan)}
    except RunError as error:
        text = str(error).splitlines()[0]
        if "out of memory" not in text:
            raise
        return {"ran": False, "text": text}
