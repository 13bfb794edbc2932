"""Any transformers model, without remote code: `hf:org/name` from the hub or its cache, `hf:/folder` from disk.

The class is that of the configuration; with `num_classes` it is a classifier on the same base model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagewright.errors import DataMissing, UsageError
from stagewright.extras import require
from stagewright.zoo.blueprint import Blueprint, Options
from stagewright.zoo.model import ImageInput, ModelInput, Objective, TextInput
from stagewright.zoo.named.language import longest_sequence, pad_token
from stagewright.zoo.named.vision import IMAGENET_MEAN, IMAGENET_STD
from stagewright.zoo.quiet import quiet_transformers
from stagewright.zoo.sources import network
from stagewright.zoo.sources.folder import local_model
from stagewright.zoo.sources.weights import first_line, read_config, with_normalization


def locate(reference: str, *, weights: bool) -> Path:
    """Return the folder of a reference (the part after `hf:`): on disk, or a downloaded repository of the hub.

    Without `weights` only the small files (configuration, tokenizer) are downloaded.
    """
    folder = local_model(reference)
    if folder is not None:
        return folder
    return _download(reference, ["*.json", "*.txt", "*.model"] + (["*.safetensors"] if weights else []))


def _download(reference: str, patterns: list[str]) -> Path:
    require("transformers", f"the model 'hf:{reference}'")
    from huggingface_hub import snapshot_download

    offline = network.offline()
    try:
        with quiet_transformers():
            return Path(snapshot_download(reference, allow_patterns=patterns, local_files_only=offline))
    except (OSError, ValueError) as error:
        if not offline:
            raise DataMissing(f"the model 'hf:{reference}' can't be downloaded: {first_line(error)}") from error
        raise DataMissing(
            f"the model 'hf:{reference}' is not on this machine and the Hugging Face hub can't be reached; "
            "download it on a machine with network access and give its folder: hf:/path/to/folder"
        ) from None


def check_has_weights(reference: str, folder: Path) -> None:
    """Raise DataMissing if the folder has no weights."""
    if not any(folder.glob("*.safetensors")):
        raise DataMissing(
            f"'hf:{reference}' has no *.safetensors; add weights='random' (--weights random) "
            "to build it from its configuration alone"
        )


def blueprint(reference: str, folder: Path, options: Options) -> Blueprint:
    """Create the blueprint of the model whose configuration is in `folder`."""
    config = read_config(folder)
    if options.image_size is not None:
        config.image_size = options.image_size
    if options.num_classes is not None:
        config.num_labels = options.num_classes
    model_class = _class(reference, config, options)
    objective: Objective = "none"
    if model_class.__name__.endswith(("ForImageClassification", "ForSequenceClassification")):
        objective = "classify"
    elif model_class.__name__.endswith(("ForCausalLM", "LMHeadModel")):
        objective = "next-token"
    return Blueprint(
        make=model_class,
        config=config,
        inputs=_inputs(reference, model_class, config, folder, options),
        objective=objective,
        num_classes=config.num_labels if objective == "classify" else None,
        pad_token=pad_token(config),
    )


def _class(reference: str, config: Any, options: Options) -> Any:
    import transformers

    kind = type(config)
    if options.num_classes is not None:
        for mapping in (
            transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
            transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        ):
            if kind in mapping:
                return _first(mapping[kind])
        raise UsageError(
            f"transformers has no classifier for 'hf:{reference}' ({config.model_type}); leave num_classes out"
        )
    for name in getattr(config, "architectures", None) or []:
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
    if kind in transformers.MODEL_MAPPING:
        return _first(transformers.MODEL_MAPPING[kind])
    raise UsageError(f"transformers has no model for 'hf:{reference}' ({config.model_type})")


def _first(model_class: Any) -> Any:
    return model_class[0] if isinstance(model_class, tuple) else model_class


def _inputs(reference: str, model_class: Any, config: Any, folder: Path, options: Options) -> ModelInput:
    main = model_class.main_input_name
    if main == "pixel_values":
        options.check_supported(f"hf:{reference}", frozenset({"image_size", "num_classes"}))
        size = getattr(config, "image_size", 224)
        if isinstance(size, list | tuple):
            size = size[0]
        channels = getattr(config, "num_channels", 3)
        inputs = ImageInput(channels=channels, size=size)
        if channels == 3:
            inputs = ImageInput(channels=3, size=size, mean=IMAGENET_MEAN, std=IMAGENET_STD)
        return with_normalization(inputs, folder)
    vocabulary = getattr(config, "vocab_size", None)
    if main == "input_ids" and vocabulary and not getattr(config, "is_encoder_decoder", False):
        options.check_supported(f"hf:{reference}", frozenset({"sequence_length", "num_classes", "padded"}))
        max_length = longest_sequence(config)
        length = options.sequence_length or min(128, max_length or 128)
        if max_length is not None and length > max_length:
            raise UsageError(f"'hf:{reference}' takes sequences of at most {max_length} tokens, not {length}")
        return TextInput(
            vocabulary_size=vocabulary,
            sequence_length=length,
            num_token_types=getattr(config, "type_vocab_size", None) or 1,
            tokenizer=tokenizer_folder(folder),
        )
    raise UsageError(
        f"'hf:{reference}' ({model_class.__name__}) takes {main!r}, for which no example batch can be generated; "
        "write a factory that returns (module, args, kwargs) and use package.module:factory"
    )


def tokenizer_folder(folder: Path) -> Path | None:
    """Return `folder` if it contains a tokenizer."""
    files = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
    return folder if any((folder / name).is_file() for name in files) else None
