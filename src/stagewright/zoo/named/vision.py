"""Image classifiers by name, as transformers builds them from a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from stagewright.errors import UsageError
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
"""torch's default, which `usable_batch_norm` gives MobileNetV2."""


def build(entry: Entry, options: Options, layers: int | None) -> Blueprint:
    """The blueprint of one of the image classifiers."""
    import transformers  # here, since it takes seconds that a model of the user's own need not wait

    name = entry.name
    if name == "digits-vit":
        return _digits(options)
    num_classes = options.num_classes or 1000
    size = options.image_size or 224
    adjust = no_changes
    config: transformers.PreTrainedConfig
    model_class: Any
    if name in _DEIT:
        _whole_patches(name, size, 16)
        width, heads = _DEIT[name]
        config = transformers.DeiTConfig(
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            image_size=size,
        )
        model_class = transformers.DeiTForImageClassification
    elif name in _RESNET:
        config = transformers.ResNetConfig(depths=_RESNET[name])
        model_class = transformers.ResNetForImageClassification
    else:
        assert name == "mobilenet-v2", name
        # Padding, epsilon and dropout as PyTorch has them; transformers' defaults are TensorFlow's.
        config = transformers.MobileNetV2Config(
            image_size=size,
            tf_padding=False,
            layer_norm_eps=1e-5,
            classifier_dropout_prob=0.2,
        )
        model_class = transformers.MobileNetV2ForImageClassification
        adjust = usable_batch_norm
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
    _whole_patches("digits-vit", size, 2)
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=size,
        patch_size=2,
        num_channels=1,
        initializer_range=0.1,  # narrow layers: with the usual 0.02 hardly any signal passes at first
    )
    config.num_labels = num_classes
    return Blueprint(
        make=transformers.ViTForImageClassification,
        config=config,
        inputs=ImageInput(channels=1, size=size, mean=(0.3,), std=(0.4,)),
        objective="classify",
        num_classes=num_classes,
    )


def _whole_patches(name: str, size: int, patch: int) -> None:
    if size % patch:
        lower = max(patch, size - size % patch)
        raise UsageError(
            f"{name} cuts images into patches of {patch} pixels, and image_size {size} is no multiple of it; "
            f"use image_size {lower} or {size - size % patch + patch}"
        )


def usable_batch_norm(module: nn.Module) -> tuple[str, ...]:
    """Lowers MobileNetV2's batch-norm momentum to torch's default.

    transformers took TensorFlow's decay, 0.997, for torch's momentum: running statistics would be those of
    the last batch, and evaluation after training worthless. Weights are not touched.
    """
    changed = [one for one in module.modules() if isinstance(one, nn.BatchNorm2d) and one.momentum == 0.997]
    for one in changed:
        one.momentum = BATCH_NORM_MOMENTUM
    if not changed:
        return ()
    return (
        f"batch-norm momentum set to {BATCH_NORM_MOMENTUM} in {len(changed)} layers: with transformers' 0.997 running "
        "statistics are those of the last batch",
    )
