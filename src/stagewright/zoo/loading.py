"""Load a model by name: from the catalog, `hf:…`, or `package.module:factory`.

Random weights have their own seed: the caller's random number generator is not affected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagewright import structure
from stagewright.errors import UsageError
from stagewright.machine.hollow import make_hollow, parameters_on_meta
from stagewright.zoo import example, loss
from stagewright.zoo.blueprint import Blueprint, Options
from stagewright.zoo.model import Batch, ImageInput, Model, TextInput
from stagewright.zoo.named import catalog
from stagewright.zoo.quiet import quiet_transformers, seeded
from stagewright.zoo.sources import factory, hugging_face as hub
from stagewright.zoo.sources.folder import check_folder
from stagewright.zoo.sources.weights import (
    check_same_shapes,
    load_pretrained,
    load_state,
    read_config,
    with_normalization,
)
from stagewright.zoo.validation import catalog_blueprint
from stagewright.zoo.weight_files import WeightFiles

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The checked arguments of `load`."""

    name: str
    batch: int | None
    weights: Path | None
    """A folder of safetensors."""
    random_weights: bool
    """Whether to ignore the weights that come with the model."""
    seed: int
    """Seed of the random weights and of the example batch."""
    options: Options
    dtype: torch.dtype | None
    """Type of parameters and inputs; None: float32, or as returned by a user's factory."""
    hollow: bool
    """Whether to leave the weights in their files where that is possible."""
    checkpoint: Path | None
    """A folder of safetensors with the weights of a hollow model, instead of those that the name implies."""


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
    hollow: bool = False,
    checkpoint: Path | None = None,
) -> Model:
    """Load the model `name`: a name of the catalog, `hf:org/name`, `hf:/a/folder` or `package.module:factory`.

    `batch` is the size of the example batch. `weights` is a local folder of safetensors, or "random" to ignore the
    weights of an `hf:` model. `padded` makes texts of different lengths with an attention mask. `hollow` leaves weights
    that come from files there (`Model.weights`); `checkpoint` is a folder of safetensors to leave them in instead.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UsageError(f"the seed must be an integer from 0 to {2**32 - 1}, not {seed!r}")
    if batch is not None:
        example.check_batch_size(batch)
    request = _Request(
        name=name,
        batch=batch,
        weights=None if weights is None or str(weights) == "random" else Path(weights).expanduser(),
        random_weights=str(weights) == "random",
        seed=seed,
        options=Options(image_size=image_size, sequence_length=sequence_length, num_classes=num_classes, padded=padded),
        dtype=_dtype(dtype),
        hollow=hollow or checkpoint is not None,
        checkpoint=checkpoint,
    )
    head, _, rest = name.partition(":")
    if head == "hf":
        model = _from_hub(rest, request)
    elif catalog.is_factory(name):
        model = _from_factory(request)
    else:
        model = _from_catalog(request)
    if not any(True for _ in model.module.parameters()):
        raise UsageError(f"the model {name!r} has no parameters, so there is nothing to train or place")
    return model


def _from_catalog(request: _Request) -> Model:
    entry, blueprint = catalog_blueprint(request.name, request.options)
    notes: tuple[str, ...] = ()
    if request.weights is not None and blueprint.config is not None:
        blueprint = _with_configuration(request, blueprint, request.weights)
    module, files = _build_hollow(request, blueprint, request.weights)
    with seeded(request.seed), quiet_transformers():
        if module is None and request.weights is not None and blueprint.config is not None:
            module, notes = load_pretrained(blueprint.make, blueprint.config, request.weights)
        elif module is None:
            module = blueprint.make(blueprint.config)
            if request.weights is not None:
                load_state(module, request.weights)
    return _assemble(request, module, blueprint, entry.default_batch, entry.description, notes, files)


def _build_hollow(
    request: _Request, blueprint: Blueprint, folder: Path | None
) -> tuple[nn.Module | None, WeightFiles | None]:
    """Build a hollow model whose weights are in a folder; nothing if it has to be built whole."""
    folder = request.checkpoint or folder
    if not request.hollow or folder is None:
        return None, None
    try:
        with seeded(request.seed), quiet_transformers(), parameters_on_meta(), _no_random_buffers():
            module = blueprint.make(blueprint.config)
    except Exception:  # whatever code raises that computes with the values of its parameters
        return None, None
    return _empty(module, folder, request.dtype or torch.float32)


def _empty(module: nn.Module, folder: Path, dtype: torch.dtype | None) -> tuple[nn.Module | None, WeightFiles | None]:
    """Make a module on the meta device hollow; nothing if some of its weights can't be read singly from the folder."""
    files = WeightFiles.find(folder, module)
    if files is None:
        return None, None
    make_hollow(module, dtype=dtype, device=torch.device("cpu"))
    files.read_buffers(module)
    return module, files


def _with_configuration(request: _Request, blueprint: Blueprint, folder: Path) -> Blueprint:
    """Use the configuration of a folder of weights for the named model; it must have the same sizes."""
    name, options = request.name, request.options
    config = read_config(check_folder(folder, config=True))
    expected = blueprint.config
    if config.model_type != expected.model_type:
        raise UsageError(
            f"the weights in {str(folder)!r} belong to a {config.model_type!r} model, but {name!r} is "
            f"{expected.model_type!r}; load them as 'hf:{folder}'"
        )
    inputs = blueprint.inputs
    if isinstance(inputs, ImageInput):
        if options.image_size is not None:
            config.image_size = options.image_size
        size = getattr(config, "image_size", inputs.size)
        expected.image_size = size
        inputs = with_normalization(dataclasses.replace(inputs, size=options.image_size or size), folder)
    else:
        inputs = dataclasses.replace(inputs, tokenizer=hub.tokenizer_folder(folder))
    if blueprint.num_classes is not None:
        config.num_labels = expected.num_labels = options.num_classes or config.num_labels
    with torch.device("meta"):
        check_same_shapes(name, blueprint.make(config), blueprint.make(expected), folder)
    num_classes = config.num_labels if blueprint.num_classes is not None else None
    return dataclasses.replace(blueprint, config=config, inputs=inputs, num_classes=num_classes)


def _from_hub(reference: str, request: _Request) -> Model:
    uses_own_weights = request.weights is None and not request.random_weights
    folder = hub.locate(reference, weights=uses_own_weights)
    blueprint = hub.blueprint(reference, folder, request.options)
    notes: tuple[str, ...] = ()
    if uses_own_weights:
        hub.check_has_weights(reference, folder)
    source = check_folder(request.weights, config=False) if request.weights else folder
    module, files = _build_hollow(request, blueprint, None if request.random_weights else source)
    with seeded(request.seed), quiet_transformers():
        if module is None and request.random_weights:
            module = blueprint.make(blueprint.config)
        elif module is None:
            module, notes = load_pretrained(blueprint.make, blueprint.config, source)
    return _assemble(request, module, blueprint, 4, f"{type(module).__name__} from {reference}", notes, files)


def _assemble(
    request: _Request,
    module: nn.Module,
    blueprint: Blueprint,
    default_batch: int,
    description: str,
    notes: tuple[str, ...],
    files: WeightFiles | None,
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
    losses = {"classify": loss.classification, "next-token": loss.next_token, "none": loss.default_loss}
    batch = make_example(batch_size)
    return Model(
        name=request.name,
        module=_cast_module(module, dtype).train(),
        args=batch.args,
        kwargs=batch.kwargs,
        target=batch.target,
        loss=losses[blueprint.objective],
        batch_size=batch_size,
        make_example=make_example,
        description=description,
        notes=notes,
        objective=blueprint.objective,
        num_classes=blueprint.num_classes,
        inputs=inputs,
        weights=files,
    )


def _from_factory(request: _Request) -> Model:
    model = _hollow_factory(request)
    if model is None:
        with seeded(request.seed):
            model = factory.build(request.name, request.options)
        if request.weights is not None:
            load_state(model.module, request.weights)
    if request.batch is not None and request.batch != model.batch_size:
        batch = model.example(request.batch)
        model = dataclasses.replace(
            model, args=batch.args, kwargs=batch.kwargs, target=batch.target, batch_size=request.batch
        )
    return model if request.dtype is None else _cast(model, request.dtype)


@contextmanager
def _no_random_buffers() -> Iterator[None]:
    """Refuse code that draws random numbers for something other than parameters: a whole model would draw others."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(torch.get_rng_state(), before):
        raise UsageError("the model draws random numbers that are not its parameters")


def _hollow_factory(request: _Request) -> Model | None:
    """Build the hollow model of a factory; None if it has to be built whole."""
    folder = request.checkpoint or request.weights
    if not request.hollow or folder is None:
        return None
    try:
        with seeded(request.seed), parameters_on_meta(), _no_random_buffers():
            model = factory.build(request.name, request.options)
    except UsageError:  # such as the error of code that computes with the values of its parameters
        return None
    module, files = _empty(model.module, folder, request.dtype)
    return None if module is None else dataclasses.replace(model, weights=files)


def _cast_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert real tensors to a dtype; `module.to` would drop the imaginary part of complex ones."""
    converted: nn.Module = module._apply(  # type: ignore[no-untyped-call]
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )
    return converted


def _cast(model: Model, dtype: torch.dtype) -> Model:
    """Convert a model and its example batches to another floating-point dtype."""

    def convert(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    def make_example(batch_size: int) -> Batch:
        batch = model.example(batch_size)
        args, kwargs, target = structure.map_leaves(convert, (batch.args, batch.kwargs, batch.target))
        return Batch(args=args, kwargs=kwargs, target=target)

    batch = make_example(model.batch_size)
    return dataclasses.replace(
        model,
        module=_cast_module(model.module, dtype),
        args=batch.args,
        kwargs=batch.kwargs,
        target=batch.target,
        make_example=make_example,
    )


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    torch_dtype = DTYPES.get(str(dtype).removeprefix("torch."))
    if torch_dtype is None:
        raise UsageError(f"the dtype must be one of {', '.join(DTYPES)}, not {str(dtype)!r}")
    return torch_dtype
