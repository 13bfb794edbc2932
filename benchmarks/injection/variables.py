"""Environment variables of a job with a fault."""

from __future__ import annotations

VARIABLE = "STAGEWRIGHT_BENCHMARK_FAULT"
"""The fault, as JSON."""

CLOCK = "STAGEWRIGHT_BENCHMARK_CLOCK"
"""File with the seconds by which the clock has jumped."""
