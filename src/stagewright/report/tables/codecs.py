"""Codecs as tables: what there is, and what each does to what crosses a cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from stagewright.engine.jobs.codec_bench import CodecBench, CodecRow
from stagewright.quantity import format_bytes

__all__ = ["bench_tables", "format_link", "list_table"]


def list_table(rows: Sequence[tuple[str, str, float]]) -> Table:
    """Names, what they are, bits for a value of float32."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("codec", no_wrap=True)
    table.add_column("bits a value", justify="right")
    table.add_column("what it does")
    for name, summary, bits in rows:
        table.add_row(name, f"{bits:.2f}", escape(summary))
    return table


def format_link(rate: float) -> str:
    """A link's rate in bits a second."""
    bits = rate * 8
    for unit, size in (("Tb/s", 1e12), ("Gb/s", 1e9), ("Mb/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kb/s"


def bench_tables(bench: CodecBench) -> list[Table]:
    """A table for each cut and direction; a link on which a codec loses is marked."""
    groups: dict[tuple[str, bool], list[CodecRow]] = {}
    for row in bench.rows:
        groups.setdefault((row.cut, row.backward), []).append(row)
    return [_table(bench, cut, backward, rows) for (cut, backward), rows in groups.items()]


def _table(bench: CodecBench, cut: str, backward: bool, rows: Sequence[CodecRow]) -> Table:
    what = "gradients" if backward else "activations"
    size = format_bytes(rows[0].cost.raw_bytes)
    table = Table(
        title=f"{escape(bench.model)}, {what} after {escape(cut)}: {size} of {bench.dtype}, {escape(bench.device)}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
    )
    table.add_column("codec", no_wrap=True)
    for name in ("error", "of fp32", "of bf16", "encode", "decode", "breaks even at"):
        table.add_column(name, justify="right")
    for rate in bench.rates:
        table.add_column(format_link(rate), justify="right")
    for row in rows:
        cost = row.cost
        values = cost.raw_bytes / (4 if bench.dtype == "float32" else 2)
        cells = [cost.codec, f"{cost.error:.4f}", f"{cost.num_bytes / values / 4:.3f}"]
        cells.append(f"{cost.num_bytes / values / 2:.3f}")
        cells += [f"{cost.raw_bytes / one / 1e9:.2f} GB/s" for one in (cost.encode_s, cost.decode_s)]
        cells.append(format_link(cost.break_even_rate) if cost.break_even_rate else "never")
        for rate in bench.rates:
            gain = cost.raw_bytes / rate / cost.seconds(rate)
            cells.append(f"{gain:.2f}×" if cost.pays(rate) else f"[red]loses[/red] {gain:.2f}×")
        table.add_row(*cells)
    copy = rows[0].cost.raw_bytes / rows[0].copy_s / 1e9
    table.caption = (
        f"a copy in the same run: {copy:.2f} GB/s; block codecs by {bench.kernels}; under a link, how much sooner the "
        "tensors are there than without a codec"
    )
    table.caption_justify = "left"
    return table
