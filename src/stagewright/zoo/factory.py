"""Anybody's model: `package.module:factory`, called without arguments.

The factory returns `(module, args)`, `(module, args, kwargs)` or a `zoo.Model`.
The current directory is importable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stagewright.errors import StagewrightError, UsageError
from stagewright.user_code import describe, find, one_line
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
        raise UsageError(f"the factory {name!r} failed: {one_line(error)}") from error
    return _checked(name, made)


def _find(name: str) -> Any:
    found = find(name, "model", "factory")
    if not callable(found) or isinstance(found, nn.Module):
        raise UsageError(
            f"{name!r} is {describe(found)}, not a function; name a function that takes no arguments and let it "
            f"{WANTED}"
        )
    return found


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
        loss=mean_square,
        batch_size=batch_size,
        make_example=make_example,
        description=f"{type(module).__name__} made by {name}",
        notes=("no loss given: the mean square of the outputs stands in for it",),
    )
