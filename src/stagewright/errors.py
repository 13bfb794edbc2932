"""The exception tree: every error that Stagewright raises deliberately.

    StagewrightError             base class; the command line prints its message as one sentence
    ├── UsageError               invalid input: a value, a name, a file                    exit code 2
    │   ├── UnknownName          an unknown name; suggests the nearest ones
    │   ├── CaptureError         the model can't be captured; names the line and alternatives
    │   ├── SplitError           no split satisfies the constraints; says by how much
    │   ├── MissingPackage       an optional package is not installed; names the extra
    │   ├── DataMissing          a data set or weights are not on this machine; says how to get them
    │   └── CacheError           a cache file can't be read or written
    ├── RunError                 the input was valid, the run failed                       exit code 1
    │   └── CorruptMessage       received bytes are not the expected message
    └── RunTerminated            SIGTERM ended the command, as Ctrl-C does                 exit code 130

A message says what was wrong, with both values, where, and a fix to paste.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StagewrightError(Exception):
    """Base class of all errors that Stagewright raises deliberately."""

    exit_code = 1


class UsageError(StagewrightError):
    """The input was invalid."""

    exit_code = 2


class UnknownName(UsageError):
    """A name that is not one of the known names."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        known = list(known)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        if near:
            suggestion = "did you mean " + " or ".join(repr(match) for match in near) + "?"
        elif len(known) <= 30:
            suggestion = "known: " + ", ".join(known)
        else:
            suggestion = f"known: {', '.join(known[:12])}, … ({len(known)} in all)"
        super().__init__(f"unknown {kind} {name!r}; {suggestion}" + (f" {hint}" if hint else ""))


class CaptureError(UsageError):
    """The model can't be captured as a graph of units."""

    inside: str = ""
    """The module whose code is the cause, if known."""


class ModelError(UsageError, ValueError):
    """The model fails on its input."""


class SplitError(UsageError):
    """No split satisfies the constraints."""


class MissingPackage(UsageError, ImportError):
    """An optional package is not installed."""


class DataMissing(UsageError):
    """A data set or a folder of weights is not on this machine."""


class CacheError(UsageError):
    """A cache file can't be read or written."""


class RunError(StagewrightError):
    """The input was valid, but the run failed."""


class CorruptMessage(RunError):
    """Bytes received over a link are not the expected message."""


class RunTerminated(StagewrightError):
    """A signal such as SIGTERM ended the command; no RunError, so that no further run begins where one may fail."""

    exit_code = 130
