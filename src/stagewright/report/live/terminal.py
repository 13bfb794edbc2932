"""The live page without a browser: the same state, drawn with rich.

2026-11-15-031502-digits-vit-pipeline-2                                                   running
digits-vit on digits, pipeline=2, 1f1b, batch 64 in 8 micro-batches

step 12 of 69   loss 1.234   950 samples/s   bubble 31 %   memory 210 MiB   3.1 s left
━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
 worker   stage   device   does now                       waits    memory
 ■ 0      0       cpu:0    forward, micro-batch 3          12 %   190 MiB
 ■ 1      1       cpu:1    receive, micro-batch 2          31 %   210 MiB

loss   ▇▆▅▅▄▃▃▂▂▁▁  2.31 … 0.87
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stagewright.quantity import format_bytes, format_s
from stagewright.report.palette import color, stage_color

__all__ = ["live_line", "live_view"]

STATUS = {
    "waiting": ("waiting for the run", "dim"),
    "starting": ("starting", "yellow"),
    "running": ("running", "bold blue"),
    "done": ("finished", "bold green"),
    "failed": ("broken", "bold red"),
    "refused": ("refused", "bold yellow"),
    "interrupted": ("interrupted", "bold yellow"),
    "killed": ("killed", "bold red"),
}
_CONDITION = {
    "absent": "not here yet",
    "elsewhere": "can't be seen from here",
    "stopped": "stopped",
    "gone": "its process is gone",
    "ended": "ended",
    "broken": "failed",
    "lost": "lost its connection",
}
_BARS = "▁▂▃▄▅▆▇█"


def live_view(shown: Mapping[str, Any], width: int = 96) -> RenderableType:
    """Everything, as the page shows it."""
    parts: list[RenderableType] = [_head(shown, width)]
    if shown["error"]:
        parts.append(_error(shown["error"]))
    if shown["model"]:
        parts += [Text(""), Text.from_markup("   ".join(_figures(shown)))]
        if shown["total"]:
            parts.append(ProgressBar(total=shown["total"], completed=shown["step"] or 0, width=width))
        parts.append(_workers(shown))
    curve = [point[1] for point in shown["curve"] if point[1] is not None]
    if len(curve) > 1:
        line = Text("loss   ") + Text(sparkline(curve, width - 32), style=color("tone-first"))
        parts.append(line + Text(f"   {curve[0]:.4g} … {curve[-1]:.4g}"))
    return Group(*parts)


def live_line(shown: Mapping[str, Any]) -> str:
    """How far the run is, as one plain line."""
    words = [STATUS[shown["status"]][0]]
    if shown["step"] is not None:
        words += [Text.from_markup(one).plain for one in _figures(shown)]
    elif shown["workers"]:
        doing = sorted({_doing(one) for one in shown["workers"]})
        words += doing[:3]
    if shown["error"]:
        words.append(shown["error"]["text"])
    return f"{shown['name']}: {', '.join(words)}"


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line of blocks; the last value of each column counts."""
    picked = [values[((at + 1) * len(values) - 1) // min(width, len(values))] for at in range(min(width, len(values)))]
    low, high = min(picked), max(picked)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((one - low) * scale)] for one in picked)


def _head(shown: Mapping[str, Any], width: int) -> Table:
    words, style = STATUS[shown["status"]]
    replay = shown.get("replay")
    if replay and replay["at_s"] < replay["length_s"]:
        words, style = f"replay, {format_s(replay['at_s'])} of {format_s(replay['length_s'])}", "bold cyan"
    table = Table.grid(expand=False)
    table.width = width
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    table.add_row(Text(shown["name"], style="bold"), Text(words, style=style))
    table.add_row(Text(_about(shown), style="dim"), "")
    return table


def _about(shown: Mapping[str, Any]) -> str:
    if not shown["model"]:
        return "there is no plan here yet; the view begins with the run"
    batch = f"batch {shown['batch']}"
    batch += f" in {shown['microbatches']} micro-batches" if shown["microbatches"] > 1 else ""
    model = shown["model"] + (f" on {shown['task']}" if shown["task"] else "")
    kind = "" if shown["training"] else "inference"
    return ", ".join(one for one in (model, shown["mesh"], shown["schedule"], batch, kind) if one)


def _error(error: Mapping[str, Any]) -> Text:
    text = Text(f"\n{error['text']}", style="bold red")
    if error["at"]:
        text.append(f"\n  at: {error['at']}", style="default")
    return text


def _figures(shown: Mapping[str, Any]) -> list[str]:
    """The numbers with their names, as markup."""
    found = []
    if shown["step"] is not None:
        found.append(f"step [b]{shown['step']}[/b]" + (f" of {shown['total']}" if shown["total"] else ""))
    if shown["epoch"] and shown["epochs"]:
        found.append(f"epoch {shown['epoch']} of {shown['epochs']}")
    if shown["diverged"]:
        found.append("loss [bold red]not a number[/bold red]")
    elif shown["loss"] is not None:
        found.append(f"loss [b]{shown['loss']:.4g}[/b]")
    if shown["metric_value"] is not None:
        found.append(f"{escape(shown['metric'])} [b]{shown['metric_value']:.4f}[/b]")
    if shown["samples_per_s"] is not None:
        found.append(f"[b]{shown['samples_per_s']:.4g}[/b] samples/s")
    if shown["bubble"] is not None:
        found.append(f"bubble [b]{shown['bubble']:.0%}[/b]")
    if shown["memory_bytes"] is not None:
        found.append(f"{_memory_name(shown)} [b]{format_bytes(shown['memory_bytes'])}[/b]")
    if shown["remaining_s"] is not None:
        found.append(f"[b]{format_s(shown['remaining_s'])}[/b] left")
    elif shown["elapsed_s"] is not None:
        found.append(f"after {format_s(shown['elapsed_s'])}")
    return found


def _workers(shown: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    staged = any(one["pipeline"] for one in shown["workers"])
    replicated = any(one["data"] or one["tensor"] for one in shown["workers"])
    table.add_column("worker")
    if staged:
        table.add_column("stage")
    if replicated:
        table.add_column("replica")
    table.add_column("device")
    table.add_column("does now", min_width=34)
    table.add_column("waits", justify="right")
    table.add_column(_memory_name(shown), justify="right")
    for one in shown["workers"]:
        mark = Text("■ ", style=stage_color(one["stages"][0] if one["stages"] else 0)) + Text(str(one["rank"]))
        row: list[RenderableType] = [mark]
        if staged:
            row.append(", ".join(map(str, one["stages"])))
        if replicated:
            share = f", tensor {one['tensor']}" if any(other["tensor"] for other in shown["workers"]) else ""
            row.append(f"{one['data']}{share}")
        row += [
            escape(one["device"] or "–"),
            Text(_doing(one), style=_style(one)),
            "–" if one["waited"] is None else f"{one['waited']:.0%}",
            "–" if one["memory_bytes"] is None else format_bytes(one["memory_bytes"]),
        ]
        table.add_row(*row)
    return table


def _memory_name(shown: Mapping[str, Any]) -> str:
    """What is counted: on a CPU the whole process, libraries and all; on a GPU what torch has allocated."""
    on_gpu = any((one["device"] or "").startswith("cuda") for one in shown["workers"])
    return "GPU memory" if on_gpu else "process memory"


def _doing(worker: Mapping[str, Any]) -> str:
    condition, action = worker["condition"], worker["action"]
    if condition in ("ended", "absent", "elsewhere"):
        return _CONDITION[condition]
    words = [action or "nothing"] if condition == "working" else [_CONDITION[condition], *([action] if action else [])]
    if worker["microbatch"] is not None:
        words.append(f"micro-batch {worker['microbatch']}")
    if worker["still_s"] is not None:
        words.append(f"for {format_s(worker['still_s'])}")
    return ", ".join(words)


def _style(worker: Mapping[str, Any]) -> str:
    if worker["condition"] in ("broken", "gone", "stopped"):
        return "bold red"
    return "dim" if worker["kind"] in ("wait", "idle") else "default"
