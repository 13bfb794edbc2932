"""``stagewright report``: runs as one page that can be sent to anybody."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from stagewright.cli.options import CacheDir, Json, check_output, check_output_folder
from stagewright.cli.screen import note, print_json
from stagewright.quantity import format_bytes

__all__ = ["report"]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Run folders, or folders of them such as runs/; fabric runs and studies too.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its sentences and tables as Markdown, too.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Its figures as .svg and .png, too.")] = None,
    forecast: Annotated[
        bool, typer.Option("--forecast", help="Measure the models here and forecast the runs beside what they took.")
    ] = False,
    newest: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Of the runs, the newest so many. \\[default: 40]",
            show_default=False,
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page. \\[default: models and strategies]")] = None,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Show runs on one page: speed, timeline, memory, traffic, learning, plans, and how to make them again."""
    from stagewright.files.atomic import save_text
    from stagewright.report.page.build import build_report
    from stagewright.report.page.content.runs import MOST_RUNS
    from stagewright.report.page.html import page_html

    check_output(output, "-o", "report.html")
    if markdown is not None:
        check_output(markdown, "--markdown", "report.md")
    if figures is not None:
        check_output_folder(figures, "--figures")
    forecaster = None
    if forecast:
        from stagewright.cli.planning.options import prepared_from
        from stagewright.report.page.content.missing_forecasts import make_forecaster

        usual: dict[str, Any] = {"cluster": None, "rescale": False, "innermost": "pipeline", "no_cache": False}
        forecaster = make_forecaster(partial(prepared_from, **usual, cache=cache_dir, repeats=5, every_schedule=True))
    made = build_report(runs, title=title, forecaster=forecaster, newest=newest or MOST_RUNS)
    content = page_html(made.page)
    save_text(content, output)
    if markdown is not None:
        from stagewright.report.page.markdown import page_markdown

        save_text(page_markdown(made.page), markdown)
    drawn: list[Path] = []
    if figures is not None:
        from stagewright.report.page.charts.figures import write_figures

        drawn = write_figures(made.page, figures)
    size = len(content.encode("utf-8"))
    if json:
        print_json(
            {
                "page": str(output),
                "bytes": size,
                "title": made.page.title,
                "sections": [section.name for section in made.page.sections],
                "runs": [
                    {"label": run.label, "folder": str(run.folder.path), "status": run.status, "speedup": run.speedup}
                    for run in made.runs
                ],
                "fabric_runs": [str(one.path) for one in made.found.fabrics],
                "studies": [str(one) for one in made.found.studies],
                "damaged": list(made.found.damaged),
                "left_out": made.found.num_left_out,
                "markdown": None if markdown is None else str(markdown),
                "figures": [str(path) for path in drawn],
            }
        )
        return
    if made.found.left_out:
        note(made.found.left_out)
    for reason in made.found.damaged:
        note(f"left out: {reason}")
    note(f"{output}: {format_bytes(size)}, {len(made.page.sections)} sections; open it in a browser")
    if markdown is not None:
        note(f"{markdown}: the same as Markdown")
    if drawn:
        note(f"{figures}: {len(drawn)} files of {len(drawn) // 2} figures")
