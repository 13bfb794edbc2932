"""Trace a model with ``torch.export``: each unit is one opaque operator."""
