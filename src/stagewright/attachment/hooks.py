"""Hooks in torch and Python that observe a training loop without changing it.

    Optimizer.step      ends a step            torch's global optimizer hooks
    DataLoader          time, batch size       its iterator's __next__
    torch.save          checkpointing          the function
    gc                  garbage collection     gc.callbacks

Private interface of torch, used here only: ``_BaseDataLoaderIter.__next__``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import dataloader

from stagewright.trace.kineto.profile_file import CHECKPOINT_SPAN, GC_SPAN


class Listener(Protocol):
    """What receives the events of the hooks."""

    def optimizer_stepped(self, optimizer: Optimizer) -> None: ...

    def batch_loading(self) -> None: ...

    def batch_loaded(self, seconds: float, batch: Any) -> None: ...

    def checkpoint_saved(self, seconds: float) -> None: ...

    def garbage_collected(self, seconds: float) -> None: ...


def install(listener: Listener) -> ExitStack:
    """Install the hooks; close the returned stack to remove them."""
    stack = ExitStack()
    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: listener.optimizer_stepped(optimizer))
    stack.callback(handle.remove)
    _replace(stack, dataloader._BaseDataLoaderIter, "__next__", _timed_next(listener))
    _replace(stack, torch, "save", _timed_save(listener))
    on_collect = _CollectionTimer(listener)
    gc.callbacks.append(on_collect)
    stack.callback(gc.callbacks.remove, on_collect)
    return stack


def _replace(stack: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    stack.callback(setattr, owner, name, original)


def _timed_next(listener: Listener) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def __next__(self: Any) -> Any:
            listener.batch_loading()
            begin_s = time.perf_counter()
            batch = original(self)
            listener.batch_loaded(time.perf_counter() - begin_s, batch)
            return batch

        return __next__

    return wrap


def _timed_save(listener: Listener) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def save(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.perf_counter()
            with torch.profiler.record_function(CHECKPOINT_SPAN):
                result = original(*args, **kwargs)
            listener.checkpoint_saved(time.perf_counter() - begin_s)
            return result

        return save

    return wrap


class _CollectionTimer:
    """Called by Python before and after each garbage collection."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._begin_s: float | None = None
        self._span: Any = None

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info.get("generation") == 0:
            return  # frequent and short
        if phase == "start":
            self._begin_s = time.perf_counter()
            self._span = torch.profiler.record_function(GC_SPAN)
            self._span.__enter__()
        elif self._begin_s is not None:
            self._span.__exit__(None, None, None)
            self._listener.garbage_collected(time.perf_counter() - self._begin_s)
            self._begin_s = self._span = None


def batch_size(batch: Any) -> tuple[int, int]:
    """Return the samples and tokens of a batch: the rows of its first tensor, and the size of integer matrices."""
    tensors = _tensors(batch, 0)
    if not tensors:
        return 0, 0
    ids = [tensor for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point()]
    samples = int(tensors[0].shape[0]) if tensors[0].dim() else 1
    return samples, max((int(tensor.numel()) for tensor in ids), default=0)


def _tensors(value: Any, depth: int) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if depth > 3:
        return []
    items = value.values() if hasattr(value, "values") and callable(value.values) else value
    if isinstance(items, str | bytes) or not hasattr(items, "__iter__"):
        return []
    return [tensor for item in items for tensor in _tensors(item, depth + 1)]
