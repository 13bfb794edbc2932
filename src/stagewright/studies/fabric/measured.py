"""The runs of the study *fabric*, and whether each diagnosis matches the emulated fault. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stagewright.quantity import parse_rate
from stagewright.studies.framework.phrases import percent

PUBLISHED_S = 0.02
"""Published for these layers on an emulated fabric: often 20 ms and more, with tails up to 4 s and 12 s."""


def measured_runs(
    results: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Yield (model, its name in parts, network, result) of every run that has trials."""
    for model, part_name, network in options["sent"]:
        row = results.get(f"sent-{part_name}-{network}")
        if row is not None and row["trials"]:
            yield model, part_name, network, row


def is_correct(row: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether the diagnosis names the emulated fault and its host."""
    verdict = row["verdict"]
    kind = "lossy-link" if row["made"] == "failing-link" else row["made"]  # both lose packets
    expected = ("none", None) if kind == "clean" else (kind, options["wrong_host"])
    return (verdict["kind"], verdict["rank"]) == expected


def shown_fault(network: str, options: Mapping[str, Any]) -> str:
    """Write the emulated fault with its host: "lossy link of host 2"."""
    host = f"host {options['wrong_host']}"
    plain = {"clean": "no fault", "late-host": f"{host} is late"}
    return plain.get(network, f"{network.replace('-', ' ')} of {host}")


def shown_network(network: str) -> str:
    """Write a network for people: "clean network", "lossy link"."""
    return "clean network" if network == "clean" else network.replace("-", " ")


def shown_rate(text: str) -> str:
    """Write the rate of a link, as an option has it, for people: "1 Gb/s"."""
    bits = 8 * parse_rate(text)
    return f"{bits / 1e9:g} Gb/s" if bits >= 1e9 else f"{bits / 1e6:g} Mb/s"


def shown_loss(text: str) -> str:
    """Write a packet loss, as an option has it, for people: "1 %"."""
    return f"{text.strip().removesuffix('%')} %" if text.strip().endswith("%") else percent(float(text))
