"""Tensor parallelism: split layers of transformer blocks."""
