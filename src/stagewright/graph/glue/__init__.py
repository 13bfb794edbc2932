"""Glue: the tensor operations between units."""
