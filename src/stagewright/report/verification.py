"""The page of a verdict: what differs first, the likely cause, and every module layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stagewright import __version__
from stagewright.report.page.sections import Bar, BarChart, BarPart, Fold, Item, Page, Prose, Section
from stagewright.table import Cell, Column, Table, number_columns, text_columns
from stagewright.verification.verdict import PHASES, TensorError, Verdict, describe

_MAX_MODULES = 400
"""Rows of the table of modules; larger models fold the right ones."""


def verdict_table(verdict: Verdict) -> Table:
    """Return one row for each phase: its tensors, the first wrong one, its error and tolerance."""
    rows = []
    for phase in PHASES:
        tensors = [tensor for tensor in verdict.tensors if tensor.phase == phase]
        first = verdict.first.get(phase)
        if not tensors and first is None:
            continue
        wrong = sum(tensor.is_wrong for tensor in tensors)
        rows.append(
            (
                phase,
                str(len(tensors)),
                Cell(str(wrong), "bad" if wrong else "good"),
                "–" if first is None else first.module or "(the model)",
                "–" if first is None else first.tensor,
                "–" if first is None else _number(first.error),
                "–" if first is None else _number(first.tolerance),
            )
        )
    columns = (
        *text_columns("phase"),
        *number_columns("tensors", "wrong"),
        *text_columns("first wrong module", "tensor"),
        *number_columns("error", "tolerance"),
    )
    return Table(title="Verdict by phase", columns=columns, rows=tuple(rows))


def verdict_page(verdict: Verdict, *, baseline: str, candidate: str) -> Page:
    """Return the page of a verdict; ``baseline`` and ``candidate`` are what the command line named."""
    sections = [_summary_section(verdict), _layers_section(verdict), _tensors_section(verdict)]
    return Page(
        title="The step equals the baseline's" if verdict.same else "The step differs from the baseline's",
        subtitle=f"{candidate} compared with {baseline}, {verdict.num_ranks} ranks, {verdict.dtype or 'not finished'}",
        sections=tuple(section for section in sections if section is not None),
        footer=f"Made by stagewright {__version__}; this file loads nothing from the network.",
    )


def _summary_section(verdict: Verdict) -> Section:
    items: list[Item] = [verdict_table(verdict)]
    if verdict.cause is not None:
        items.insert(
            0,
            Prose(
                title=f"Likely cause: {verdict.cause.name}",
                paragraphs=(verdict.cause.evidence, f"Fix: {verdict.cause.fix}"),
            ),
        )
    prose = [verdict.problem] if verdict.problem else []
    if verdict.same:
        prose += verdict.summary()
    for phase in PHASES:
        if phase in verdict.first:
            prose.append(f"First difference, {phase}: {describe(verdict.first[phase])}.")
    if verdict.gradient_scale != 1.0:
        prose.append(
            f"Activation gradients are {verdict.gradient_scale:g} × the baseline's, because replicas and micro-batches "
            "divide the loss by their part of the batch. They are compared without this factor, parameter gradients as "
            "they are."
        )
    return Section(name="verdict", title="Verdict", prose=tuple(prose), items=tuple(items))


def _layers_section(verdict: Verdict) -> Section | None:
    modules = list(dict.fromkeys(tensor.module for tensor in verdict.tensors))
    if not modules:
        return None
    rows = []
    for module in modules:
        tensors = [tensor for tensor in verdict.tensors if tensor.module == module]
        cells = [_phase_cell([tensor for tensor in tensors if tensor.phase == phase]) for phase in PHASES]
        rows.append((module or "(the model)", *cells))
    columns = (Column("module"), *number_columns(*PHASES))
    notes = ("Largest error of a module's tensors in multiples of what rounding explains; above 1 it is wrong.",)
    shown = [row for row in rows if any(isinstance(cell, Cell) and cell.tone == "bad" for cell in row)]
    items: tuple[Item, ...] = (Table(columns=columns, rows=tuple(rows[:_MAX_MODULES]), notes=notes),)
    if len(rows) > _MAX_MODULES:
        items = (
            Table(title="Wrong modules", columns=columns, rows=tuple(shown[:_MAX_MODULES]), notes=notes),
            Fold(title=f"all {len(rows)} modules", items=(Table(columns=columns, rows=tuple(rows)),)),
        )
    return Section(name="layers", title="Layer by layer", items=(_chart(verdict, modules), *items))


def _chart(verdict: Verdict, modules: Sequence[str]) -> BarChart:
    """Draw the forward and backward error of each module, in decimal orders above the smallest tolerance."""
    bars = []
    for module in modules[:60]:
        for phase, paint in (("forward", "stage-0"), ("backward", "stage-1")):
            tensors = [t for t in verdict.tensors if t.module == module and t.phase == phase]
            if not tensors:
                continue
            worst = max(tensors, key=_excess)
            height = max(0.0, min(12.0, 1 + math.log10(max(_excess(worst), 0.1))))
            part = BarPart(
                name=phase, paint=paint, start=0.0, end=height, hint=f"{worst.tensor}: {_number(worst.error)}"
            )
            bars.append(
                Bar(
                    label=f"{module or '(the model)'}, {phase}",
                    parts=(part,),
                    text=f"{_number(_excess(worst))} ×",
                    mark=1.0,
                )
            )
    return BarChart(
        name="layers",
        title="Error relative to the tolerance, logarithmic: each unit is a factor of 10",
        quantity="number",
        bars=tuple(bars),
        mark_name="tolerance",
        in_table=True,
    )


def _tensors_section(verdict: Verdict) -> Section | None:
    if not verdict.tensors:
        return None
    columns = (
        *text_columns("phase", "module", "tensor"),
        *number_columns("error", "tolerance"),
        *text_columns("ranks", "assembled by"),
    )
    rows = tuple(
        (
            tensor.phase,
            tensor.module or "(the model)",
            tensor.tensor,
            Cell(_number(tensor.error), "bad" if tensor.is_wrong else "plain"),
            _number(tensor.tolerance),
            ", ".join(map(str, tensor.ranks)),
            tensor.remark or tensor.held,
        )
        for tensor in verdict.tensors
    )
    table = Table(columns=columns, rows=rows)
    return Section(name="tensors", title="All tensors", items=(Fold(title=f"{len(rows)} tensors", items=(table,)),))


def _phase_cell(tensors: Sequence[TensorError]) -> Cell | str:
    if not tensors:
        return "–"
    worst = max(_excess(tensor) for tensor in tensors)
    return Cell(_number(worst), "bad" if worst > 1 else "plain")


def _excess(tensor: TensorError) -> float:
    """Return the error in multiples of the tolerance."""
    if tensor.error == 0.0:
        return 0.0
    return tensor.error / tensor.tolerance if tensor.tolerance else math.inf


def _number(value: float) -> str:
    return "∞" if value == math.inf else f"{value:.2g}"
