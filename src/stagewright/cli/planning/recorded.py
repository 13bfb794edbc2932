"""``stagewright explain trace*.json``: where a step of a job that we did not start goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.cli.options import check_output
from stagewright.cli.screen import note, print_json, print_lines, print_table
from stagewright.errors import UsageError

if TYPE_CHECKING:
    from stagewright.trace.events import Trace


def explain_recorded(targets: Sequence[str], output: Path | None, as_json: bool) -> None:
    """Explain traces of the PyTorch profiler, one file for each rank, or the stragglers of a table of operations."""
    from stagewright.trace.flight_recorder import is_flight_recorder
    from stagewright.trace.kineto.read import read_profiles
    from stagewright.trace.nccl_inspector.log_file import inspector_logs

    paths = [Path(target) for target in targets]
    logs = {path: inspector_logs(path) for path in paths}
    if any(logs.values()):
        other = next((path for path, logs_of_path in logs.items() if not logs_of_path), None)
        if other is not None:
            raise UsageError(
                f"{other} is no log of NCCL Inspector, but other files are; explain takes one kind at a time"
            )
        if output is not None:
            raise UsageError(f"--output {output} needs traces of the PyTorch profiler, not logs of NCCL Inspector")
        _show_inspector([log for logs_of_path in logs.values() for log in logs_of_path], as_json)
        return
    for path in paths:
        if not path.is_file():
            raise UsageError(f"there is no trace {path}; name the files that torch.profiler wrote, one for each rank")
    if any(path.suffix == ".parquet" for path in paths):
        if len(paths) > 1 or output is not None:
            raise UsageError("explain takes one table of operations (.parquet), without --output")
        _show_stragglers(paths[0], as_json)
        return
    if all(is_flight_recorder(path) for path in paths):
        _show_calls(paths, as_json)
        return
    show_recorded(read_profiles(paths), output, as_json)


def show_recorded(trace: Trace, output: Path | None, as_json: bool) -> None:
    """Print where the median step of a trace goes and what to change; also write the page."""
    from stagewright.report.tables.waterfall import explanation_tables
    from stagewright.trace.stragglers.blame import find_culprit
    from stagewright.trace.stragglers.from_trace import job_of_trace
    from stagewright.trace.waterfall import explain_trace

    if output is not None:
        check_output(output, "-o", "explain.html")
    explanation = explain_trace(trace)
    culprit = find_culprit(job_of_trace(trace)) if len(trace.workers) > 1 else None
    if output is not None:
        from stagewright.files.atomic import save_text
        from stagewright.report.page.html import page_html
        from stagewright.report.waterfall import explanation_page

        save_text(page_html(explanation_page(trace, explanation, culprit)), output)
        note(f"{output}: rank by rank, with the timeline; open it in a browser")
    if as_json:
        print_json({**explanation.to_dict(), "culprit": None if culprit is None else culprit.to_dict()})
        return
    for table in explanation_tables(explanation):
        print_table(table)
    print_lines(explanation.advice)
    if culprit is not None:
        print_lines(culprit.sentence)


def _show_calls(paths: Sequence[Path], as_json: bool) -> None:
    """Print who did not join a collective, called another one, or is late."""
    from stagewright.report.tables.waterfall import calls_table
    from stagewright.trace.flight_recorder import compare_dumps

    calls, findings = compare_dumps(paths)
    if as_json:
        print_json({"findings": [finding.to_dict() for finding in findings]})
        return
    print_table(calls_table(calls))
    equal = "All ranks called the same collectives, none of them clearly later than the others"
    print_lines(*([finding.sentence for finding in findings] or [equal]))


def _show_inspector(paths: Sequence[Path], as_json: bool) -> None:
    """Print the bandwidth and waiting of each collective, and who joins late or is slow."""
    from stagewright.report.tables.inspector import inspector_tables
    from stagewright.trace.nccl_inspector.compare import compare_logs

    report = compare_logs(paths)
    if as_json:
        print_json(report.to_dict())
        return
    for table in inspector_tables(report):
        print_table(table)
    equal = "No rank joins clearly later than the others, and no link is clearly slower"
    print_lines(*([finding.sentence for finding in report.findings] or [equal]))


def _show_stragglers(path: Path, as_json: bool) -> None:
    """Print what stragglers cost in a table of operations, and who they are."""
    from stagewright.report.tables.waterfall import straggler_table
    from stagewright.trace.stragglers.analysis import analyze
    from stagewright.trace.stragglers.operation_table import read_operation_table

    analysis = analyze(read_operation_table(path))
    if as_json:
        print_json(analysis.to_dict())
        return
    print_table(straggler_table(analysis))
    print_lines(analysis.verdict[0].upper() + analysis.verdict[1:])
