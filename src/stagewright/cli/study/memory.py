"""``stagewright study memory``: data, tensor, pipeline on two devices: speed, memory, recomputation, what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import Json
from stagewright.cli.study.conduct import (
    HOW,
    WHAT,
    Fresh,
    Quick,
    Resume,
    Root,
    StudyDevices,
    StudySeed,
    conduct,
    devices_of,
    words,
)
from stagewright.quantity import parse_bytes

__all__ = ["memory"]


def memory(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="A family with free layers. \\[default: gpt-layers:6; GPUs: :12; quick: :2]", rich_help_panel=WHAT
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(help="Beside serial. \\[default: data,tensor,pipeline]", rich_help_panel=WHAT, show_default=False),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples in a step. \\[default: 8; GPUs: 16; quick: 4]", rich_help_panel=WHAT),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens a sample. \\[default: 64; GPUs: 128; quick: 32]", rich_help_panel=WHAT),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Of the pipeline. \\[default: 4]", rich_help_panel=WHAT)
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="Of each device, for the most layers. \\[default: 256MiB; GPUs: 1GiB; quick: 88MiB]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    fits: Annotated[
        str | None,
        typer.Option(
            help="Find the most layers by running for data,tensor+recompute,… \\[default: all; quick: two]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, adam or adamw. \\[default: adamw; quick: sgd]", rich_help_panel=WHAT)
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Times that everything runs, in turn. \\[default: 3; quick: 1]", rich_help_panel=HOW),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Timed steps of a run. \\[default: 3; GPUs: 5; quick: 2]", rich_help_panel=HOW),
    ] = None,
    devices: StudyDevices = None,
    quick: Quick = False,
    seed: StudySeed = None,
    resume: Resume = None,
    fresh: Fresh = False,
    root: Root = Path("studies"),
    json: Json = False,
) -> None:
    """Data, tensor and pipeline parallel on two devices: speed-up, memory, recomputation, the most layers that fit."""
    given = {
        "model": model,
        "strategies": words(strategies),
        "batch": batch,
        "sequence_length": sequence_length,
        "microbatches": microbatches,
        "memory_bytes": parse_bytes(limit) if limit is not None else None,
        "fits": words(fits),
        "optimizer": optimizer,
        "rounds": rounds,
        "steps": steps,
        "devices": None if resume is not None else devices_of(devices, 2),
        "seed": seed,
    }
    conduct(context, given, quick=quick, resume=resume, fresh=fresh, root=root, json=json)
