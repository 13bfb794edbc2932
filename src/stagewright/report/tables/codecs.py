"""Codecs as tables: the available ones, and a benchmark of each on the tensors that cross a cut."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.engine.jobs.codec_bench import CodecBench, CodecRow
from stagewright.quantity import format_bytes
from stagewright.table import Cell, Table, number_columns, text_columns


def list_table(rows: Sequence[tuple[str, str, float]]) -> Table:
    """Tabulate codecs given as name, description and bits per float32 value."""
    return Table(
        columns=(*text_columns("codec"), *number_columns("bits per value"), *text_columns("description", wrap=True)),
        rows=tuple((name, f"{bits:.2f}", description) for name, description, bits in rows),
    )


def format_link(rate: float) -> str:
    """Format a rate in bytes per second as bits per second."""
    bits = rate * 8
    for unit, size in (("Tb/s", 1e12), ("Gb/s", 1e9), ("Mb/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kb/s"


def bench_tables(bench: CodecBench) -> list[Table]:
    """Tabulate each cut and direction; links on which a codec is slower than sending raw tensors are marked."""
    groups: dict[tuple[str, bool], list[CodecRow]] = {}
    for row in bench.rows:
        groups.setdefault((row.cut, row.backward), []).append(row)
    return [_bench_table(bench, cut, backward, rows) for (cut, backward), rows in groups.items()]


def _bench_table(bench: CodecBench, cut: str, backward: bool, rows: Sequence[CodecRow]) -> Table:
    tensors = "gradients" if backward else "activations"
    size = format_bytes(rows[0].cost.raw_bytes)
    copy = rows[0].cost.raw_bytes / rows[0].copy_s / 1e9
    names = ("error", "of fp32", "of bf16", "encode", "decode", "break-even link", *map(format_link, bench.rates))
    return Table(
        title=f"{bench.model}, {tensors} after {cut}: {size} of {bench.dtype}, {bench.device}",
        columns=(*text_columns("codec"), *number_columns(*names)),
        rows=tuple(_bench_row(bench, row) for row in rows),
        notes=(
            f"a plain copy in the same run: {copy:.2f} GB/s; block codecs use {bench.kernels} kernels; link columns "
            "show the transfer speed-up over sending without a codec",
        ),
    )


def _bench_row(bench: CodecBench, row: CodecRow) -> tuple[str | Cell, ...]:
    cost = row.cost
    num_values = cost.raw_bytes / (4 if bench.dtype == "float32" else 2)
    cells: list[str | Cell] = [
        cost.codec,
        f"{cost.error:.4f}",
        f"{cost.num_bytes / num_values / 4:.3f}",
        f"{cost.num_bytes / num_values / 2:.3f}",
        f"{cost.raw_bytes / cost.encode_s / 1e9:.2f} GB/s",
        f"{cost.raw_bytes / cost.decode_s / 1e9:.2f} GB/s",
        format_link(cost.break_even_rate) if cost.break_even_rate else "never",
    ]
    for rate in bench.rates:
        gain = cost.raw_bytes / rate / cost.transfer_s(rate)
        cells.append(f"{gain:.2f}×" if cost.pays_off(rate) else Cell(f"slower {gain:.2f}×", "bad"))
    return tuple(cells)
