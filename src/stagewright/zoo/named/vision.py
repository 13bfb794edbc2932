"""Built-in image classifiers, built by transformers from a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from stagewright.errors import UsageError
from stagewright.extras import require
from stagewright.zoo.blueprint import Blueprint, Options, no_changes
from stagewright.zoo.model import ImageInput
from stagewright.zoo.named.catalog import Entry

if TYPE_CHECKING:
    import transformers

# Width and heads; all three have 12 blocks.
_DEIT = {"deit-tiny": (192, 3), "deit-small": (384, 6), "deit-base": (768, 12)}
_RESNET = {"resnet-50": [3, 4, 6, 3], "resnet-101": [3, 4, 23, 3]}

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

BATCH_NORM_MOMENTUM = 0.1
"""torch's default, which `fix_batch_norm_momentum` sets for MobileNetV2."""


def build(entry: Entry, options: Options, layers: int | None) -> Blueprint:
    """Create the blueprint of an image classifier."""
    require("transformers", f"the model {entry.name!r}")
    import transformers  # imported here, because it takes seconds that user-defined models don't need

    name = entry.name
    if name == "digits-vit":
        return _digits(options)
    num_classes = options.num_classes or 1000
    size = options.image_size or 224
    adjust = no_changes
    config: transformers.PreTrainedConfig
    model_class: Any
    if name in _DEIT:
        _check_patches(name, size, 16)
        width, heads = _DEIT[name]
        config = transformers.DeiTConfig(
            hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width, image_size=size
        )
        model_class = transformers.DeiTForImageClassification
    elif name in _RESNET:
        config = transformers.ResNetConfig(depths=_RESNET[name])
        model_class = transformers.ResNetForImageClassification
    else:
        assert name == "mobilenet-v2", name
        # Padding, epsilon and dropout as in torchvision; the defaults of transformers are those of TensorFlow.
        config = transformers.MobileNetV2Config(
            image_size=size, tf_padding=False, layer_norm_eps=1e-5, classifier_dropout_prob=0.2
        )
        model_class = transformers.MobileNetV2ForImageClassification
        adjust = fix_batch_norm_momentum
    config.num_labels = num_classes
    return Blueprint(
        make=model_class,
        config=config,
        inputs=ImageInput(channels=3, size=size, mean=IMAGENET_MEAN, std=IMAGENET_STD),
        objective="classify",
        num_classes=num_classes,
        adjust=adjust,
    )


def _digits(options: Options) -> Blueprint:
    import transformers

    num_classes, size = options.num_classes or 10, options.image_size or 8
    _check_patches("digits-vit", size, 2)
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=size,
        patch_size=2,
        num_channels=1,
        initializer_range=0.1,  # narrow layers: with the usual 0.02 almost no signal passes initially
    )
    config.num_labels = num_classes
    return Blueprint(
        make=transformers.ViTForImageClassification,
        config=config,
        inputs=ImageInput(channels=1, size=size, mean=(0.3,), std=(0.4,)),
        objective="classify",
        num_classes=num_classes,
    )


def _check_patches(name: str, size: int, patch: int) -> None:
    if size % patch:
        lower = max(patch, size - size % patch)
        raise UsageError(
            f"{name} uses patches of {patch} pixels, but image_size {size} is not a multiple of that; "
            f"use image_size {lower} or {size - size % patch + patch}"
        )


def fix_batch_norm_momentum(module: nn.Module) -> tuple[str, ...]:
    """Lower MobileNetV2's batch-norm momentum to torch's default.

    transformers uses TensorFlow's decay, 0.997, as torch's momentum: the running statistics would be those of the last
    batch, which makes evaluation after training useless. Weights are not changed.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, nn.BatchNorm2d) and norm.momentum == 0.997]
    for norm in norms:
        norm.momentum = BATCH_NORM_MOMENTUM
    if not norms:
        return ()
    return (
        f"batch-norm momentum set to {BATCH_NORM_MOMENTUM} in {len(norms)} layers: with 0.997, as in transformers, the "
        "running statistics are those of the last batch",
    )
