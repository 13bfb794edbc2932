"""``stagewright study stages``: where to cut a model into 2, 3, 4, 6 stages, what each cut gives, and why not more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import ImageSize, Json, SequenceLength
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
    whole_numbers,
    words,
)

__all__ = ["stages"]


def stages(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Any model. \\[default: deit-small; quick: deit-tiny]", rich_help_panel=WHAT)
    ] = None,
    stages: Annotated[
        str | None, typer.Option(help="Numbers of stages. \\[default: 2,3,4,6]", rich_help_panel=WHAT)
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(help="Where to cut. \\[default: parameters,macs,blocks,time,optimal]", rich_help_panel=WHAT),
    ] = None,
    modes: Annotated[
        str | None, typer.Option(help="\\[default: inference,training]", rich_help_panel=WHAT, show_default=False)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples in a step. \\[default: 32]", rich_help_panel=WHAT)
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Of a pipeline. \\[default: 16; quick: 8]", rich_help_panel=WHAT)
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Times that everything runs, in turn. \\[default: 3; quick: 1]", rich_help_panel=HOW),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Timed steps of a run. \\[default: 5; quick: 4]", rich_help_panel=HOW)
    ] = None,
    devices: StudyDevices = None,
    oversubscribe: Annotated[
        bool,
        typer.Option(
            "--oversubscribe",
            help="Run more stages than there are devices too, sharing them; marked.",
            rich_help_panel=HOW,
        ),
    ] = False,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Forecasts are for this cluster instead of this machine.", rich_help_panel=HOW
        ),
    ] = None,
    quick: Quick = False,
    seed: StudySeed = None,
    resume: Resume = None,
    fresh: Fresh = False,
    root: Root = Path("studies"),
    json: Json = False,
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
) -> None:
    """Serial against 2, 3, 4 and 6 pipeline stages by every policy: speed-ups, the best policy, why it is not n."""
    numbers = whole_numbers(stages, "numbers of stages")
    given = {
        "model": model,
        "stages": numbers,
        "policies": words(policies),
        "modes": words(modes),
        "batch": batch,
        "microbatches": microbatches,
        "rounds": rounds,
        "steps": steps,
        "devices": None if resume is not None else devices_of(devices, max(numbers or (6,))),
        "oversubscribe": oversubscribe or None,
        "cluster": str(cluster) if cluster is not None else None,
        "seed": seed,
        "image_size": image_size,
        "sequence_length": sequence_length,
    }
    conduct(context, given, quick=quick, resume=resume, fresh=fresh, root=root, json=json)
