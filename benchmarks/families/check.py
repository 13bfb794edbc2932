"""Check of one family: capture it, run model, graph and stages, and compare their results.

Every run starts from the same seed, the same buffers and a copy of the inputs.
"""

from __future__ import annotations

import logging
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from families.compare import Difference, Run, compare, compare_tensors
from families.family import Arguments, Family
from stagewright import structure
from stagewright.errors import CaptureError, UsageError
from stagewright.graph import UnitGraph, capture

__all__ = ["BATCH_SIZES", "Outcome", "check"]

BATCH_SIZES = (2, 3, 1, 5)
"""The first is that of the example."""
GRADIENT_TOLERANCE = 1e-5
"""Maximum relative error of gradients through a chain of stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one family in one mode with one choice of units."""

    passed: bool
    """Whether everything is equal (or, for a model that can't be captured, the error is the expected one)."""
    reason: str
    """Why not; empty if passed."""
    remark: str
    """What was skipped, and notes of capture."""
    num_calls: int
    """Unit calls in the graph."""
    num_crossing: int
    """Tensors that cross the middle cut."""
    crossing_bytes: int
    """Their bytes, for a batch of two."""
    capture_s: float
    stages_equal: bool
    """Whether gradients through a chain of three stages are bit-identical too."""
    capture_cpu_s: float = 0.0
    """CPU time of capture, which other processes on the machine do not change."""
    step_cpu_s: float = 0.0
    """CPU time of the model itself: forward and, in train mode, backward."""
    refused: bool = False
    """Whether capture refused the model, or its graph another batch size, with an error that names a fix."""


def check(family: Family, *, training: bool, units: str, batch_sizes: Sequence[int] = BATCH_SIZES) -> Outcome:
    """Capture a family's model and compare graph and stages with it."""
    with _quiet():
        try:
            model = family.build().train(training)
            return _check(family, model, units, batch_sizes)
        except Exception as error:  # the sweep continues
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return _failed(f"the model itself fails: {reason}")


def _check(family: Family, model: nn.Module, units: str, batch_sizes: Sequence[int]) -> Outcome:
    args, kwargs = family.example(batch_sizes[0])
    expected, remarks, step_cpu_s = _plain_runs(model, family, batch_sizes)
    before = _copies(model.state_dict())
    modules = [(name, id(module), module.training) for name, module in model.named_modules()]
    start, cpu_start = time.perf_counter(), time.process_time()
    try:
        graph = capture(model, args, kwargs, units)
    except CaptureError as error:
        clear = family.fails is not None and family.fails in str(error)
        text = str(error)
        return _failed("" if clear else text, passed=clear, remark=f"refused: {text}" if clear else "", refused=True)
    except Exception as error:
        return _failed(f"capture raised {type(error).__name__}: {' '.join(str(error).split())}")
    capture_s, capture_cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    stages_equal, refused = True, False
    reason = "" if family.fails is None else f"no error, but an error with {family.fails!r} was expected"
    try:
        compare_tensors("state after capture", before, _copies(model.state_dict()))
        if modules != [(name, id(module), module.training) for name, module in model.named_modules()]:
            raise Difference("capture changed the model's modules")
        for size, plain in expected.items():
            run = _measure(model, graph, family.example(size))
            compare(f"batch {size}", plain, run)
        num_cuts = len(graph.cuts)
        cuts = sorted({num_cuts // 3, 2 * num_cuts // 3})
        chain = _Chain(graph, cuts)
        for size in list(expected)[:2]:
            run = _measure(model, chain, family.example(size))
            stages_equal &= compare(f"stages cut at {cuts}, batch {size}", expected[size], run, GRADIENT_TOLERANCE)
    except Difference as difference:
        reason = str(difference)
    except UsageError as error:  # the graph takes no batch of another size
        reason, refused = str(error), True
    except Exception as error:  # any error of the graph
        reason = f"the graph raised {type(error).__name__}: {' '.join(str(error).split())}"
    middle = graph.cuts[len(graph.cuts) // 2]
    return Outcome(
        passed=not reason,
        reason=reason,
        remark="; ".join([*remarks, *graph.notes]),
        num_calls=len(graph.calls),
        num_crossing=len(middle.crossing),
        crossing_bytes=middle.num_bytes,
        capture_s=capture_s,
        capture_cpu_s=capture_cpu_s,
        step_cpu_s=step_cpu_s,
        stages_equal=stages_equal,
        refused=refused,
    )


def _failed(reason: str, *, passed: bool = False, remark: str = "", refused: bool = False) -> Outcome:
    return Outcome(
        passed=passed,
        reason=reason,
        remark=remark,
        num_calls=0,
        num_crossing=0,
        crossing_bytes=0,
        capture_s=0.0,
        stages_equal=passed,
        refused=refused,
    )


def _plain_runs(
    model: nn.Module, family: Family, batch_sizes: Sequence[int]
) -> tuple[dict[int, Run], list[str], float]:
    """Run the original model; skip a size at which it fails in training itself (batch norm of one value).

    Also return the CPU time of a repeated run at the first size.
    """
    runs: dict[int, Run] = {}
    remarks: list[str] = []
    for size in batch_sizes:
        try:
            runs[size] = _measure(model, model, family.example(size))
        except ValueError as error:
            if not (model.training and size == 1 and "more than 1 value per channel" in str(error)):
                raise
            remarks.append("no batch of 1 in training: batch norm needs more than one value")
    repeated = _measure(model, model, family.example(batch_sizes[0]))
    compare("the model run twice", runs[batch_sizes[0]], repeated)
    return runs, remarks, repeated.cpu_s


def _measure(model: nn.Module, run: Callable[..., Any], arguments: Arguments) -> Run:
    """Run one pass from the same seed and buffers, in train mode with backward; restore the buffers."""
    buffers = _copies(dict(model.named_buffers()))
    args, kwargs = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, arguments)
    model.zero_grad(set_to_none=True)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    try:
        start = time.process_time()
        with torch.set_grad_enabled(model.training):
            output = run(*args, **kwargs)
        leaves, spec = structure.flatten(output)
        if model.training:
            _projection(leaves).backward()  # type: ignore[no-untyped-call]
            if isinstance(run, _Chain):
                run.backward()
        cpu_s = time.process_time() - start
        gradients = {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()
        }
        after = _copies(dict(model.named_buffers()))
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                # A model may register a buffer at its first use, or replace it by one of another size.
                if name in buffers and buffer.shape == buffers[name].shape:
                    buffer.copy_(buffers[name])
        model.zero_grad(set_to_none=True)
    detached = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return Run(leaves=detached, spec=spec, gradients=gradients, buffers=after, cpu_s=cpu_s)


def _projection(leaves: Sequence[Any]) -> torch.Tensor:
    """Return a fixed random projection of all differentiable outputs."""
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros(())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            total = total + (leaf * torch.randn(leaf.shape, generator=generator)).sum()
    return total


class _Chain:
    """The graph as stages with separate backward passes, as on separate workers."""

    def __init__(self, graph: UnitGraph, cuts: Sequence[int]) -> None:
        self.graph = graph
        self.stages = graph.stages(cuts)
        self.crossings: list[tuple[Sequence[Any], Sequence[Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.crossings = []
        received: Sequence[Any] = self.graph.flatten(args, kwargs)
        for stage in self.stages[:-1]:
            sent = stage(*received)
            received = [value.detach().requires_grad_(value.requires_grad) for value in sent]
            self.crossings.append((sent, received))
        return self.graph.unflatten(self.stages[-1](*received))

    def backward(self) -> None:
        """Run the backward passes of all stages before the last, in reverse order."""
        for sent, received in reversed(self.crossings):
            pairs = [pair for pair in zip(sent, received, strict=True) if pair[1].grad is not None]
            torch.autograd.backward([value for value, _ in pairs], [copy.grad for _, copy in pairs])


def _copies(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items() if isinstance(value, torch.Tensor)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and log lines of the models."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
