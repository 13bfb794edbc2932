"""Contexts in which models are built: without output of transformers, and from a seed.

Only the command line prints, and the caller's random number generator is not affected.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and log lines of transformers and its hub client."""
    try:
        from transformers.utils import logging as module
    except ModuleNotFoundError:
        yield
        return
    transformers_logging: Any = module  # ships without annotations

    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars = transformers_logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the block and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
