"""Blocks of the section on stragglers."""

from __future__ import annotations

from measured_figures.markdown import load_record, ms, paragraph, percent, source, table

_FAULTS = {
    "worker": "slow worker: extra compute, or SIGSTOP and SIGCONT",
    "link": "limited bandwidth between the two ranks of a pipeline: a message takes {message_share} of a step",
    "data loader": "data loader that waits for storage: {loading_share} of a step",
    "garbage collector": "garbage collection over a large heap in 4 of 10 steps",
}


def stragglers_real() -> str:
    record = load_record("stragglers_real")
    shares = {name: f"{record[name][0]:g} to {record[name][1]:g}" for name in ("message_share", "loading_share")}
    rows = [
        (
            _FAULTS[row["cause"]].format(**shares),
            f"{row['named']} of {row['trials']}",
            percent(row["median_cost"]),
            percent(row["min_cost"]) if row["min_cost"] > 0 else "none",
        )
        for row in record["causes"]
    ]
    rows.append(("none", f"{record['false_alarms']} false alarms in {record['clean']}", "", ""))
    steps = ", ".join(f"`{mesh}` {ms(seconds)}" for mesh, seconds in record["step_s"].items())
    text = (
        f"{record['named']} of {record['faulty']} faults named. Each verdict is from {record['steps']} recorded steps, "
        f"which took {record['longest_window_s']:.1f} s at most, and an analysis of "
        f"{record['slowest_analysis_s']:.1f} s at most. Median step without a fault: {steps}."
    )
    head = ("fault", "named with rank and cause", "median cost, of the step", "least cost")
    return source("stragglers_real") + "\n" + table(head, rows) + "\n" + paragraph(text)
