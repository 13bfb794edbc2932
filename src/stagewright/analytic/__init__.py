"""Forecasts from formulas: kernels, collectives and memory of a transformer on hardware that is not at hand."""
