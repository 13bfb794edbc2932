"""``stagewright verify``: is a distributed training step the same as the plain model's?"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import Json, check_output, check_output_folder
from stagewright.cli.screen import note, print_json, print_table
from stagewright.errors import RunError, UsageError
from stagewright.quantity import parse_s


def verify(
    baseline: Annotated[
        str,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="The plain model's step on one device, or a folder that --records kept.",
            show_default=False,
        ),
    ],
    candidate: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="The distributed script, as in 'torchrun --nproc-per-node 2 train.py', or a folder of records.",
            show_default=False,
        ),
    ],
    step: Annotated[int, typer.Option(min=0, help="Which step.")] = 0,
    perturbations: Annotated[
        int, typer.Option(min=1, help="Runs of the baseline with perturbed rounding; they give the tolerance.")
    ] = 3,
    time_limit: Annotated[
        str, typer.Option("--time-limit", metavar="TIME", help="Stop after this time; each program.")
    ] = "10min",
    records: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the records here. \\[default: deleted afterwards]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File to write; a page, layer by layer.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare one training step of a distributed script with the plain model's; name the first wrong module and why.

    Both scripts run their step in `with sw.verify(model, step=0):`. Exit code 3 if the steps differ.
    """
    from stagewright.verification.launch import record_baseline, record_candidate

    limit_s = parse_s(time_limit)
    if output is not None:
        check_output(output, "-o", "verify.html")
    if records is not None:
        check_output_folder(records, "--records")
    with ExitStack() as stack:
        folder = records or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stagewright-verify-")))
        expected, recorded = Path(baseline), Path(candidate)
        if not expected.is_dir():
            note(f"baseline: {baseline}, exact, repeated and {perturbations} × with perturbed rounding")
            expected = _empty(folder / "baseline")
            record_baseline(baseline, expected, step=step, num_perturbed=perturbations, timeout_s=limit_s)
        failure = ""
        if not recorded.is_dir():
            note(f"candidate: {candidate}")
            recorded = _empty(folder / "candidate")
            done = record_candidate(candidate, recorded, step=step, timeout_s=limit_s)
            if done.code is None:
                failure = f"the candidate did not end within {limit_s:g} s"
            elif done.code:
                failure = f"the candidate ended with exit code {done.code}"
            if not list(recorded.glob("rank-*.json")):
                lines = "\n".join(done.output.splitlines()[-15:])
                if failure:
                    raise RunError(f"{failure} and recorded no step; the end of its output:\n{lines}")
                raise UsageError(
                    f"the candidate recorded no step {step}; run its step in `with sw.verify(model, step={step}):`"
                )
        if failure:
            note(failure)
        _show(expected, recorded, baseline, candidate, output, json)


def _show(expected: Path, recorded: Path, baseline: str, candidate: str, output: Path | None, as_json: bool) -> None:
    """Compare the records and print the verdict; exit with code 3 where they differ."""
    from stagewright.files.atomic import save_text
    from stagewright.report.page.html import page_html
    from stagewright.report.verification import verdict_page, verdict_table
    from stagewright.verification.diagnosis import diagnose

    verdict = diagnose(expected, recorded)
    if output is not None:
        save_text(page_html(verdict_page(verdict, baseline=baseline, candidate=candidate)), output)
        note(f"{output}: layer by layer; open it in a browser")
    if as_json:
        print_json(verdict.to_dict())
    else:
        print_table(verdict_table(verdict))
        for line in verdict.summary():
            print(line)
    if not verdict.same:
        raise typer.Exit(3)


def _empty(folder: Path) -> Path:
    """Return a folder without the records of an earlier run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
