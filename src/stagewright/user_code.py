"""Code of a user's own, named as `package.module:name`: models, codecs, policies.

    shop:tagger   ─► the module, with the current directory importable ─► its attribute
    whatever goes wrong in it is one sentence that ends with the line of the user's code

Nothing here imports torch; the user's module does as it likes.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from pathlib import Path
from typing import Any

from stagewright.errors import UnknownName, UsageError

__all__ = ["check_module", "describe", "find", "has_module", "is_own", "one_line", "split_name"]

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


def check_module(name: str, kind: str, role: str) -> None:
    """UsageError where there is no module of that name; it is looked for, not imported (what contains it is)."""
    module_name, _ = split_name(name, role)
    if not has_module(module_name):
        raise _no_module(name, module_name, kind)


def has_module(module_name: str) -> bool:
    """Whether there is such a module here or among Python's packages; it is not imported, what contains it is."""
    _make_importable()
    try:
        return module_name in sys.modules or importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError as error:
        return error.name is None or not f"{module_name}.".startswith(f"{error.name}.")
    except Exception:  # of the package around it: told when it is imported
        return True


def find(name: str, kind: str, role: str) -> Any:
    """What `name` names; `kind` (model) and `role` (factory) are the words for it in errors."""
    module_name, path = split_name(name, role)
    _make_importable()
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise _no_module(name, error.name, kind) from None
        raise _broken(name, module_name, kind, error) from error
    except Exception as error:  # anything that a user's module may raise at import
        raise _broken(name, module_name, kind, error) from error
    file, holder = getattr(found, "__file__", None), module_name
    for part in path.split("."):
        if not hasattr(found, part):
            where = f"{holder!r}, {file}" if file else repr(holder)
            hint = f"(for the {kind} {name!r}, in {where})"
            raise UnknownName(role.lower(), part, _own_names(found, holder), hint=hint)
        found, holder = getattr(found, part), f"{holder}.{part}"
    return found


def _make_importable() -> None:
    """The current directory's modules can be imported, also those that were written a moment ago."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()


def _no_module(name: str, missing: str, kind: str) -> UsageError:
    """Says where it was looked for, and offers the nearest module of the current directory."""
    here = Path.cwd()
    known = [one.name for one in pkgutil.iter_modules([str(here)])]
    near = difflib.get_close_matches(missing, known, n=1, cutoff=0.6)
    offer = f"did you mean {near[0]}:{name.partition(':')[2]}?" if near else "go to its folder, or install its package"
    return UsageError(
        f"no module named {missing!r} for the {kind} {name!r}; looked in {str(here)!r} and where Python's packages "
        f"are: {offer}"
    )


def _broken(name: str, module_name: str, kind: str, error: BaseException) -> UsageError:
    return UsageError(
        f"the module {module_name!r} does not import: {one_line(error)}; mend it, so that the {kind} {name!r} can be "
        f"found: python -c 'import {module_name}'"
    )


def _own_names(holder: Any, module_name: str) -> list[str]:
    """What can be called and was written there; all that is public where nothing was."""
    public = [one for one in dir(holder) if not one.startswith("_")]
    values = {one: getattr(holder, one, None) for one in public}
    own = [one for one, value in values.items() if callable(value) and _home(value) == module_name]
    return own or public


def _home(value: Any) -> str | None:
    """The module where it was written."""
    found = getattr(value, "__module__", None)
    return found if isinstance(found, str) else None


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
