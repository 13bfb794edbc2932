"""Measure what a forecast needs, search for the best plan, find what fits, and prove it by running."""
