"""Attention modules inside units: finding them, and recomputing what they compute between their linear layers."""
