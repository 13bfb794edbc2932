"""What can be told of a model before it is built: whether it is there, takes these options, and has its weights.

    check_name     the catalogue, or a module or a folder of that name; imports neither torch nor anybody's module
    check_model    that, then the user's module is imported and its factory looked at, or a blueprint is drawn

A verb asks before it makes a folder or a process. What only the model itself knows is told when it is built.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.errors import UnknownName, UsageError
from stagewright.user_code import check_module, has_module, is_own
from stagewright.zoo.named import catalog as catalogue
from stagewright.zoo.sources.folder import checked_folder, local_model

if TYPE_CHECKING:
    from stagewright.zoo.blueprint import Blueprint, Options

__all__ = ["check_model", "check_name", "takes_option"]


def check_name(name: str, weights: str | None = None) -> None:
    """UsageError where nothing has this name, or where the folder of weights is not there."""
    head, colon, rest = name.partition(":")
    if head == "hf" and colon:
        local_model(rest)
    elif catalogue.is_factory(name):
        if not is_own(name):  # a number of layers: no module is meant
            families = [f"{one.name}:{rest}" for one in catalogue.ENTRIES if one.default_layers is not None]
            raise UnknownName("model", name, families, hint=f"({catalogue.OTHER_WAYS})")
        check_module(name, "model", "factory")
    elif not colon and "." in name and has_module(name.rpartition(".")[0]):
        module, _, factory = name.rpartition(".")
        raise UsageError(f"unknown model {name!r}; a factory of your own is named with a colon: {module}:{factory}")
    else:
        catalogue.entry_and_layers(name)
    if weights is not None and weights != "random":
        checked_folder(Path(weights).expanduser(), config=False)


def check_model(name: str, weights: str | None, options: Options) -> Blueprint | None:
    """`check_name`, and whether the model takes these options; how it will be built, None where a factory knows."""
    check_name(name, weights)
    head, colon, rest = name.partition(":")
    if head == "hf" and colon:
        from stagewright.zoo.sources import hugging_face as hub

        folder = hub.locate(rest, weights=weights is None)
        if weights is None:
            hub.refuse_weightless(rest, folder)
        return hub.blueprint(rest, folder, options)
    if catalogue.is_factory(name):
        from stagewright.zoo.sources.factory import check_options

        check_options(name, options)
        return None
    entry, layers = catalogue.entry_and_layers(name)
    options.refuse_others(name, entry.options)
    builder = importlib.import_module(f"stagewright.zoo.named.{entry.builder}")
    made: Blueprint = builder.build(entry, options, layers)
    return made


def takes_option(name: str, option: str) -> bool:
    """Whether a model takes an option such as `num_classes`; a user's own module is imported to know."""
    head, colon, _ = name.partition(":")
    if head == "hf" and colon:
        return True  # a classifier is made for any number of classes
    if catalogue.is_factory(name):
        from stagewright.zoo.sources.factory import find_factory, options_of

        return option in options_of(find_factory(name))
    return option in catalogue.entry_and_layers(name)[0].options
