"""What has changed between two states, so that a viewer is sent no more than that.

    {"step": 12, "workers": {"3": {"kind": "wait"}}, "curve": {"add": [[12, 0.31, 950]]}}

A key stands for its new value; of workers only those that changed, by rank; of the curve what was added at its end.
``page.html`` applies it as ``apply`` does here. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["apply", "difference"]


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What must be sent to one who has seen ``before``; empty where nothing has changed."""
    found: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if value == old and key in before:
            continue
        if key == "workers" and old is not None and len(old) == len(value):
            found[key] = {
                str(rank): {name: new[name] for name in new if one.get(name) != new[name] or name not in one}
                for rank, (one, new) in enumerate(zip(old, value, strict=True))
                if one != new
            }
        elif key == "curve" and old and value[: len(old)] == old:
            found[key] = {"add": value[len(old) :]}
        else:
            found[key] = value
    return found


def apply(before: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one who has seen ``before`` and now the change."""
    after = {**before, **change}
    if isinstance(change.get("workers"), Mapping):
        after["workers"] = [
            {**one, **change["workers"].get(str(rank), {})} for rank, one in enumerate(before["workers"])
        ]
    if isinstance(change.get("curve"), Mapping):
        after["curve"] = [*before["curve"], *change["curve"]["add"]]
    return after
