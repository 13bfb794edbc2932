"""Silence while transformers builds and loads: only the command line prints.

Also the seeded construction of a module that leaves the caller's random numbers as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no log lines of transformers and its hub inside; as before afterwards."""
    from transformers.utils import logging as module

    transformers_logging: Any = module  # ships without annotations

    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [one.level for one in loggers]
    bars = transformers_logging.is_progress_bar_enabled()
    for one in loggers:
        one.setLevel(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's CPU random numbers start from `seed` inside and go on as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
