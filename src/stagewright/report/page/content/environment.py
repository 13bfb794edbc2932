"""Where it was run, and the commands that make it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.report.page.content.command import again
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import Code, Section, Table

__all__ = ["again_section", "environment_section"]


def environment_section(runs: Sequence[RunData]) -> Section | None:
    """One table; a column for each machine or set of versions, where these differ."""
    groups: dict[str, tuple[dict[str, str], list[str]]] = {}
    for run in runs:
        flat = _flat(run.environment)
        groups.setdefault(json.dumps(flat, sort_keys=True), (flat, []))[1].append(run.label)
    described = [group for group in groups.values() if group[0]]
    if not described:
        return None
    keys = list(dict.fromkeys(key for flat, _ in described for key in flat))
    columns = [flat for flat, _ in described]
    head = ("", *(", ".join(labels) for _, labels in described)) if len(described) > 1 else ("", "")
    rows = tuple((key, *(one.get(key, "–") for one in columns)) for key in keys)
    differ = frozenset(at for at, row in enumerate(rows) if len(set(row[1:])) > 1)
    return Section(name="environment", title="Environment", items=(Table(head=head, rows=rows, marked=differ),))


def again_section(runs: Sequence[RunData]) -> Section | None:
    """One command a run, from its plan."""
    if not runs:
        return None
    codes = tuple(Code(title=run.label if len(runs) > 1 else "", text=again(run.folder, run.plan)) for run in runs)
    prose = ("Typed where the run folders' paths are right, this runs the same plans, cuts and devices included.",)
    return Section(name="again", title="Make it again", prose=prose, items=codes)


def _flat(environment: Mapping[str, Any]) -> dict[str, str]:
    """What a reader wants to know of a machine."""
    found: dict[str, str] = {}
    for key in ("system", "processor"):
        if environment.get(key):
            found[key] = str(environment[key])
    if environment.get("cores"):
        found["cores"] = str(len(environment["cores"]))
    if environment.get("core_quota") is not None:
        found["core quota"] = str(environment["core_quota"])
    if environment.get("memory_bytes"):
        found["memory"] = format_bytes(float(environment["memory_bytes"]))
    gpus = [str(gpu.get("name", gpu)) if isinstance(gpu, dict) else str(gpu) for gpu in environment.get("gpus") or ()]
    if "gpus" in environment:
        found["GPUs"] = ", ".join(gpus) or "none"
    if environment.get("backends"):
        found["backends"] = ", ".join(map(str, environment["backends"]))
    versions = environment.get("versions")
    if isinstance(versions, dict):
        found |= {str(name): str(version) for name, version in versions.items()}
    return found
