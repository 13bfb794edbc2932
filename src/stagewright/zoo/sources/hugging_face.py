"""Any model of transformers, remote code off: `hf:org/name` from the hub or a cache, `hf:/folder` from disk.

The class is the one that the configuration names; with `num_classes` a classifier on the same base.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagewright.errors import DataMissing, UsageError
from stagewright.zoo.blueprint import Blueprint, Options
from stagewright.zoo.model import ImageInput, ModelInput, Objective, TextInput
from stagewright.zoo.named.language import longest_sequence, pad_token
from stagewright.zoo.named.vision import IMAGENET_MEAN, IMAGENET_STD
from stagewright.zoo.quiet import quiet_transformers
from stagewright.zoo.sources import network
from stagewright.zoo.sources.folder import local_model
from stagewright.zoo.sources.weights import first_line, normalised, read_config


def locate(reference: str, *, weights: bool) -> Path:
    """The folder that a reference (what follows `hf:`) names: on disk, or the copy of a hub's repository.

    Without `weights` only the small files (configuration, tokenizer) are fetched.
    """
    folder = local_model(reference)
    if folder is not None:
        return folder
    return _download(reference, ["*.json", "*.txt", "*.model"] + (["*.safetensors"] if weights else []))


def _download(reference: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    alone = network.offline()
    try:
        with quiet_transformers():
            return Path(snapshot_download(reference, allow_patterns=patterns, local_files_only=alone))
    except (OSError, ValueError) as error:
        if not alone:
            raise DataMissing(f"the model 'hf:{reference}' can't be fetched: {first_line(error)}") from error
        raise DataMissing(
            f"the model 'hf:{reference}' is not on this machine and the Hugging Face hub can't be reached; "
            "fetch it where there is a network and give its folder: hf:/path/to/folder"
        ) from None


def refuse_weightless(reference: str, folder: Path) -> None:
    """DataMissing where the folder has a configuration alone."""
    if not any(folder.glob("*.safetensors")):
        raise DataMissing(
            f"'hf:{reference}' comes without *.safetensors; add weights='random' (--weights random) "
            "to build it from its configuration alone"
        )


def blueprint(reference: str, folder: Path, options: Options) -> Blueprint:
    """How to build the model whose configuration lies in `folder`."""
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
                found = mapping[kind]
                return found[0] if isinstance(found, tuple) else found
        raise UsageError(
            f"transformers has no classifier for 'hf:{reference}' ({config.model_type}); leave num_classes"
        )
    for name in getattr(config, "architectures", None) or []:
        named = getattr(transformers, name, None)
        if named is not None:
            return named
    if kind in transformers.MODEL_MAPPING:
        found = transformers.MODEL_MAPPING[kind]
        return found[0] if isinstance(found, tuple) else found
    raise UsageError(f"transformers has no model for 'hf:{reference}' ({config.model_type})")


def _inputs(reference: str, model_class: Any, config: Any, folder: Path, options: Options) -> ModelInput:
    main = model_class.main_input_name
    if main == "pixel_values":
        options.refuse_others(f"hf:{reference}", frozenset({"image_size", "num_classes"}))
        size = getattr(config, "image_size", 224)
        if isinstance(size, list | tuple):
            size = size[0]
        channels = getattr(config, "num_channels", 3)
        inputs = ImageInput(channels=channels, size=size)
        if channels == 3:
            inputs = ImageInput(channels=3, size=size, mean=IMAGENET_MEAN, std=IMAGENET_STD)
        return normalised(inputs, folder)
    vocabulary = getattr(config, "vocab_size", None)
    if main == "input_ids" and vocabulary and not getattr(config, "is_encoder_decoder", False):
        options.refuse_others(f"hf:{reference}", frozenset({"sequence_length", "num_classes", "padded"}))
        longest = longest_sequence(config)
        length = options.sequence_length or min(128, longest or 128)
        if longest is not None and length > longest:
            raise UsageError(f"'hf:{reference}' takes sequences of at most {longest} tokens, not {length}")
        return TextInput(
            vocabulary_size=vocabulary,
            sequence_length=length,
            num_token_types=getattr(config, "type_vocab_size", None) or 1,
            tokenizer=tokenizer_folder(folder),
        )
    raise UsageError(
        f"'hf:{reference}' ({model_class.__name__}) takes {main!r}, for which no example batch can be made; "
        "write a factory that returns (module, args, kwargs) and name it as package.module:factory"
    )


def tokenizer_folder(folder: Path) -> Path | None:
    """`folder` where it holds a tokenizer."""
    files = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
    return folder if any((folder / one).is_file() for one in files) else None
