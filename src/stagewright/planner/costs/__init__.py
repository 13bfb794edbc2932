"""Costs of a model: measured on this machine, interpolated, or computed analytically."""
