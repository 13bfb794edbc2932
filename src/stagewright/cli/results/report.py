"""``stagewright report``: one self-contained page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import CacheDir, Json, check_output, check_output_folder
from stagewright.cli.screen import note, print_json
from stagewright.extras import require
from stagewright.quantity import format_bytes


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Run folders, beginnings of their names, or folders of them; fabric runs and studies too. "
            "\\[default: the newest ones in runs/]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write; the page.")] = Path(
        "report.html"
    ),
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write its text and tables as Markdown.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write its figures as .svg and .png.")
    ] = None,
    forecast: Annotated[
        bool, typer.Option("--forecast", help="Compare with the forecast; measures the models first.")
    ] = False,
    newest: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the newest N runs. \\[default: 40]", show_default=False)
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page. \\[default: models and strategies]")] = None,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Write one page about runs: throughput, timeline, memory, traffic, accuracy, plans, commands to reproduce."""
    from stagewright.files.atomic import save_text
    from stagewright.report.page.build import build_report
    from stagewright.report.page.content.runs import MAX_RUNS
    from stagewright.report.page.html import page_html
    from stagewright.runs.choose import choose_run, newest_run

    check_output(output, "-o", "report.html")
    if markdown is not None:
        check_output(markdown, "--markdown", "report.md")
    if figures is not None:
        check_output_folder(figures, "--figures")
        require("matplotlib", "--figures")
    folders = [choose_run(run) for run in runs] if runs else [newest_run().parent]
    forecaster = None
    if forecast:
        from stagewright.api.forecast import Measuring, measure_plan
        from stagewright.cli.screen import SCREEN
        from stagewright.report.page.content.forecast import make_forecaster

        measuring = Measuring(cache=cache_dir or True)
        forecaster = make_forecaster(lambda plan: measure_plan(plan, None, measuring, SCREEN, all_schedules=True))
    built = build_report(folders, title=title, forecaster=forecaster, newest=newest or MAX_RUNS)
    content = page_html(built.page)
    save_text(content, output)
    if markdown is not None:
        from stagewright.report.page.markdown import page_markdown

        save_text(page_markdown(built.page), markdown)
    drawn: list[Path] = []
    if figures is not None:
        from stagewright.report.page.charts.figures import write_figures

        drawn = write_figures(built.page, figures)
    size = len(content.encode("utf-8"))
    if json:
        print_json(
            {
                "page": str(output),
                "bytes": size,
                "title": built.page.title,
                "sections": [section.name for section in built.page.sections],
                "runs": [
                    {"label": run.label, "folder": str(run.folder.path), "status": run.status, "speedup": run.speedup}
                    for run in built.runs
                ],
                "fabric_runs": [str(run.path) for run in built.folders.fabrics],
                "studies": [str(study) for study in built.folders.studies],
                "damaged": list(built.folders.damaged),
                "left_out": built.folders.num_left_out,
                "markdown": None if markdown is None else str(markdown),
                "figures": [str(path) for path in drawn],
            }
        )
        return
    if built.folders.left_out:
        note(built.folders.left_out)
    for reason in built.folders.damaged:
        note(f"skipped: {reason}")
    note(f"{output}: {format_bytes(size)}, {len(built.page.sections)} sections; open it in a browser")
    if markdown is not None:
        note(f"{markdown}: the same in Markdown")
    if drawn:
        note(f"{figures}: {len(drawn)} files of {len(drawn) // 2} figures")
