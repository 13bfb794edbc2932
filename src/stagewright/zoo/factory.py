"""Anybody's model: `package.module:factory`, called without arguments.

The factory returns `(module, args)`, `(module, args, kwargs)` or a `zoo.Model`.
The current directory is importable.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagewright.errors import StagewrightError, UnknownName, UsageError
from stagewright.zoo.example import resized
from stagewright.zoo.loss import mean_square
from stagewright.zoo.model import Batch, Model

WANTED = "return (module, args), (module, args, kwargs) or a stagewright.zoo.Model"


def build(name: str) -> Model:
    """The model that the factory `name` makes, with its own example batch."""
    factory = _find(name)
    try:
        made = factory()
    except StagewrightError:
        raise
    except Exception as error:  # anything that a user's code may raise
        raise UsageError(f"the factory {name!r} failed: {_where(error)}") from error
    return _checked(name, made)


def _find(name: str) -> Any:
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise UsageError(f"{name!r} names no factory; write package.module:factory")
    if module_name.endswith(".py") or "/" in module_name:
        fixed = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"{module_name!r} is a file, not a module; write {fixed}:{path}")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"no module named {error.name!r} for the model {name!r}; looked in {here!r} "
                "and where Python's packages are"
            ) from None
        raise UsageError(f"the module {module_name!r} does not import: {_where(error)}") from error
    except Exception as error:  # anything that a user's module may raise at import
        raise UsageError(f"the module {module_name!r} does not import: {_where(error)}") from error
    holder = module_name
    for part in path.split("."):
        if not hasattr(found, part):
            known = [one for one in dir(found) if not one.startswith("_")]
            raise UnknownName(f"name in {holder!r}", part, known)
        found, holder = getattr(found, part), f"{holder}.{part}"
    if not callable(found) or isinstance(found, nn.Module):
        raise UsageError(
            f"{name!r} is {_kind(found)}, not a function; name a function that takes no arguments and let it {WANTED}"
        )
    return found


def _checked(name: str, made: Any) -> Model:
    if isinstance(made, Model):
        return made
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise UsageError(f"the factory {name!r} returned {_kind(made)}; let it {WANTED}")
    module, args = made[0], made[1]
    kwargs = made[2] if len(made) == 3 else {}
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        raise UsageError(f"the factory {name!r} returned {_kind(args)} as args; they must be a tuple of tensors")
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise UsageError(f"the factory {name!r} returned {_kind(kwargs)} as kwargs; they must be a dictionary")
    batch = Batch(args=tuple(args), kwargs=dict(kwargs))
    batch_size, make_example = resized(batch)
    return Model(
        name=name,
        module=module,
        args=batch.args,
        kwargs=batch.kwargs,
        loss=mean_square,
        batch_size=batch_size,
        make_example=make_example,
        description=f"{type(module).__name__} made by {name}",
        notes=("no loss given: the mean square of the outputs stands in for it",),
    )


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(one).__name__ for one in value)})"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _where(error: BaseException) -> str:
    """An error of a user's code as one line: its class and text, and the last line that it passed through."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return text
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "importlib" not in one.filename]
    own = [one for one in frames if one.filename != __file__ and "/site-packages/" not in one.filename]
    return f"{text} ({own[-1].filename}, line {own[-1].lineno})" if own else text
