"""Measure the engine's own overheads on this machine."""
