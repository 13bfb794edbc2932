"""Anybody's model: `package.module:factory`, called without arguments or with those options that it takes by name.

    def tagger(): …                         takes none
    def tagger(num_classes=9): …            is given the number of classes that a task or --num-classes asks for

The factory returns `(module, args)`, `(module, args, kwargs)` or a `zoo.Model`.
The current directory is importable.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from stagewright.errors import StagewrightError, UsageError
from stagewright.user_code import describe, find, one_line
from stagewright.zoo.blueprint import Options
from stagewright.zoo.example import resized
from stagewright.zoo.loss import own_or_stand_in
from stagewright.zoo.model import Batch, Model

_OPTIONS = tuple(one.name for one in fields(Options))
_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

WANTED = "return (module, args), (module, args, kwargs) or a stagewright.zoo.Model"


def build(name: str, options: Options | None = None) -> Model:
    """The model that the factory `name` makes, with its own example batch."""
    chosen = options or Options()
    factory = check_options(name, chosen)
    try:
        made = factory(**{one: getattr(chosen, one) for one in chosen.given()})
    except StagewrightError:
        raise
    except Exception as error:  # anything that a user's code may raise
        raise UsageError(f"the factory {name!r} failed: {one_line(error)}") from error
    return _checked(name, made)


def find_factory(name: str) -> Any:
    """The function called `name`, which must be one that can be called with options alone."""
    found = find(name, "model", "factory")
    if not callable(found) or isinstance(found, nn.Module):
        raise UsageError(
            f"{name!r} is {describe(found)}, not a function; name a function that takes no arguments and let it "
            f"{WANTED}"
        )
    lacking = [one.name for one in _needed(found) if one.name not in _OPTIONS]
    if lacking:
        raise UsageError(
            f"the factory {name!r} can't be called: it takes {', '.join(lacking)}, which nobody gives; let it have "
            f"{'a default' if len(lacking) == 1 else 'defaults'} (options that it may be given: {', '.join(_OPTIONS)})"
        )
    return found


def options_of(factory: Any) -> frozenset[str]:
    """Which options a factory takes by name."""
    parameters = _parameters(factory)
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return frozenset(_OPTIONS)
    by_name = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    return frozenset(by_name & set(_OPTIONS))


def check_options(name: str, options: Options) -> Any:
    """The factory; UsageError where it takes an option that was not given, or not one that was."""
    factory = find_factory(name)
    takes, function = options_of(factory), name.partition(":")[2]
    needed = [one.name for one in _needed(factory) if one.name not in options.given()]
    if needed:
        raise UsageError(
            f"the factory {name!r} needs {needed[0]}, which was not given; add --{needed[0].replace('_', '-')}, or let "
            f"it have a default: def {function}({needed[0]}=…)"
        )
    for one in options.given():
        if one not in takes:
            value = getattr(options, one)
            raise UsageError(
                f"{one}={value!r} is asked for, but the factory {name!r} takes {arguments(factory)}; write "
                f"def {function}({one}={value!r}) and build the model by it, or leave {one} out"
            )
    return factory


def arguments(factory: Any) -> str:
    """What a factory takes, in words."""
    return ", ".join(one.name for one in _parameters(factory)) or "no arguments"


def _parameters(factory: Any) -> list[inspect.Parameter]:
    """Its parameters; none where Python does not tell."""
    try:
        return list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return []


def _needed(factory: Any) -> list[inspect.Parameter]:
    """Those without a default."""
    return [one for one in _parameters(factory) if one.default is one.empty and one.kind not in _MANY]


def _checked(name: str, made: Any) -> Model:
    if isinstance(made, Model):
        return made
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise UsageError(f"the factory {name!r} returned {describe(made)}; let it {WANTED}")
    module, args = made[0], made[1]
    kwargs = made[2] if len(made) == 3 else {}
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        raise UsageError(f"the factory {name!r} returned {describe(args)} as args; they must be a tuple of tensors")
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise UsageError(f"the factory {name!r} returned {describe(kwargs)} as kwargs; they must be a dictionary")
    batch = Batch(args=tuple(args), kwargs=dict(kwargs))
    batch_size, make_example = resized(batch)
    return Model(
        name=name,
        module=module,
        args=batch.args,
        kwargs=batch.kwargs,
        loss=own_or_stand_in,
        batch_size=batch_size,
        make_example=make_example,
        description=f"{type(module).__name__} made by {name}",
    )
