"""From a name to a model: the catalogue, `hf:…`, or `package.module:factory`.

Random weights come from a seed of their own: the caller's random numbers go on as if nothing had been built.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from stagewright.errors import UsageError
from stagewright.zoo import example, loss
from stagewright.zoo.blueprint import Blueprint, Options
from stagewright.zoo.model import Batch, ImageInput, Model, TextInput
from stagewright.zoo.named import catalog as catalogue
from stagewright.zoo.quiet import quiet_transformers, seeded
from stagewright.zoo.sources import factory
from stagewright.zoo.sources import hugging_face as hub
from stagewright.zoo.sources.folder import checked_folder
from stagewright.zoo.sources.weights import (
    load_pretrained,
    load_state,
    normalised,
    read_config,
    refuse_other_size,
)

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What was asked of `load`, checked."""

    name: str
    """The name as typed."""
    batch: int | None
    """Size of the example batch."""
    weights: Path | None
    """A folder of safetensors."""
    random_weights: bool
    """Whether weights that come with the model are to be left alone."""
    seed: int
    """Of the random weights and of the example batch."""
    options: Options
    """Sizes that the model may take."""
    dtype: torch.dtype | None
    """Type of parameters and inputs; None: float32, or what a user's factory chose."""


def load(
    name: str,
    *,
    batch: int | None = None,
    weights: str | Path | None = None,
    seed: int = 0,
    image_size: int | None = None,
    sequence_length: int | None = None,
    num_classes: int | None = None,
    padded: bool | None = None,
    dtype: torch.dtype | str | None = None,
) -> Model:
    """The model called `name`: in the catalogue, `hf:org/name`, `hf:/a/folder` or `package.module:factory`.

    `batch` is the size of the example batch. `weights` is a local folder of safetensors, or "random" to leave
    an `hf:` model's own weights alone. `padded` gives texts of different lengths with an attention mask.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UsageError(f"the seed must be a whole number from 0 to {2**32 - 1}, not {seed!r}")
    if batch is not None:
        example.checked_batch_size(batch)
    request = _Request(
        name=name,
        batch=batch,
        weights=None if weights is None or str(weights) == "random" else Path(weights).expanduser(),
        random_weights=str(weights) == "random",
        seed=seed,
        options=Options(image_size=image_size, sequence_length=sequence_length, num_classes=num_classes, padded=padded),
        dtype=_dtype(dtype),
    )
    head, _, rest = name.partition(":")
    if head == "hf":
        model = _from_hub(rest, request)
    elif catalogue.is_factory(name):
        model = _from_factory(request)
    else:
        model = _from_catalogue(request)
    if not any(True for _ in model.module.parameters()):
        raise UsageError(f"the model {name!r} has no parameters, so there is nothing to train or to place")
    return model


def _from_catalogue(request: _Request) -> Model:
    entry, layers = catalogue.entry_and_layers(request.name)
    request.options.refuse_others(request.name, entry.options)
    builder = importlib.import_module(f"stagewright.zoo.named.{entry.builder}")
    blueprint: Blueprint = builder.build(entry, request.options, layers)
    notes: tuple[str, ...] = ()
    with seeded(request.seed), quiet_transformers():
        if request.weights is None:
            module = blueprint.make(blueprint.config)
        elif blueprint.config is None:
            module = blueprint.make(None)
            load_state(module, request.weights)
        else:
            module, blueprint, notes = _with_weights(request, blueprint, request.weights)
    return _assemble(request, module, blueprint, entry.default_batch, entry.description, notes)


def _with_weights(
    request: _Request, blueprint: Blueprint, folder: Path
) -> tuple[nn.Module, Blueprint, tuple[str, ...]]:
    """The named model with the folder's weights and details; its sizes must be those of the name."""
    name, options = request.name, request.options
    config = read_config(checked_folder(folder, config=True))
    named = blueprint.config
    if config.model_type != named.model_type:
        raise UsageError(
            f"the weights in {str(folder)!r} are of a {config.model_type!r} model, but {name!r} is "
            f"{named.model_type!r}; load them as 'hf:{folder}'"
        )
    inputs = blueprint.inputs
    if isinstance(inputs, ImageInput):
        if options.image_size is not None:
            config.image_size = options.image_size
        size = getattr(config, "image_size", inputs.size)
        named.image_size = size
        inputs = normalised(dataclasses.replace(inputs, size=options.image_size or size), folder)
    else:
        inputs = dataclasses.replace(inputs, tokenizer=hub.tokenizer_folder(folder))
    if blueprint.num_classes is not None:
        config.num_labels = named.num_labels = options.num_classes or config.num_labels
    with torch.device("meta"):
        refuse_other_size(name, blueprint.make(config), blueprint.make(named), folder)
    module, notes = load_pretrained(blueprint.make, config, folder)
    num_classes = config.num_labels if blueprint.num_classes is not None else None
    return (
        module,
        dataclasses.replace(blueprint, config=config, inputs=inputs, num_classes=num_classes),
        notes,
    )


def _from_hub(reference: str, request: _Request) -> Model:
    own_weights = request.weights is None and not request.random_weights
    folder = hub.locate(reference, weights=own_weights)
    blueprint = hub.blueprint(reference, folder, request.options)
    notes: tuple[str, ...] = ()
    with seeded(request.seed), quiet_transformers():
        if request.random_weights:
            module = blueprint.make(blueprint.config)
        else:
            if own_weights:
                hub.refuse_weightless(reference, folder)
            source = checked_folder(request.weights, config=False) if request.weights else folder
            module, notes = load_pretrained(blueprint.make, blueprint.config, source)
    return _assemble(request, module, blueprint, 4, f"{type(module).__name__} from {reference}", notes)


def _assemble(
    request: _Request,
    module: nn.Module,
    blueprint: Blueprint,
    default_batch: int,
    description: str,
    notes: tuple[str, ...],
) -> Model:
    dtype, options, seed = request.dtype or torch.float32, request.options, request.seed
    batch_size = request.batch or default_batch
    notes += blueprint.adjust(module)
    inputs = blueprint.inputs
    if isinstance(inputs, TextInput):
        num_classes = blueprint.num_classes
        make_example = example.texts(
            inputs, num_classes, seed=seed, padded=bool(options.padded), pad_token=blueprint.pad_token
        )
    else:
        make_example = example.images(inputs, blueprint.num_classes or 1, seed=seed, dtype=dtype)
    losses = {"classify": loss.classification, "next-token": loss.next_token, "none": loss.own_or_stand_in}
    made = make_example(batch_size)
    return Model(
        name=request.name,
        module=_in(dtype, module).train(),
        args=made.args,
        kwargs=made.kwargs,
        target=made.target,
        loss=losses[blueprint.objective],
        batch_size=batch_size,
        make_example=make_example,
        description=description,
        notes=notes,
        objective=blueprint.objective,
        num_classes=blueprint.num_classes,
        inputs=inputs,
    )


def _from_factory(request: _Request) -> Model:
    with seeded(request.seed):
        model = factory.build(request.name, request.options)
    if request.weights is not None:
        load_state(model.module, request.weights)
    if request.batch is not None and request.batch != model.batch_size:
        made = model.example(request.batch)
        model = dataclasses.replace(
            model, args=made.args, kwargs=made.kwargs, target=made.target, batch_size=request.batch
        )
    return model if request.dtype is None else _cast(model, request.dtype)


def _in(dtype: torch.dtype, module: nn.Module) -> nn.Module:
    """The module's real numbers in a type; `module.to` would drop the imaginary part of complex ones."""
    made: nn.Module = module._apply(lambda one: one.to(dtype) if one.is_floating_point() else one)  # type: ignore[no-untyped-call]
    return made


def _cast(model: Model, dtype: torch.dtype) -> Model:
    """The model and its example batches in another floating-point type."""

    def convert(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    def make_example(batch_size: int) -> Batch:
        made = model.example(batch_size)
        args, kwargs, target = pytree.tree_map(convert, (made.args, made.kwargs, made.target))
        return Batch(args=args, kwargs=kwargs, target=target)

    made = make_example(model.batch_size)
    return dataclasses.replace(
        model,
        module=_in(dtype, model.module),
        args=made.args,
        kwargs=made.kwargs,
        target=made.target,
        make_example=make_example,
    )


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise UsageError(f"the number type must be one of {', '.join(DTYPES)}, not {str(dtype)!r}")
    return found
