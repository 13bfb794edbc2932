"""Checks of a model before it is built: that it exists, supports the options, and has its weights.

    check_name     the catalog, or a module or folder of that name; imports neither torch nor user modules
    check_model    also imports the user's module and checks its factory, or creates the blueprint

Commands run these checks before they create a folder or a process. Other errors appear when the model is built.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.errors import UnknownName, UsageError
from stagewright.plugins import plugins
from stagewright.user_code import check_module, has_module, is_user_defined
from stagewright.zoo.named import catalog
from stagewright.zoo.sources.folder import check_folder, local_model

if TYPE_CHECKING:
    from stagewright.zoo.blueprint import Blueprint, Options


def check_name(name: str, weights: str | None = None) -> None:
    """Raise UsageError if no model has this name, or if the folder of weights does not exist."""
    head, colon, rest = name.partition(":")
    if head == "hf" and colon:
        local_model(rest)
    elif catalog.is_factory(name):
        name = plugins("models").get(name, name)
        if not is_user_defined(name):  # a number of layers, not a module
            families = [f"{entry.name}:{rest}" for entry in catalog.ENTRIES if entry.default_layers is not None]
            raise UnknownName("model", name, families, hint=f"({catalog.OTHER_SOURCES})")
        check_module(name, "model", "factory")
    elif not colon and "." in name and has_module(name.rpartition(".")[0]):
        module, _, factory = name.rpartition(".")
        raise UsageError(f"unknown model {name!r}; write a factory with a colon: {module}:{factory}")
    elif not colon and name not in catalog.names() and (file := Path(f"{name.removesuffix('.py')}.py")).is_file():
        raise UsageError(f"{name!r} is a file; name the function in it that returns the model: {_factories(file)}")
    else:
        catalog.entry_and_layers(name)
    if weights is not None and weights != "random":
        check_folder(Path(weights).expanduser(), config=False)


def _factories(file: Path) -> str:
    """Return how to name the functions of a file of the current folder; reads it without running it."""
    try:
        functions = [node.name for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError):
        functions = []
    public = [name for name in functions if not name.startswith("_")]
    return " or ".join(f"{file.stem}:{name}" for name in (public or ["function"])[:3])


def check_model(name: str, weights: str | None, options: Options) -> Blueprint | None:
    """Check the name and options of a model; return its blueprint, or None for a user's factory."""
    check_name(name, weights)
    head, colon, rest = name.partition(":")
    if head == "hf" and colon:
        from stagewright.zoo.sources import hugging_face as hub

        folder = hub.locate(rest, weights=weights is None)
        if weights is None:
            hub.check_has_weights(rest, folder)
        return hub.blueprint(rest, folder, options)
    if catalog.is_factory(name):
        from stagewright.zoo.sources.factory import check_options

        check_options(name, options)
        return None
    return catalog_blueprint(name, options)[1]


def catalog_blueprint(name: str, options: Options) -> tuple[catalog.Entry, Blueprint]:
    """Return the catalog's entry of a built-in model and its blueprint."""
    entry, layers = catalog.entry_and_layers(name)
    options.check_supported(name, entry.options)
    builder = importlib.import_module(f"stagewright.zoo.named.{entry.builder}")
    return entry, builder.build(entry, options, layers)


def has_option(name: str, option: str) -> bool:
    """Whether a model has an option such as `num_classes`; imports the module of a user's factory."""
    head, colon, _ = name.partition(":")
    if head == "hf" and colon:
        return True  # a classifier can be built for any number of classes
    if catalog.is_factory(name):
        from stagewright.zoo.sources.factory import find_factory, supported_options

        return option in supported_options(find_factory(name))
    return option in catalog.entry_and_layers(name)[0].options
