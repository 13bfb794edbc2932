"""Calibration: the engine's overheads on this machine, measured once."""
