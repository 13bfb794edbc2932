"""Analytic forecasts as tables: where the time of a step goes, and the memory of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagewright.quantity import format_bytes, format_count, format_s
from stagewright.table import Table, number_columns, text_columns

if TYPE_CHECKING:
    from stagewright.analytic.forecast import AnalyticForecast

# What to try where a part of the step is large.
_ADVICE = {
    "compute": "matrix products take most of the step; only more or faster devices shorten it",
    "recompute": "recompute less: selective recomputation, or fewer checkpointed blocks",
    "tensor collectives": "use fewer tensor ranks, or keep them inside a host (the innermost axis)",
    "host": "use larger micro-batches or fewer tensor ranks: the device waits for the host to enqueue kernels",
    "messages": "put neighboring pipeline ranks on one host, or use fewer stages per rank",
    "bubble": "use more micro-batches, fewer pipeline ranks, or interleaved stages",
    "gradient collectives": "accumulate more micro-batches per step, or divide the model over more ranks of a host",
    "optimizer": "divide optimizer states over replicas (ZeRO-1)",
}


def analytic_table(result: AnalyticForecast) -> Table:
    """Tabulate the parts of a step."""
    total = sum(result.parts.values())
    rows = tuple(
        (name, format_s(seconds), f"{100 * seconds / total:.1f} %")
        for name, seconds in sorted(result.parts.items(), key=lambda item: -item[1])
        if seconds > 0
    )
    return Table(
        title=f"step {format_s(result.step_s)} on {result.num_devices} devices, by formulas",
        columns=(*text_columns("part"), *number_columns("time", "share")),
        rows=rows,
    )


def memory_table(result: AnalyticForecast) -> Table:
    """Tabulate the memory of the first, the last and the fullest pipeline rank."""
    fullest = max(result.memory, key=lambda rank: rank.peak_bytes).rank
    shown = sorted({0, fullest, len(result.memory) - 1, *result.ranks_above_limit[:4]})
    limits = result.rank_limits_bytes
    rows = tuple(
        (
            str(rank.rank),
            *(
                format_bytes(value)
                for value in (
                    rank.parameters_bytes,
                    rank.gradients_bytes,
                    rank.optimizer_bytes,
                    rank.activations_bytes,
                    rank.logits_bytes + rank.temporary_bytes + rank.base_bytes,
                    rank.peak_bytes,
                )
            ),
            *((_limit_text(limits[rank.rank]),) if limits else ()),
            rank.largest,
            rank.when,
        )
        for rank in (result.memory[index] for index in shown)
    )
    return Table(
        title="peak memory by pipeline rank",
        columns=(
            *number_columns("rank", "parameters", "gradients", "optimizer", "activations", "other", "peak"),
            *(number_columns("limit") if limits else ()),
            *text_columns("largest", "when"),
        ),
        rows=rows,
    )


def _limit_text(limit: int | None) -> str:
    return "–" if limit is None else format_bytes(limit)


def analytic_summary(result: AnalyticForecast) -> list[str]:
    """Return tokens per second, MFU, the interval and whether it fits."""
    limit = result.memory_limit_bytes
    memory = format_bytes(result.peak_memory_bytes)
    fits = "" if limit is None or result.rank_limits_bytes else f" of {format_bytes(limit)}"
    if result.ranks_above_limit:
        ranks = f" on {len(result.ranks_above_limit)} of {len(result.memory)} pipeline ranks"
        fits += ": does not fit" + (ranks if result.rank_limits_bytes else "")
    kind, price = result.context_attention, result.price_per_million_tokens
    return [
        f"{format_count(result.tokens_per_s)} tokens/s, MFU {100 * result.mfu:.1f} %, peak memory {memory}{fits}",
        f"interval {format_s(result.low_s)} to {format_s(result.high_s)} (4 of 5 measured steps fall inside), from "
        f"{result.source}",
        *([] if kind is None else [f"attention of context parallel ranks: {kind}"]),
        *([] if price is None else [f"a million tokens cost {price:.4g}, at the cluster's price per device and hour"]),
    ]


def analytic_advice(result: AnalyticForecast) -> str:
    """Name the largest loss and what to try."""
    losses = {name: seconds for name, seconds in result.parts.items() if name != "compute"}
    name = max(losses, key=lambda part: losses[part])
    if losses[name] < 0.05 * result.step_s:
        name = "compute"
    return f"Largest loss: {name} ({format_s(result.parts[name])}): {_ADVICE[name]}"
