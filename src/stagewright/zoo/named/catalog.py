"""The catalog of built-in models: names, descriptions and options.

Imports neither torch nor transformers; `loading.py` builds the models with the modules named here.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.errors import UnknownName, UsageError
from stagewright.plugins import plugins

# Limit for a family with a variable number of layers.
MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A named model, or a family with a variable number of layers."""

    name: str
    """The name on the command line; for a family `name:layers`."""
    description: str
    """One line for lists."""
    builder: str
    """Module in `stagewright.zoo.named` whose `build(entry, …)` creates the blueprint."""
    options: frozenset[str]
    """Supported options among `image_size`, `sequence_length`, `num_classes`, `padded`."""
    default_batch: int = 4
    default_layers: int | None = None
    """Default number of layers of a family; None for a single model."""

    @property
    def spelling(self) -> str:
        """The name in lists."""
        return f"{self.name}:N" if self.default_layers else self.name


_IMAGE = frozenset({"image_size", "num_classes"})
_CLASSIFY_TEXT = frozenset({"sequence_length", "num_classes", "padded"})
_PREDICT_TEXT = frozenset({"sequence_length", "padded"})


def _image(name: str, description: str, default_batch: int = 4) -> Entry:
    return Entry(name=name, description=description, builder="vision", options=_IMAGE, default_batch=default_batch)


def _text(name: str, description: str, options: frozenset[str], layers: int | None = None) -> Entry:
    return Entry(name=name, description=description, builder="language", options=options, default_layers=layers)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="mlp-mnist",
        description="four linear layers 784-256-128-64-10 for MNIST",
        builder="mlp",
        options=frozenset(),
        default_batch=32,
    ),
    _image("digits-vit", "vision transformer for 8x8 digits, 4 blocks of width 64; trains in seconds", 32),
    _image("deit-tiny", "DeiT-Ti, 12 blocks of width 192, 5.7 M parameters"),
    _image("deit-small", "DeiT-S, 12 blocks of width 384, 22.1 M parameters"),
    _image("deit-base", "DeiT-B, 12 blocks of width 768, 86.6 M parameters"),
    _image("mobilenet-v2", "MobileNetV2 1.0, 17 inverted residuals, 3.5 M parameters"),
    _image("resnet-50", "ResNet-50, 16 bottlenecks, 25.6 M parameters"),
    _image("resnet-101", "ResNet-101, 33 bottlenecks, 44.5 M parameters"),
    _text("roberta-base", "RoBERTa classifier, 12 layers of width 768, 125 M parameters", _CLASSIFY_TEXT),
    _text("bert-minilm", "BERT classifier, 6 layers of width 384, 22.7 M parameters", _CLASSIFY_TEXT),
    _text("gpt2", "GPT-2, 12 layers of width 768, 124 M parameters, tied embedding and head", _PREDICT_TEXT),
    _text("llama-tiny", "small Llama: 8 layers of width 256, grouped heads, 10 M parameters", _PREDICT_TEXT),
    _text("gpt-layers", "GPT-2 of width 512 with N layers, e.g. gpt-layers:16", _PREDICT_TEXT, 12),
)

_BY_NAME = {entry.name: entry for entry in ENTRIES}

OTHER_SOURCES = "other sources: hf:org/name, hf:/a/folder or package.module:factory"


def names() -> tuple[str, ...]:
    """Return the names of all built-in models, in catalog order."""
    return tuple(_BY_NAME)


def describe() -> dict[str, str]:
    """Map each name to its description, in catalog order."""
    builtin = {entry.spelling: entry.description for entry in ENTRIES}
    return builtin | {name: f"plug-in, {value}" for name, value in plugins("models").items() if name not in builtin}


def entry(name: str) -> Entry:
    """Return the entry of that name; raise UnknownName with the closest names."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UnknownName("model", name, [*_BY_NAME, *plugins("models")], hint=f"({OTHER_SOURCES})") from None


def is_factory(name: str) -> bool:
    """Whether a name is that of a factory, `package.module:factory` or a plug-in: not in the catalog, not `hf:…`."""
    head, colon, _ = name.partition(":")
    return head not in _BY_NAME and (name in plugins("models") or (bool(colon) and head != "hf"))


def entry_and_layers(name: str) -> tuple[Entry, int | None]:
    """Return the entry of a name such as `gpt-layers:16` and its number of layers, None if that is fixed."""
    head, colon, rest = name.partition(":")
    family = entry(head)
    if not colon:
        return family, family.default_layers
    if family.default_layers is None:
        raise UsageError(f"the model {head!r} has a fixed number of layers; write {head!r}")
    if not (rest.isascii() and rest.isdigit()) or not 1 <= int(rest) <= MAX_LAYERS:
        raise UsageError(f"{name!r}: the number of layers must be from 1 to {MAX_LAYERS}, e.g. {head}:16")
    return family, int(rest)
