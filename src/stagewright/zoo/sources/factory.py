"""User-defined models: `package.module:factory`, called with the options that it has as parameters.

    def tagger(): …                         no options
    def tagger(num_classes=9): …            gets the number of classes of the task or of --num-classes

The factory returns `(module, args)`, `(module, kwargs)`, `(module, args, kwargs)` or a `zoo.Model`. The current
directory is importable.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from stagewright.errors import StagewrightError, UsageError
from stagewright.plugins import plugins
from stagewright.user_code import describe, find, one_line
from stagewright.zoo.blueprint import Options
from stagewright.zoo.example import resized
from stagewright.zoo.loss import default_loss
from stagewright.zoo.model import Batch, Model

_OPTIONS = tuple(option.name for option in fields(Options))
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

RESULTS = "return (module, args), (module, kwargs), (module, args, kwargs) or a stagewright.zoo.Model"


def build(name: str, options: Options | None = None) -> Model:
    """Build the model of the factory `name`, with its example batch."""
    chosen = options or Options()
    factory = check_options(name, chosen)
    try:
        result = factory(**{option: getattr(chosen, option) for option in chosen.given()})
    except StagewrightError:
        raise
    except Exception as error:  # anything that user code may raise
        raise UsageError(f"the factory {name!r} failed: {one_line(error)}") from error
    return _to_model(name, result)


def find_factory(name: str) -> Any:
    """Import the factory `name` and check that it can be called with options alone."""
    factory = find(plugins("models").get(name, name), "model", "factory")
    if not callable(factory) or isinstance(factory, nn.Module):
        raise UsageError(
            f"{name!r} is {describe(factory)}, not a function; name a function without required arguments and let it "
            f"{RESULTS}"
        )
    missing = [parameter.name for parameter in _required(factory) if parameter.name not in _OPTIONS]
    if missing:
        raise UsageError(
            f"the factory {name!r} can't be called: it requires {', '.join(missing)}; add "
            f"{'a default' if len(missing) == 1 else 'defaults'} (possible options: {', '.join(_OPTIONS)})"
        )
    return factory


def supported_options(factory: Any) -> frozenset[str]:
    """Return the options that a factory has as parameters."""
    parameters = _parameters(factory)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return frozenset(_OPTIONS)
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(_OPTIONS) & {parameter.name for parameter in parameters if parameter.kind in keyword}


def check_options(name: str, options: Options) -> Any:
    """Return the factory; raise UsageError if a required option is missing or a given one is not supported."""
    factory = find_factory(name)
    supported, function = supported_options(factory), name.partition(":")[2]
    required = [parameter.name for parameter in _required(factory) if parameter.name not in options.given()]
    if required:
        raise UsageError(
            f"the factory {name!r} requires {required[0]}, which was not given; add "
            f"--{required[0].replace('_', '-')}, or add a default: def {function}({required[0]}=…)"
        )
    for option in options.given():
        if option not in supported:
            value = getattr(options, option)
            raise UsageError(
                f"{option}={value!r} was given, but the factory {name!r} takes {describe_arguments(factory)}; write "
                f"def {function}({option}={value!r}) and use it in the model, or leave {option} out"
            )
    return factory


def describe_arguments(factory: Any) -> str:
    """List the parameters of a factory for an error message."""
    return ", ".join(parameter.name for parameter in _parameters(factory)) or "no arguments"


def _parameters(factory: Any) -> list[inspect.Parameter]:
    """Return the parameters of a factory; none if Python can't determine them."""
    try:
        return list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return []


def _required(factory: Any) -> list[inspect.Parameter]:
    """Return the parameters without a default."""
    parameters = _parameters(factory)
    return [value for value in parameters if value.default is value.empty and value.kind not in _VARIADIC]


def _to_model(name: str, result: Any) -> Model:
    if isinstance(result, Model):
        return result
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        raise UsageError(f"the factory {name!r} returned {describe(result)}; let it {RESULTS}")
    module, args = result[0], result[1]
    kwargs = result[2] if len(result) == 3 else {}
    if len(result) == 2 and isinstance(args, Mapping):  # such as the batch of a tokenizer
        args, kwargs = (), dict(args)
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        raise UsageError(f"the factory {name!r} returned {describe(args)} as args; they must be a tuple of tensors")
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise UsageError(f"the factory {name!r} returned {describe(kwargs)} as kwargs; they must be a dictionary")
    batch = Batch(args=tuple(args), kwargs=dict(kwargs))
    batch_size, make_example = resized(batch, module)
    return Model(
        name=name,
        module=module,
        args=batch.args,
        kwargs=batch.kwargs,
        loss=default_loss,
        batch_size=batch_size,
        make_example=make_example,
        description=f"{type(module).__name__} from {name}",
    )
