"""Splits as tables: one a policy with a row a stage, and a summary with a row a policy."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from stagewright.partition.values import Comparison, Split, StageCost
from stagewright.profiler.profile import StageTime
from stagewright.quantity import format_bytes, format_count, format_s

__all__ = ["split_summary", "split_tables"]

Measured = Sequence[Sequence[StageTime]] | None


def split_tables(comparison: Comparison, measured: Measured = None) -> list[Table]:
    """One table for each split, with measured stage times where there are any; policies that agree share one."""
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for at, split in enumerate(comparison):
        alike.setdefault((split.cuts, split.placement), []).append(at)
    return [
        _split_table(
            comparison[group[0]], [comparison[at].policy for at in group], measured[group[0]] if measured else None
        )
        for group in alike.values()
    ]


def _split_table(split: Split, policies: Sequence[str], times: Sequence[StageTime] | None) -> Table:
    cuts = ", ".join(split.cut_names) or "nothing"
    table = Table(
        title=f"[bold]{escape(', '.join(policies))}[/bold]: cut after {escape(cuts)}",
        caption=_verdict(split),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    several_devices = split.placement != tuple(range(len(split.stages)))
    links = any(stage.link_s for stage in split.stages)
    table.add_column("stage", justify="right")
    if several_devices:
        table.add_column("device", justify="right")
    table.add_column("units")
    for name in ("parameters", "MACs", "forward"):
        table.add_column(name, justify="right")
    if split.training:
        table.add_column("backward", justify="right")
    if times is not None:
        table.add_column("measured", justify="right")
    table.add_column("sends", justify="right")
    if links:
        table.add_column("link", justify="right")
    table.add_column("memory", justify="right")
    for stage in split.stages:
        slowest = stage.busy_s == max(one.busy_s for one in split.stages) and len(split.stages) > 1
        cells = [str(stage.index)]
        if several_devices:
            cells.append(str(stage.device))
        cells += [escape(_units(stage)), format_count(stage.parameters), format_count(stage.macs)]
        cells.append(format_s(stage.forward_s))
        if split.training:
            cells.append(format_s(stage.backward_s))
        if times is not None:
            cells.append(format_s(times[stage.index].total_s))
        cells.append(format_bytes(stage.sends_bytes) if stage.sends_bytes else "–")
        if links:
            cells.append(format_s(stage.link_s) if stage.link_s else "–")
        cells.append(format_bytes(stage.memory_bytes))
        table.add_row(*cells, style="bold" if slowest else None)
    return table


def _units(stage: StageCost) -> str:
    """First and last unit, and how many there are."""
    if len(stage.units) == 1:
        return stage.units[0]
    return f"{stage.units[0]} … {stage.units[-1]} ({len(stage.units)})"


def _verdict(split: Split) -> str:
    """The bottleneck, the balance and what they allow."""
    text = f"bottleneck {format_s(split.bottleneck_s)}, balance {split.balance:.2f}, "
    text += f"speed-up at most {split.speedup_bound:.2f} × {_with(split)}"
    unfit = [device for device in split.devices if not device.fits]
    if unfit:
        device = unfit[0]
        text += (
            f"; does not fit: device {device.device} needs {format_bytes(device.memory_bytes)} "
            f"of {format_bytes(device.memory_limit_bytes or 0)}"
        )
    return text


def _with(split: Split) -> str:
    """How many micro-batches the bound is for."""
    if split.num_microbatches is None:
        return "with an endless stream"
    plural = "es" if split.num_microbatches != 1 else ""
    return f"with {split.num_microbatches} micro-batch{plural}"


def split_summary(comparison: Comparison, measured: Measured = None) -> Table:
    """The policies side by side, the best first."""
    first = comparison[0]
    table = Table(title="side by side", box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("policy", style="bold", no_wrap=True)
    table.add_column("cut after")
    table.add_column("bottleneck", justify="right")
    if measured is not None:
        table.add_column("measured", justify="right")
    table.add_column("balance", justify="right")
    table.add_column(f"speed-up at most, {_with(first)}", justify="right")
    table.add_column("sends in all", justify="right")
    table.add_column("peak memory", justify="right")
    order = sorted(
        range(len(comparison)), key=lambda at: (-comparison[at].speedup_bound, comparison[at].policy != "optimal")
    )
    for at in order:
        split = comparison[at]
        cells = [escape(split.policy), escape(", ".join(split.cut_names)), format_s(split.bottleneck_s)]
        if measured is not None:
            cells.append(format_s(max(time.total_s for time in measured[at])))
        cells += [f"{split.balance:.2f}", f"{split.speedup_bound:.2f} ×"]
        cells += [format_bytes(split.sends_bytes), format_bytes(split.peak_memory_bytes)]
        table.add_row(*cells)
    return table
