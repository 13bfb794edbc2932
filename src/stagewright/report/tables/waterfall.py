"""Why the speed-up is not n, as a table."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from stagewright.quantity import format_s
from stagewright.simulator.what_if import PARTS, Parts

__all__ = ["waterfall_table"]


def waterfall_table(parts: Parts, title: str) -> Table:
    """From n × down to what is reached, a row a part."""
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("", style="bold", no_wrap=True)
    for name in ("time", "of the step", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what it is")
    table.add_row(
        "ideal", format_s(parts.ideal_s), _share(parts.ideal_s, parts), f"{parts.num_devices:.2f} ×", "serial / n"
    )
    for part, (_, lost) in zip(parts.parts, parts.lost_speedup(), strict=True):
        if abs(part.seconds) < 1e-4 * parts.step_s:
            continue
        sign = "+" if part.seconds > 0 else "−"
        table.add_row(
            part.name,
            f"{sign} {format_s(abs(part.seconds))}",
            _share(part.seconds, parts),
            f"{-lost:+.2f} ×".replace("-", "−"),
            PARTS[part.name],
        )
    table.add_row(
        "step", format_s(parts.step_s), "100.0 %", f"{parts.speedup:.2f} ×", f"serial takes {format_s(parts.serial_s)}"
    )
    return table


def _share(seconds: float, parts: Parts) -> str:
    return f"{100 * seconds / parts.step_s:.1f} %".replace("-", "−")
