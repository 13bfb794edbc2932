"""Causes of a step that raised or did not end."""

from __future__ import annotations

from stagewright.verification.causes.catalogue import cause
from stagewright.verification.record import RankRecord
from stagewright.verification.verdict import Cause

_KNOWN = {
    "use_reentrant=True": "reentrant checkpoint in a split backward",
    "steal_bwd_input": "schedule without forward-only mode",
    "rebuilt_param_indices_": "DDP around stages without static shapes",
}
"""Part of the message → cause."""


def find_failure_cause(failed: list[RankRecord], missing: list[int]) -> Cause | None:
    """Explain a failed step by the message of the rank that failed first."""
    if not failed:
        return (
            cause("rank did not finish", f"Rank {', '.join(map(str, missing))} wrote no record.") if missing else None
        )
    root = failed[0]
    name = next((name for part, name in _KNOWN.items() if part in root.error), "exception in the step")
    return cause(name, f"Rank {root.rank}, in {root.last_module or 'the model'}: {root.error}")
