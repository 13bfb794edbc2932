"""The collectives and links in logs of NCCL Inspector, as tables."""

from __future__ import annotations

from stagewright.quantity import format_bytes, format_s
from stagewright.table import Table, number_columns, text_columns
from stagewright.trace.nccl_inspector.compare import InspectorReport

_MAX_ROWS = 30  # in the terminal; all are in --json
_MAX_RANKS = 64


def inspector_tables(report: InspectorReport) -> tuple[Table, ...]:
    """Tabulate the collectives, the ranks of the one that takes most time, and the links."""
    tables = []
    if report.collectives:
        tables += [_collectives(report), _ranks(report)]
    if report.links:
        tables.append(_links(report))
    return tuple(tables)


def _collectives(report: InspectorReport) -> Table:
    shown = report.collectives[:_MAX_ROWS]
    hidden = len(report.collectives) - len(shown)
    return Table(
        title="collectives, most time first",
        columns=(
            *text_columns("communicator", "collective"),
            *number_columns("ranks", "size", "calls", "time", "waiting", "transfer", "GB/s"),
        ),
        rows=tuple(
            (
                entry.name or entry.communicator,
                entry.collective,
                f"{len(entry.ranks)} of {entry.num_ranks}",
                format_bytes(entry.bytes),
                str(entry.num_calls),
                format_s(entry.median_s),
                f"{entry.wait:.0%}",
                format_s(entry.transfer_s),
                f"{entry.bus_bandwidth / 1e9:.2f}",
            )
            for entry in shown
        ),
        notes=(
            "Time: median of all ranks. Waiting: share of it until the last rank joins. GB/s: bus bandwidth without.",
        )
        + ((f"{hidden} more: --json",) if hidden else ()),
    )


def _ranks(report: InspectorReport) -> Table:
    entry = report.collectives[0]
    return Table(
        title=f"{entry.collective} of {format_bytes(entry.bytes)} in {entry.name or entry.communicator}, by rank",
        columns=(
            *number_columns("rank"),
            *text_columns("host", "pid"),
            *number_columns("calls", "time", "waits", "GB/s"),
        ),
        rows=tuple(
            (
                *(str(rank.rank), rank.host, str(rank.pid), str(rank.num_calls)),
                *(format_s(rank.median_s), format_s(rank.wait_s), f"{rank.bus_bandwidth / 1e9:.2f}"),
            )
            for rank in entry.ranks[:_MAX_RANKS]
        ),
    )


def _links(report: InspectorReport) -> Table:
    slowest = sorted(report.links, key=lambda link: link.bandwidth)[:_MAX_ROWS]
    return Table(
        title="point-to-point messages, slowest link first",
        columns=(*text_columns("communicator"), *number_columns("from", "to", "size", "calls", "time", "GB/s")),
        rows=tuple(
            (
                *(link.communicator, str(link.source), str(link.target), format_bytes(link.bytes)),
                *(str(link.num_calls), format_s(link.median_s), f"{link.bandwidth / 1e9:.2f}"),
            )
            for link in slowest
        ),
    )
