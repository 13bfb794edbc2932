"""``stagewright study fabric``: a model's gradients over emulated hosts: delay of each layer, tails, cause."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import Json
from stagewright.cli.screen import note
from stagewright.cli.study.conduct import HOW, WHAT, Fresh, Quick, Resume, Root, StudySeed, conduct, words
from stagewright.quantity import parse_s

__all__ = ["fabric"]


def fabric(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Its layers one by one. \\[default: mlp-mnist]", rich_help_panel=WHAT)
    ] = None,
    bucket_model: Annotated[
        str | None,
        typer.Option(
            "--bucket-model", help="Its layers put together, as DDP does. \\[default: deit-small]", rich_help_panel=WHAT
        ),
    ] = None,
    networks: Annotated[
        str | None,
        typer.Option(help="\\[default: clean,slow-link,lossy-link,late-host]", rich_help_panel=WHAT),
    ] = None,
    bucket_networks: Annotated[
        str | None,
        typer.Option(
            "--bucket-networks",
            help="For the buckets. \\[default: clean,slow-link; quick: clean]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="\\[default: 4]", rich_help_panel=WHAT)] = None,
    rate: Annotated[str | None, typer.Option(help="Of each link. \\[default: 1gbit]", rich_help_panel=WHAT)] = None,
    wrong_host: Annotated[
        int | None, typer.Option("--wrong-host", help="The one that is slow, lossy, late.", rich_help_panel=WHAT)
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="Of the layers. \\[default: 938, an epoch; quick: 120]", rich_help_panel=HOW),
    ] = None,
    bucket_trials: Annotated[
        int | None,
        typer.Option("--bucket-trials", min=1, help="Of the buckets. \\[default: 30; quick: 5]", rich_help_panel=HOW),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option("--time-limit", metavar="TIME", help="Of each network. \\[default: 2min]", rich_help_panel=HOW),
    ] = None,
    loopback: Annotated[
        bool,
        typer.Option("--loopback", help="Without a lab, which needs root: this host's own limit.", rich_help_panel=HOW),
    ] = False,
    quick: Quick = False,
    seed: StudySeed = None,
    resume: Resume = None,
    fresh: Fresh = False,
    root: Root = Path("studies"),
    json: Json = False,
) -> None:
    """The MNIST MLP's gradients over 4 emulated hosts: CDF and delay of each layer, tails, cause; then buckets."""
    where = "loopback" if loopback else None
    if resume is None and not loopback:
        from stagewright.studies.fabric.study import has_lab

        if not has_lab():
            where = "loopback"
            note("a lab needs root (put sudo before the command): everything goes over this host's loopback instead")
    given = {
        "model": model,
        "bucket_model": bucket_model,
        "networks": words(networks),
        "bucket_networks": words(bucket_networks),
        "hosts": hosts,
        "rate": rate,
        "wrong_host": wrong_host,
        "trials": trials,
        "bucket_trials": bucket_trials,
        "time_limit_s": parse_s(time_limit) if time_limit is not None else None,
        "where": where,
        "seed": seed,
    }
    conduct(context, given, quick=quick, resume=resume, fresh=fresh, root=root, json=json)
