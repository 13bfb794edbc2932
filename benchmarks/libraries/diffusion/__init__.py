"""Models of diffusers: UNets, transformers, autoencoders and control networks, tiny and with random weights."""

from __future__ import annotations

import importlib.util

from families.family import Family
from libraries.diffusion import transformers, unets

__all__ = ["FAMILIES"]

FAMILIES: tuple[Family, ...] = ()
if importlib.util.find_spec("diffusers") is not None:
    FAMILIES = (*unets.FAMILIES, *transformers.FAMILIES)
