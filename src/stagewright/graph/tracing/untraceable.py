"""What a trace would lose without a word, caught while it happens.

Three things in the code between units leave no mark in a graph: the backward of a custom autograd function, a hook on a
tensor, and a branch on the batch size (the graph has the branch that the example took). The first is refused while
tracing, the second is seen when the model is watched. Branches are noted with their answer, so that a graph can tell
for which batch sizes it holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from stagewright.errors import CaptureError
from stagewright.graph.symbols import answer_at, follows_from_batch

__all__ = ["Branch", "watch_for_hooks", "watched_trace"]

_TORCH = str(Path(torch.__file__).resolve().parent)
_OURS = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True, slots=True)
class Branch:
    """A question about the batch size that the model's own code asked, with the answer that the example gave."""

    question: Any
    """The symbolic condition."""
    answer: bool
    """What it was for the example."""
    place: str
    """File and line."""

    def holds_at(self, batch_size: int) -> bool:
        """Whether another batch size gives the same answer."""
        return answer_at(self.question, batch_size) == self.answer


@contextmanager
def watched_trace() -> Iterator[list[Branch]]:
    """Refuse what a graph can't hold and note branches on the batch size, for the time of a trace."""
    branches: list[Branch] = []
    ask = torch.SymBool.__bool__
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def noted(condition: torch.SymBool) -> bool:
        answer = bool(ask(condition))  # type: ignore[no-untyped-call]
        frame = sys._getframe(1)
        if not _is_library(frame.f_code.co_filename) and follows_from_batch(condition):
            branches.append(Branch(condition.node.expr, answer, f"{frame.f_code.co_filename}:{frame.f_lineno}"))
        return answer

    def refused_function(function: type, *args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "CheckpointFunction":
            raise CaptureError(
                "the model recomputes with reentrant checkpointing; use the form with use_reentrant=False"
            )
        if function.__module__.split(".")[0] != "torch":
            raise CaptureError(
                f"the code between units uses the autograd function {function.__name__}, whose backward is lost"
            )
        return apply(function, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.SymBool, "__bool__", noted))
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(refused_function)))
        yield branches


@contextmanager
def watch_for_hooks(tell: Callable[[], None]) -> Iterator[None]:
    """In a plain run: tell whenever code outside libraries puts a hook on a tensor."""
    original = torch.Tensor.register_hook

    def hooked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_library(sys._getframe(1).f_code.co_filename):
            tell()
        return original(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]

    with mock.patch.object(torch.Tensor, "register_hook", hooked):
        yield


def _is_library(filename: str) -> bool:
    return filename.startswith((_TORCH, _OURS, "<"))
