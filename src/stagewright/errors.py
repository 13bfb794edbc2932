"""Every error that Stagewright raises on purpose, drawn as one tree.

    StagewrightError             anything below; the command line prints its text as one sentence
    ├── UsageError               wrong input: a value, a name, a file                      exit code 2
    │   ├── UnknownName          a name that is not there; offers the nearest ones
    │   ├── CaptureError         the model can't be captured; names the line and the ways out
    │   ├── SplitError           no split satisfies what was asked; says by how much
    │   ├── DataMissing          a data set or weights that are not on this machine; says how to get them
    │   └── CacheError           a cache that can't be read or written
    └── RunError                 the input was right, the run failed                       exit code 1
        └── CorruptMessage       bytes that are not the message which was expected

A message says what was wrong, with both values, where, and a fix that can be pasted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CacheError",
    "CaptureError",
    "CorruptMessage",
    "DataMissing",
    "ModelError",
    "RunError",
    "SplitError",
    "StagewrightError",
    "UnknownName",
    "UsageError",
]


class StagewrightError(Exception):
    """Anything that Stagewright raises on purpose."""

    exit_code = 1


class UsageError(StagewrightError):
    """The input was wrong."""

    exit_code = 2


class UnknownName(UsageError):
    """A name that is not among the known ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        known = list(known)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        if near:
            offer = "did you mean " + " or ".join(repr(one) for one in near) + "?"
        elif len(known) <= 30:
            offer = "known: " + ", ".join(known)
        else:
            offer = f"known: {', '.join(known[:12])}, … ({len(known)} in all)"
        super().__init__(f"unknown {kind} {name!r}; {offer}" + (f" {hint}" if hint else ""))


class CaptureError(UsageError):
    """The model can't be captured as a graph of units."""

    inside: str = ""
    """The module whose own code is the cause, where that is known."""


class ModelError(UsageError, ValueError):
    """The model does not run on what it was given."""


class SplitError(UsageError):
    """No split satisfies what was asked."""


class DataMissing(UsageError):
    """A data set or a folder of weights is not on this machine."""


class CacheError(UsageError):
    """A cache file can't be read or written."""


class RunError(StagewrightError):
    """The input was right, but the run failed."""


class CorruptMessage(RunError):
    """Bytes that came over a link are not the message that was expected."""
