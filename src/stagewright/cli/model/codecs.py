"""``stagewright codecs``: list the codecs, and measure them on a model's crossing tensors."""

from __future__ import annotations

from typing import Annotated

import typer

from stagewright.cli.option_groups import with_groups
from stagewright.cli.options import Cut, Json, ModelName, ModelOptions, Plot, check_plot, unit_names
from stagewright.cli.screen import note, print_json, print_table, progress
from stagewright.errors import UsageError
from stagewright.quantity import parse_rate

codecs = typer.Typer(
    name="codecs",
    help="Compressed links: list the codecs, and measure them on a model's tensors.",
    no_args_is_help=True,
)

MEASURED = "bf16,fp8,block8,block6,block4,hadamard8,hadamard4,lloyd3,lloyd2,lowrank:8,topk:10,sort6+2,sort3+1"
LINKS = "0.1Gbit/s,1Gbit/s,10Gbit/s,100Gbit/s"


@codecs.command("list")
def list_codecs(json: Json = False) -> None:
    """List the codecs with their size in bits per value."""
    import torch

    from stagewright.codecs import codec_names, get

    shape = (64, 128, 512)
    values = 64 * 128 * 512
    rows = [(name, get(name).summary, get(name).num_bytes(shape, torch.float32) * 8 / values) for name in codec_names()]
    if json:
        print_json({"codecs": [{"codec": name, "summary": text, "bits_per_value": bits} for name, text, bits in rows]})
        return
    from stagewright.report.tables.codecs import list_table

    print_table(list_table(rows))
    note(f"bits per value include header and scales, for a float32 tensor of {list(shape)}")


@codecs.command()
@with_groups
def bench(
    model: ModelName,
    json: Json = False,
    plot: Plot = None,
    stages: Annotated[int, typer.Option(min=2, help="How many stages; with equally many units each.")] = 2,
    cut: Cut = None,
    names: Annotated[
        str, typer.Option("--codecs", metavar="NAMES", help="Codecs, with commas; yours is module:Class.")
    ] = MEASURED,
    links: Annotated[str, typer.Option(metavar="RATES", help="Link rates to evaluate, with commas.")] = LINKS,
    *,
    options: ModelOptions,
) -> None:
    """Measure codecs on the tensors that cross a model's cuts: error, size, speed, links where each pays off."""
    from stagewright.codecs.registry import check_codec

    chosen = [name.strip() for name in _split_names(names)]
    for name in chosen:
        check_codec(name)
    rates = [parse_rate(rate) for rate in links.split(",")]
    if min(rates) <= 0:
        raise UsageError(f"--links {links}: a rate must be above 0, like 1Gbit/s")
    check_plot(plot)
    device = options.begin(model)
    from stagewright.engine.jobs.codec_bench import bench_codecs, even_cuts
    from stagewright.engine.parallel.model import cut_indices

    loaded, graph = options.capture(model, device)
    indices = even_cuts(graph, stages)
    if cut:
        indices = cut_indices(graph, unit_names(cut))
    with progress(f"measuring codecs on {model}") as report:
        result = bench_codecs(
            loaded,
            graph,
            indices,
            chosen,
            rates,
            device=str(device),
            training=not options.inference,
            repeats=options.repeats,
            progress=report,
        )
    if plot is not None:
        from stagewright.report.figures.codecs import draw_codecs

        note(f"drawn: {draw_codecs(result, plot)}")
    if json:
        print_json(result.to_dict())
        return
    from stagewright.report.tables.codecs import bench_tables

    for table in bench_tables(result):
        print_table(table)


def _split_names(text: str) -> list[str]:
    """Split at commas, except inside parentheses."""
    names, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            names.append("")
        else:
            names[-1] += character
    return names
