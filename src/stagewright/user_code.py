"""Code of a user's own, named as `package.module:name`: models, codecs, policies.

    shop:tagger   ─► the module, with the current directory importable ─► its attribute
    whatever goes wrong in it is one sentence that ends with the line of the user's code

Nothing here imports torch; the user's module does as it likes.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from stagewright.errors import UnknownName, UsageError

__all__ = ["describe", "find", "is_own", "one_line", "split_name"]

_PACKAGE = str(Path(__file__).parent)


def is_own(name: str) -> bool:
    """Whether a name is that of a user's own: `package.module:name`; a number behind the colon is a setting."""
    _, colon, rest = name.partition(":")
    return bool(colon) and (not rest or rest[0].isalpha() or rest[0] == "_")


def split_name(name: str, role: str) -> tuple[str, str]:
    """Module and name in it; refused where it is a file."""
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise UsageError(f"{name!r} names no {role}; write package.module:{role}")
    if module_name.endswith(".py") or "/" in module_name:
        fixed = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"{module_name!r} is a file, not a module; write {fixed}:{path}")
    return module_name, path


def find(name: str, kind: str, role: str) -> Any:
    """What `name` names; `kind` (model) and `role` (factory) are the words for it in errors."""
    module_name, path = split_name(name, role)
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"no module named {error.name!r} for the {kind} {name!r}; looked in {here!r} "
                "and where Python's packages are"
            ) from None
        raise UsageError(f"the module {module_name!r} does not import: {one_line(error)}") from error
    except Exception as error:  # anything that a user's module may raise at import
        raise UsageError(f"the module {module_name!r} does not import: {one_line(error)}") from error
    holder = module_name
    for part in path.split("."):
        if not hasattr(found, part):
            known = [one for one in dir(found) if not one.startswith("_")]
            raise UnknownName(f"name in {holder!r}", part, known)
        found, holder = getattr(found, part), f"{holder}.{part}"
    return found


def describe(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(one).__name__ for one in value)})"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def one_line(error: BaseException) -> str:
    """An error of a user's code as one line: its class and text, and the last line of theirs that it passed through."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return text
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "importlib" not in one.filename]
    theirs = [one for one in frames if not one.filename.startswith(_PACKAGE) and "/site-packages/" not in one.filename]
    return f"{text} ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else text
