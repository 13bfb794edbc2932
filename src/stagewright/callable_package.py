"""Let a package be called as the function of the same name.

``stagewright.capture`` is both a package and, for users, the function ``sw.capture(model, example)``. Python binds the
package to that name as soon as any of its modules is imported, so the package itself has to be callable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["make_callable"]


def make_callable(package: str, function: Callable[..., Any]) -> None:
    """Make ``package(...)`` mean ``function(...)``."""

    class CallablePackage(ModuleType):
        """A package that is called as its main function."""

        __call__ = staticmethod(function)

    sys.modules[package].__class__ = CallablePackage
