"""The live page for the terminal: the same snapshot, drawn with rich.

2026-11-15-031502-digits-vit-pipeline-2                                                   running
digits-vit on digits, pipeline=2, 1f1b, batch 64 in 8 micro-batches

step 12 of 69   loss 1.234   950 samples/s   bubble 31 %   memory 210 MiB   3.1 s left
━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
 worker   stage   device   activity                       waiting    memory
 ■ 0      0       cpu:0    forward, micro-batch 3            12 %   190 MiB
 ■ 1      1       cpu:1    receive, micro-batch 2            31 %   210 MiB

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

from stagewright.display import printable
from stagewright.quantity import format_bytes, format_s
from stagewright.report.palette import color, stage_color

STATUS = {
    "waiting": ("waiting for the run", "dim"),
    "starting": ("starting", "yellow"),
    "running": ("running", "bold blue"),
    "done": ("finished", "bold green"),
    "failed": ("failed", "bold red"),
    "refused": ("refused", "bold yellow"),
    "interrupted": ("interrupted", "bold yellow"),
    "killed": ("killed", "bold red"),
}
_CONDITIONS = {
    "absent": "not started",
    "elsewhere": "on another host",
    "stopped": "stopped",
    "gone": "process gone",
    "ended": "ended",
    "broken": "failed",
    "lost": "lost its connection",
}
_BARS = "▁▂▃▄▅▆▇█"


def live_view(shown: Mapping[str, Any], width: int = 96) -> RenderableType:
    """Draw the whole snapshot, as the page shows it."""
    shown = _printable_values(shown)
    parts: list[RenderableType] = [_draw_head(shown, width)]
    if shown["error"]:
        parts.append(Text(f"\n{shown['error']['text']}", style="bold red"))
        if shown["error"]["at"]:
            parts.append(Text(f"  at: {shown['error']['at']}"))
    if shown["model"]:
        parts += [Text(""), Text.from_markup("   ".join(_format_numbers(shown)))]
        if shown["total"]:
            parts.append(ProgressBar(total=shown["total"], completed=shown["step"] or 0, width=width))
        parts.append(_draw_workers(shown))
    losses = [loss for _, loss, _ in shown["curve"] if loss is not None]
    if len(losses) > 1:
        line = Text("loss   ") + Text(sparkline(losses, width - 32), style=color("tone-first"))
        parts.append(line + Text(f"   {losses[0]:.4g} … {losses[-1]:.4g}"))
    return Group(*parts)


def live_line(shown: Mapping[str, Any]) -> str:
    """Summarize the progress of the run in one plain line."""
    words = [STATUS[shown["status"]][0]]
    if shown["step"] is not None:
        words += [Text.from_markup(number).plain for number in _format_numbers(shown)]
    elif shown["workers"]:
        words += sorted({_describe_activity(worker) for worker in shown["workers"]})[:3]
    if shown["error"]:
        words.append(shown["error"]["text"])
    return f"{shown['name']}: {', '.join(words)}"


def _printable_values(value: Any) -> Any:
    """Replace control characters in all texts of a snapshot."""
    if isinstance(value, Mapping):
        return {key: _printable_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable_values(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve as one line of blocks; each column shows its last value."""
    num_columns = min(width, len(values))
    picked = [values[((column + 1) * len(values) - 1) // num_columns] for column in range(num_columns)]
    low, high = min(picked), max(picked)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in picked)


def _draw_head(shown: Mapping[str, Any], width: int) -> Table:
    status, style = STATUS[shown["status"]]
    replay = shown.get("replay")
    if replay and replay["at_s"] < replay["length_s"]:
        status, style = f"replay, {format_s(replay['at_s'])} of {format_s(replay['length_s'])}", "bold cyan"
    table = Table.grid(expand=False)
    table.width = width
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    table.add_row(Text(shown["name"], style="bold"), Text(status, style=style))
    table.add_row(Text(_describe_run(shown), style="dim"), "")
    return table


def _describe_run(shown: Mapping[str, Any]) -> str:
    if not shown["model"]:
        return "no plan yet; the view starts with the run"
    batch = f"batch {shown['batch']}"
    batch += f" in {shown['microbatches']} micro-batches" if shown["microbatches"] > 1 else ""
    model = shown["model"] + (f" on {shown['task']}" if shown["task"] else "")
    mode = "" if shown["training"] else "inference"
    return ", ".join(part for part in (model, shown["mesh"], shown["schedule"], batch, mode) if part)


def _format_numbers(shown: Mapping[str, Any]) -> list[str]:
    """Format the main numbers with their names, as markup."""
    numbers = []
    if shown["step"] is not None:
        numbers.append(f"step [b]{shown['step']}[/b]" + (f" of {shown['total']}" if shown["total"] else ""))
    if shown["epoch"] and shown["epochs"]:
        numbers.append(f"epoch {shown['epoch']} of {shown['epochs']}")
    if shown["diverged"]:
        numbers.append("loss [bold red]NaN or infinite[/bold red]")
    elif shown["loss"] is not None:
        numbers.append(f"loss [b]{shown['loss']:.4g}[/b]")
    if shown["metric_value"] is not None:
        numbers.append(f"{escape(shown['metric'])} [b]{shown['metric_value']:.4f}[/b]")
    if shown["samples_per_s"] is not None:
        numbers.append(f"[b]{shown['samples_per_s']:.4g}[/b] samples/s")
    if shown["bubble"] is not None:
        numbers.append(f"bubble [b]{shown['bubble']:.0%}[/b]")
    if shown["memory_bytes"] is not None:
        numbers.append(f"{_memory_name(shown)} [b]{format_bytes(shown['memory_bytes'])}[/b]")
    if shown["remaining_s"] is not None:
        numbers.append(f"[b]{format_s(shown['remaining_s'])}[/b] left")
    elif shown["elapsed_s"] is not None:
        numbers.append(f"after {format_s(shown['elapsed_s'])}")
    return numbers


def _draw_workers(shown: Mapping[str, Any]) -> Table:
    workers = shown["workers"]
    has_stages = any(worker["pipeline"] for worker in workers)
    has_replicas = any(worker["data"] or worker["tensor"] for worker in workers)
    has_tensor = any(worker["tensor"] for worker in workers)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("worker")
    if has_stages:
        table.add_column("stage")
    if has_replicas:
        table.add_column("replica")
    table.add_column("device")
    table.add_column("activity", min_width=34)
    table.add_column("waiting", justify="right")
    table.add_column(_memory_name(shown), justify="right")
    for worker in workers:
        stages = worker["stages"]
        row: list[RenderableType] = [
            Text("■ ", style=stage_color(stages[0] if stages else 0)) + Text(str(worker["rank"]))
        ]
        if has_stages:
            row.append(", ".join(map(str, stages)))
        if has_replicas:
            row.append(f"{worker['data']}" + (f", TP rank {worker['tensor']}" if has_tensor else ""))
        row += [
            escape(worker["device"] or "–"),
            Text(_describe_activity(worker), style=_activity_style(worker)),
            "–" if worker["waited"] is None else f"{worker['waited']:.0%}",
            "–" if worker["memory_bytes"] is None else format_bytes(worker["memory_bytes"]),
        ]
        table.add_row(*row)
    return table


def _memory_name(shown: Mapping[str, Any]) -> str:
    """Name what is counted: on a CPU the whole process with its libraries, on a GPU what torch has allocated."""
    on_gpu = any((worker["device"] or "").startswith("cuda") for worker in shown["workers"])
    return "GPU memory" if on_gpu else "process memory"


def _describe_activity(worker: Mapping[str, Any]) -> str:
    condition, action = worker["condition"], worker["action"]
    if condition in ("ended", "absent", "elsewhere"):
        return _CONDITIONS[condition]
    words = [action or "idle"] if condition == "working" else [_CONDITIONS[condition], *([action] if action else [])]
    if worker["microbatch"] is not None:
        words.append(f"micro-batch {worker['microbatch']}")
    if worker["still_s"] is not None:
        words.append(f"for {format_s(worker['still_s'])}")
    return ", ".join(words)


def _activity_style(worker: Mapping[str, Any]) -> str:
    if worker["condition"] in ("broken", "gone", "stopped"):
        return "bold red"
    return "dim" if worker["kind"] in ("wait", "idle") else "default"
