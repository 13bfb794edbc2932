"""What an attached job achieved, as a table."""

from __future__ import annotations

from stagewright.attachment.summary import AttachedSummary
from stagewright.quantity import format_bytes, format_s
from stagewright.table import Table, number_columns, text_columns


def attached_table(summary: AttachedSummary, title: str) -> Table:
    """Tabulate step time, throughput, MFU, memory, skew and the cost of recording."""
    rows = [("step", format_s(summary.step_s), f"median of {summary.num_steps} steps, {summary.num_ranks} ranks")]
    if summary.samples_per_s:
        rows.append(("samples/s", f"{summary.samples_per_s:.4g}", "all ranks, by the batches of the DataLoader"))
    if summary.tokens_per_s:
        rows.append(("tokens/s", f"{summary.tokens_per_s:.4g}", "all ranks"))
    if summary.flops_per_step and summary.step_s:
        rate = summary.flops_per_step / summary.step_s
        about = "matrix products and attention of rank 0"
        rows.append(("FLOP/s", f"{rate:.3g}", about))
        mfu = "–" if summary.mfu is None else f"{summary.mfu:.1%}"
        rows.append(("MFU", mfu, f"of {summary.device}'s 16-bit peak" if summary.mfu else "peak of the device unknown"))
    rows += [
        ("peak memory", format_bytes(max(summary.peak_memory_bytes)), "of the rank that needs most"),
        ("data loading", f"{summary.loading:.1%}", "of the step, on the rank that waits longest"),
        ("checkpointing", f"{summary.checkpointing:.1%}", "of all steps"),
        ("garbage collection", f"{summary.garbage_collection:.1%}", "of all steps"),
        ("skew", f"{summary.skew:.1%}", "between the slowest and the fastest rank's step"),
        ("recording", f"{summary.recording:.2%}", f"of a step; {format_s(summary.profiling_s)} for all profiles"),
    ]
    columns = (*text_columns("job"), *number_columns("value"), *text_columns("what it is", wrap=True))
    return Table(title=title, columns=columns, rows=tuple(rows))
