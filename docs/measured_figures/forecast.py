"""Blocks of docs/forecast.md."""

from __future__ import annotations

from typing import Any

from measured_figures.markdown import load_record, mib, ms, paragraph, percent, signed, source, table

_WORDS = {"recomputed": "activation checkpointing", "sharded": "FSDP"}  # words of earlier records


def plan_name(plan: dict[str, Any]) -> str:
    return ", ".join(_WORDS.get(word, word) for word in plan["plan"].split(", "))


def forecast_accuracy() -> str:
    return _accuracy_table("forecast_accuracy")


def forecast_accuracy_more() -> str:
    return _accuracy_table("forecast_accuracy_more")


def forecast_accuracy_unsteady() -> str:
    return source("forecast_accuracy_unsteady") + "\n" + _error_summary(load_record("forecast_accuracy_unsteady"))


def _accuracy_table(name: str) -> str:
    record = load_record(name)
    rows = [
        (
            plan_name(plan),
            ms(plan["forecast_s"]),
            ms(plan["measured_s"]),
            signed(plan["forecast_s"] / plan["measured_s"] - 1),
            signed(plan["forecast_unpaired_s"] / plan["measured_s"] - 1),
            signed(plan["forecast_memory_bytes"] / plan["measured_memory_bytes"] - 1),
        )
        for plan in record["plans"]
    ]
    head = ("plan", "forecast", "measured", "paired error", "unpaired error", "memory error")
    return source(name) + "\n" + table(head, rows, right=True) + "\n" + _error_summary(record)


def _error_summary(record: dict[str, Any]) -> str:
    spreads = [max(plan["unpaired_s"]) / min(plan["unpaired_s"]) - 1 for plan in record["plans"]]
    assert all(plan["equal"] for plan in record["plans"])
    return paragraph(
        f"**Mean error {percent(record['mean_error'], 1)}, worst {percent(record['worst_error'], 1)}** over "
        f"{len(record['plans'])} plans (of medians {percent(record['mean_error_of_medians'], 1)} and "
        f"{percent(record['worst_error_of_medians'], 1)}); unpaired {percent(record['mean_error_unpaired'], 1)} and "
        f"{percent(record['worst_error_unpaired'], 1)}. Unpaired forecasts of one plan vary by "
        f"{percent(min(spreads))} to {percent(max(spreads))} between turns. Memory is the peak of the worker with the "
        "highest one, counted over its own tensors."
    )


def forecast_memory_cuda() -> str:
    return _memory_table("forecast_memory_cuda")


def forecast_memory_cuda_again() -> str:
    return _memory_table("forecast_memory_cuda_again")


def _memory_table(name: str) -> str:
    rows = [
        (
            plan_name(plan),
            mib(plan["forecast_memory_bytes"]),
            mib(plan["measured_memory_bytes"]),
            signed(plan["forecast_memory_bytes"] / plan["measured_memory_bytes"] - 1),
        )
        for plan in load_record(name)["plans"]
        if plan["equal"]
    ]
    return source(name) + "\n" + table(("plan", "forecast", "measured", "error"), rows, right=True)


def forecast_speed() -> str:
    columns = ("first_processor_s", "processor_s")
    rows = [(row["what"], *(f"{row[name]:.2g} s" for name in columns)) for row in load_record("forecast_speed")["rows"]]
    titles = ("simulation", "processor time of the first call", "median of the next")
    return source("forecast_speed") + "\n" + table(titles, rows, right=True)
