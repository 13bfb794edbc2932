"""Differences between two snapshots, so that a viewer is sent only what changed.

    {"step": 12, "workers": {"3": {"kind": "wait"}}, "curve": {"add": [[12, 0.31, 950]]}}

A key maps to its new value; of workers, only those that changed, by rank; of the curve, only new points.
``templates/live.js`` applies it as ``apply`` does. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the change from one snapshot to the next; empty if nothing changed."""
    changes: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if value == old and key in before:
            continue
        if key == "workers" and old is not None and len(old) == len(value):
            changes[key] = {
                str(rank): {
                    name: worker[name] for name in worker if previous.get(name) != worker[name] or name not in previous
                }
                for rank, (previous, worker) in enumerate(zip(old, value, strict=True))
                if previous != worker
            }
        elif key == "curve" and old and value[: len(old)] == old:
            changes[key] = {"add": value[len(old) :]}
        else:
            changes[key] = value
    return changes


def apply(before: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return the snapshot after a change."""
    after = {**before, **change}
    if isinstance(change.get("workers"), Mapping):
        after["workers"] = [
            {**worker, **change["workers"].get(str(rank), {})} for rank, worker in enumerate(before["workers"])
        ]
    if isinstance(change.get("curve"), Mapping):
        after["curve"] = [*before["curve"], *change["curve"]["add"]]
    return after
