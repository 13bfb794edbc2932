"""How much memory a worker's own tensors occupy, by what they are for, and the most it was at once.

    parameters, buffers      the worker's modules
    gradients                of the parameters, from the moment autograd makes them
    optimizer                what the optimiser keeps for each parameter
    activations              what autograd keeps from forward to backward, in forwards and in recomputations
    other                    whatever else is followed, e.g. buffers for messages

Counted by storage, each once: views and tensors saved twice occupy theirs once. Activations are counted when autograd
saves them and given back when it drops them; everything else is walked at ``update``. Not counted: what lives inside an
operation only, and gradients on their way; for these see the process's own peak or, on CUDA, the allocator's.
Counting costs a few µs for each saved tensor, so it happens in a designated step (``tracking``) and costs nothing in
others. ``_top_saved_tensors_default_hooks`` is private to torch and read in this file only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from stagewright.engine.process_memory import process_peak_bytes, reset_process_peak
from stagewright.errors import RunError
from stagewright.quantity import format_bytes

__all__ = ["CATEGORIES", "Category", "MemoryReport", "MemoryTracker", "MemoryUse"]
