"""Traces of a run: events on one clock, breakdown of a step, operators, memory, Perfetto export."""
