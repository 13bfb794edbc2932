"""Sections on the environment of the runs and on the commands that reproduce them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.report.page.content.command import reproduce_command
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import Code, Section
from stagewright.table import Cell, Table, Tone, text_columns


def environment_section(runs: Sequence[RunData]) -> Section | None:
    """Tabulate machines and versions, one column for each distinct environment."""
    groups: dict[str, tuple[dict[str, str], list[str]]] = {}
    for run in runs:
        values = _describe_environment(run.environment)
        groups.setdefault(json.dumps(values, sort_keys=True), (values, []))[1].append(run.label)
    environments = [group for group in groups.values() if group[0]]
    if not environments:
        return None
    keys = list(dict.fromkeys(key for values, _ in environments for key in values))
    headings = [", ".join(labels) if len(environments) > 1 else "" for _, labels in environments]
    rows = []
    for key in keys:
        cells = [values.get(key, "–") for values, _ in environments]
        tone: Tone = "strong" if len(set(cells)) > 1 else "plain"
        rows.append(tuple(Cell(text, tone) for text in (key, *cells)))
    table = Table(columns=text_columns("", *headings, wrap=True), rows=tuple(rows))
    return Section(name="environment", title="Environment", items=(table,))


def reproduce_section(runs: Sequence[RunData]) -> Section | None:
    """Show the command that reproduces each run."""
    if not runs:
        return None
    commands = tuple(
        Code(title=run.label if len(runs) > 1 else "", text=reproduce_command(run.folder, run.plan)) for run in runs
    )
    prose = (
        "These commands run the same plans with the same cuts and devices. Paths are relative to where the report "
        "was written.",
    )
    return Section(name="reproduce", title="Reproduce", prose=prose, items=commands)


def _describe_environment(environment: Mapping[str, Any]) -> dict[str, str]:
    values: dict[str, str] = {}
    for key in ("system", "processor"):
        if environment.get(key):
            values[key] = str(environment[key])
    if isinstance(environment.get("cores"), list):
        values["cores"] = str(len(environment["cores"]))
    if environment.get("core_quota") is not None:
        values["core quota"] = str(environment["core_quota"])
    memory_bytes = environment.get("memory_bytes")
    if isinstance(memory_bytes, int | float) and 0 < memory_bytes < 2**63:
        values["memory"] = format_bytes(memory_bytes)
    gpus = [str(gpu.get("name", gpu)) if isinstance(gpu, dict) else str(gpu) for gpu in environment.get("gpus") or ()]
    if "gpus" in environment:
        values["GPUs"] = ", ".join(gpus) or "none"
    if environment.get("backends"):
        values["backends"] = ", ".join(map(str, environment["backends"]))
    versions = environment.get("versions")
    if isinstance(versions, dict):
        values |= {str(name): str(version) for name, version in versions.items()}
    return values
