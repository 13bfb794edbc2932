"""The layers of a tensor-parallel region and their parallel styles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """The layers of one region and their parallel styles."""

    owner: str
    """Module whose forward runs inside the region."""
    column_layers: tuple[str, ...]
    """Column-parallel layers: output features are sharded."""
    row_layer: str
    """Row-parallel layer: input features are sharded."""
    squeeze_layers: tuple[str, ...] = ()
    """Row-parallel layers of a mean over space, whose small outputs lead to column-parallel layers of the same region:
    the first layers of squeeze-and-excitation."""
    shared_layers: tuple[str, ...] = ()
    """Replicated layers inside the region; their gradients are all-reduced."""
    wide_norms: tuple[str, ...] = ()
    """RMS norms over the features of all heads, which are sharded like these features."""
    latent_layers: tuple[str, ...] = ()
    """Replicated layers before the column-parallel ones: low-rank projections and their norms. Latents are copied to
    the region, so gradients of these layers are whole."""
    latent_keys: tuple[str, int] | None = None
    """The layer that returns the latent of keys and values and then a part of the keys that all heads share, and the
    features of the latent."""
    head_parameters: tuple[str, ...] = ()
    """Parameters of the owner with one value per head, such as attention sinks."""
    sections: tuple[int, ...] = (1,)
    """Relative sizes of the sections packed into a column-parallel layer (query, key and value heads)."""
    divisible: dict[str, int] = field(default_factory=dict)
    """Sizes that the number of workers must divide, by their name in error messages."""
    attributes: tuple[str, ...] = ()
    """Attributes of the owner (number of heads, widths) to divide by the number of workers."""
    config_attributes: tuple[str, ...] = ()
    """The same of the owner's configuration."""
    channelwise_layers: tuple[str, ...] = ()
    """Norms and grouped convolutions inside the region, whose channels are sharded."""
    by_flow: bool = False
    """Whether the region was found by data flow, and may as well stay replicated."""
    calls_dropout: bool = False
    """Whether the code between its layers calls ``functional.dropout``."""

    @property
    def is_attention(self) -> bool:
        """Whether attention heads are split, not the inner features of a feed-forward layer."""
        return "attention heads" in self.divisible

    def layers(self) -> Iterator[tuple[str, str]]:
        """Yield the name and parallel style of each layer.

        Styles: ``latent``, ``keys``, ``column``, ``shared``, ``norm``, ``channel`` or ``row``.
        """
        yield from ((name, "latent") for name in self.latent_layers)
        if self.latent_keys is not None:
            yield self.latent_keys[0], "keys"
        yield from ((name, "column") for name in self.column_layers)
        yield from ((name, "shared") for name in self.shared_layers)
        yield from ((name, "norm") for name in self.wide_norms)
        yield from ((name, "channel") for name in self.channelwise_layers)
        yield from ((name, "row") for name in self.squeeze_layers)
        yield self.row_layer, "row"


def parameter_holders(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its identity: several for a tied weight."""
    holders: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(join_names(prefix, name))
    return holders


def join_names(prefix: str, name: str) -> str:
    """Return the name of a submodule or parameter in the model; either part may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def layer_sizes(layer: nn.Module) -> tuple[int, int]:
    """Return the input and output features of a linear layer, or the channels of a convolution."""
    weight = layer.get_parameter("weight")
    rows, columns = weight.shape[:2]
    return (rows, columns) if is_transposed(layer) else (columns, rows)


def is_transposed(layer: nn.Module) -> bool:
    """Whether a weight is stored as (in, out), as in transformers' Conv1D."""
    return type(layer).__name__.endswith("Conv1D")
