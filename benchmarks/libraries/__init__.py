"""Models of libraries other than transformers, for testing capture; a library that is not installed has none."""

from __future__ import annotations

import importlib

from families.family import Family

__all__ = ["load_families"]

_GROUPS = ("diffusion", "x_transformer", "timm_models", "torchvision_models", "medical", "wrapped")


def load_families() -> list[Family]:
    """Return the models of all installed libraries."""
    from libraries.operators import define_missing_operators

    define_missing_operators()
    return [family for group in _GROUPS for family in importlib.import_module(f"libraries.{group}").FAMILIES]
