"""User-defined models, codecs and policies, named as `package.module:name`.

    shop:tagger   ─► the module, with the current directory importable ─► its attribute

The standard library comes before the current directory, so that a file called profile.py or queue.py can't replace a
module that libraries import. An error in user code becomes one sentence that ends with its line. Nothing here imports
torch.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from pathlib import Path
from typing import Any

from stagewright.errors import UnknownName, UsageError

_PACKAGE = str(Path(__file__).parent)


def is_user_defined(name: str) -> bool:
    """Whether a name has the form `package.module:name`; a number after the colon is a setting."""
    _, colon, rest = name.partition(":")
    return bool(colon) and (not rest or rest[0].isalpha() or rest[0] == "_")


def split_name(name: str, role: str) -> tuple[str, str]:
    """Split a name into module and attribute; a file name is refused."""
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise UsageError(f"{name!r} names no {role}; write package.module:{role}")
    if module_name.endswith(".py") or "/" in module_name:
        fixed = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"{module_name!r} is a file, not a module; write {fixed}:{path}")
    if not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise UsageError(f"{name!r} is not a name in a module; write package.module:{role}")
    return module_name, path


def check_module(name: str, kind: str, role: str) -> None:
    """Raise UsageError where the module does not exist; it is not imported, but its parent package is."""
    module_name, _ = split_name(name, role)
    if not has_module(module_name):
        raise _no_module(name, module_name, kind)


def has_module(module_name: str) -> bool:
    """Whether a module exists here or is installed; it is not imported, but its parent package is."""
    make_importable()
    try:
        return module_name in sys.modules or importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError as error:
        return error.name is None or not f"{module_name}.".startswith(f"{error.name}.")
    except (Exception, SystemExit):  # raised by the parent package: reported when it is imported
        return True


def find(name: str, kind: str, role: str) -> Any:
    """Import what `name` refers to; `kind` (model) and `role` (factory) are used in errors."""
    module_name, path = split_name(name, role)
    make_importable()
    _check_shadowing(name, module_name, kind)
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise _no_module(name, error.name, kind) from None
        raise _broken(name, module_name, kind, error) from error
    except (Exception, SystemExit) as error:  # anything that a user's module may raise at import
        raise _broken(name, module_name, kind, error) from error
    file, holder = getattr(value, "__file__", None), module_name
    for part in path.split("."):
        if not hasattr(value, part):
            where = f"{holder!r}, {file}" if file else repr(holder)
            hint = f"(for the {kind} {name!r}, in {where})"
            raise UnknownName(role.lower(), part, _names_in(value, holder), hint=hint)
        value, holder = getattr(value, part), f"{holder}.{part}"
    return value


def make_importable() -> None:
    """Make modules of the current directory importable, also those written a moment ago."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(_after_standard_library(), here)
    importlib.invalidate_caches()


def _after_standard_library() -> int:
    """Return the position on the path after the standard library and before installed packages."""
    standard = Path(os.__file__).parent
    folders = (standard, standard / "lib-dynload")
    return max((index + 1 for index, entry in enumerate(sys.path) if Path(entry) in folders), default=0)


def _check_shadowing(name: str, module_name: str, kind: str) -> None:
    """Refuse a file of the current directory that has the name of a module of the standard library."""
    top = module_name.partition(".")[0]
    here = [path for path in (Path.cwd() / f"{top}.py", Path.cwd() / top / "__init__.py") if path.is_file()]
    if top in sys.stdlib_module_names and here:
        raise UsageError(
            f"{here[0]} has the name of Python's own module {top!r}, so it can't be imported for the {kind} {name!r}; "
            f"rename it, like my_{top}"
        )


def _no_module(name: str, missing: str, kind: str) -> UsageError:
    """Say where the module was searched, and suggest the nearest one in the current directory."""
    here = Path.cwd()
    known = [module.name for module in pkgutil.iter_modules([str(here)])]
    near = difflib.get_close_matches(missing, known, n=1, cutoff=0.6)
    offer = (
        f"did you mean {near[0]}:{name.partition(':')[2]}?" if near else "change to its folder, or install its package"
    )
    return UsageError(
        f"no module named {missing!r} for the {kind} {name!r}; searched {str(here)!r} and the installed "
        f"packages: {offer}"
    )


def _broken(name: str, module_name: str, kind: str, error: BaseException) -> UsageError:
    return UsageError(
        f"the module {module_name!r} does not import: {one_line(error)}; fix it to load the {kind} {name!r}; "
        f"test with: python -c 'import {module_name}'"
    )


def _names_in(holder: Any, module_name: str) -> list[str]:
    """List the callables defined in a module; all public names where there are none."""
    public = [name for name in dir(holder) if not name.startswith("_")]
    values = {name: getattr(holder, name, None) for name in public}
    defined = [name for name, value in values.items() if callable(value) and _module_of(value) == module_name]
    return defined or public


def _module_of(value: Any) -> str | None:
    """Return the module that defines a value."""
    module = getattr(value, "__module__", None)
    return module if isinstance(module, str) else None


def describe(value: Any) -> str:
    """Describe a value by its type."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(item).__name__ for item in value)})"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def one_line(error: BaseException) -> str:
    """Format an error in user code as one line: class, text, and the last line of user code in its traceback."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return text
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    user_frames = [
        frame for frame in frames if not frame.filename.startswith(_PACKAGE) and "/site-packages/" not in frame.filename
    ]
    return f"{text} ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else text
