"""Guards against code that a trace would silently lose.

Three things in the code between units leave no trace in a graph: the backward of a custom autograd function, a hook on
a tensor, and a branch on the batch size (the graph contains only the branch of the example). The first is rejected
while tracing, the second is detected in the eager run. Branches are recorded with their outcome, so that a graph knows
for which batch sizes it is valid.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn

from stagewright.errors import CaptureError
from stagewright.graph.symbolic_shapes import depends_only_on_batch, evaluate_condition, is_constant

_TORCH = str(Path(torch.__file__).resolve().parent)
_STAGEWRIGHT = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True, slots=True)
class BatchSizeGuard:
    """A condition on the batch size on which the model branches, with its outcome for the example."""

    condition: Any
    """The symbolic condition."""
    outcome: bool
    """Its value for the example."""
    location: str
    """File and line."""

    def holds_at(self, batch_size: int) -> bool:
        """Whether the condition has the same outcome for another batch size."""
        return evaluate_condition(self.condition, batch_size) == self.outcome


@dataclass(frozen=True, slots=True)
class Guards:
    """What the code between units did with the batch size during a trace."""

    branches: list[BatchSizeGuard] = field(default_factory=list)
    specialized: list[nn.Module] = field(default_factory=list)
    """Modules whose code converted the batch size to a plain number, as in ``[0] * batch_size``."""


@contextmanager
def collect_guards() -> Iterator[Guards]:
    """Record uses of the batch size during a trace, and reject autograd functions whose backward would be lost."""
    guards = Guards()
    evaluate = torch.SymBool.__bool__
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def record_branch(condition: torch.SymBool) -> bool:
        outcome = bool(evaluate(condition))  # type: ignore[no-untyped-call]
        frame = sys._getframe(1)
        if not _is_library(frame.f_code.co_filename) and depends_only_on_batch(condition):
            guards.branches.append(
                BatchSizeGuard(condition.node.expr, outcome, f"{frame.f_code.co_filename}:{frame.f_lineno}")
            )
        return outcome

    def record_conversion(convert: Callable[[torch.SymInt], int]) -> Callable[[torch.SymInt], int]:
        def recorded(size: torch.SymInt) -> int:
            frame = sys._getframe(1)
            if not _is_library(frame.f_code.co_filename) and not is_constant(size):
                module = _running_module(frame)
                if module is not None:
                    guards.specialized.append(module)
            return convert(size)

        return recorded

    def check_function(function: type, *args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "CheckpointFunction":
            raise CaptureError("the model uses reentrant activation checkpointing; use use_reentrant=False")
        if function.__module__.split(".")[0] != "torch":
            raise CaptureError(
                f"the code between units uses the autograd function {function.__name__}, whose backward would be lost"
            )
        return apply(function, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.SymBool, "__bool__", record_branch))
        for name in ("__int__", "__index__"):
            conversion = record_conversion(getattr(torch.SymInt, name))
            stack.enter_context(mock.patch.object(torch.SymInt, name, conversion))
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(check_function)))
        yield guards


@contextmanager
def detect_tensor_hooks(on_hook: Callable[[], None]) -> Iterator[None]:
    """Call ``on_hook`` whenever code outside libraries registers a hook on a tensor."""
    original = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_library(sys._getframe(1).f_code.co_filename):
            on_hook()
        return original(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]

    with mock.patch.object(torch.Tensor, "register_hook", register_hook):
        yield


def _running_module(frame: FrameType | None) -> nn.Module | None:
    """Return the innermost module whose method is on the stack."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back
    return None


def _is_library(filename: str) -> bool:
    return filename.startswith((_TORCH, _STAGEWRIGHT, "<"))
