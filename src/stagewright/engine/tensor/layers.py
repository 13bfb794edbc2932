"""Column- and row-parallel linear layers and convolutions.

    x ─ copy ─┬─ column: q ─┐                    A region: column-parallel layers hold a shard of the output features,
              ├─ column: k ─┼─ heads ─ row ─ all-reduce ─ + bias ─ y     the row-parallel layer the matching shard of
              └─ column: v ─┘                    the input features. No communication in between; x is copied to the
                                                 region once, so q, k and v share one all-reduce in backward.

Where the sequence is divided around a region (``sequence.py``), an all-gather takes the place of the copy and a
reduce-scatter that of the all-reduce.
Modules keep their place (their class becomes a subclass), and parameters keep their names and hold this worker's
shard as plain tensors. Why not DTensor: docs/decisions/0008.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from stagewright import structure
from stagewright.engine.tensor.axis import Axis, TensorAxis, pad_shard, shard_sizes
from stagewright.engine.tensor.dropout import ShardedDropout
from stagewright.engine.tensor.multihead import ColumnMultiheadAttention
from stagewright.engine.tensor.regions.region_plan import is_transposed
from stagewright.engine.tensor.sequence import DividedBlock, find_hidden
from stagewright.errors import UsageError
from stagewright.files.stored_tensor import TensorPart
from stagewright.machine.hollow import is_hollow

LAYOUTS = "_stagewright_shards"
"""Attribute of a module with the layouts of its sharded parameters, by their names in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """Which shard of a parameter this worker holds.

    The sharded dimension consists of sections, one for each of query, key and value if they are packed into one weight.
    Each section is split over the workers; a worker concatenates its shards of all sections.
    """

    dim: int
    sections: tuple[int, ...]
    """Relative sizes of the sections."""
    axis: Axis
    full_size: int | None = None
    """Size of the dimension where shards may be unequal, such as the rows of a vocabulary; None: equal shards."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all workers' shards of a dimension with ``full_size``."""
        assert self.full_size is not None
        return shard_sizes(self.full_size, self.axis.num_workers)

    @property
    def start(self) -> int:
        """Index of this worker's first row of a dimension with ``full_size``."""
        return sum(self.sizes[: self.axis.index])

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """Return this worker's shard of a full tensor."""
        num_workers, index = self.axis.num_workers, self.axis.index
        if is_hollow(full):
            held = full.shape[self.dim] // num_workers if self.full_size is None else self.sizes[index]
            shape = [held if dim == self.dim else size for dim, size in enumerate(full.shape)]
            return full.as_strided(shape, full.stride())
        if self.full_size is not None:
            return full.narrow(self.dim, self.start, self.sizes[index]).clone(memory_format=torch.contiguous_format)
        shards = [section.chunk(num_workers, self.dim)[index] for section in self._sections(full)]
        return torch.cat(shards, self.dim).contiguous()

    def part(self, shard: torch.Tensor) -> TensorPart:
        """Return which ranges of the full tensor this worker's ``shard`` holds."""
        if self.full_size is not None:
            return TensorPart(dim=self.dim, ranges=((self.start, self.start + self.sizes[self.axis.index]),))
        ranges, start = [], 0
        for size in self.sections:
            held = shard.shape[self.dim] * size // sum(self.sections)
            ranges.append((start + held * self.axis.index, start + held * (self.axis.index + 1)))
            start += held * self.axis.num_workers
        return TensorPart(dim=self.dim, ranges=tuple(ranges))

    def full_shape(self, shard: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        size = self.full_size if self.full_size is not None else shard.shape[self.dim] * self.axis.num_workers
        return (*shard.shape[: self.dim], size, *shard.shape[self.dim + 1 :])

    def gather(self, shard: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """All-gather the full tensor from the workers' shards; every worker of the axis must call this.

        ``device``: where the full tensor is assembled, because a worker's device may have no room for it.
        """
        if self.full_size is not None:
            shards = self.axis.all_gather(pad_shard(shard, max(self.sizes), self.dim))
            parts = [part.narrow(self.dim, 0, size) for part, size in zip(shards, self.sizes, strict=True)]
            return torch.cat([part if device is None else part.to(device) for part in parts], self.dim)
        shards = self.axis.all_gather(shard)
        sections = [self._sections(tensor if device is None else tensor.to(device)) for tensor in shards]
        return torch.cat([held[index] for index in range(len(self.sections)) for held in sections], self.dim)

    def _sections(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        unit = tensor.shape[self.dim] // sum(self.sections)
        return torch.split(tensor, [unit * size for size in self.sections], self.dim)


class Region:
    """State that the layers of one region share during a forward pass: copied inputs and the dropout mode."""

    def __init__(
        self, axis: TensorAxis, dropout: ShardedDropout | None = None, *, copies_latents: bool = False
    ) -> None:
        """``copies_latents``: replicated layers come before the column-parallel ones, as in latent attention."""
        self.axis, self._copies_latents = axis, copies_latents
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._dropout = dropout
        self._dropout_entered = False
        self.block: DividedBlock | None = None
        """The block around the region, if its sequence is divided."""
        self._others: list[torch.Tensor] | None = None

    def enter(self, value: torch.Tensor) -> torch.Tensor:
        """Copy the input of a column-parallel layer to the region, once for all layers with the same input."""
        if self._dropout is not None:
            self._dropout.open = True
        if self.block is not None:
            self.block.in_region = True
        for original, copy in self._copies:
            if original is value and copy.requires_grad == (torch.is_grad_enabled() and value.requires_grad):
                return copy
        copy = self.axis.copy_to_region(value) if self.block is None else self._gather(value, self.block)
        self._copies.append((value, copy))
        return copy

    def reopen(self) -> None:
        """Be inside the region again, where the output of a column-parallel layer is reused in a recomputation."""
        if self._dropout is not None:
            self._dropout.open = True

    def leave(self) -> None:
        """Leave the region at its row-parallel layer: activations are replicated, or divided by tokens, again."""
        self._copies.clear()
        self._others = None
        if self._dropout is not None:
            self._dropout.open = False
        if self.block is not None:
            self.block.in_region = False

    def gather_input(self, owner: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run before the forward of an attention with a divided sequence: its code reads the shape of its input."""
        assert self.block is not None
        hidden = find_hidden(args, kwargs)
        if hidden is None:
            raise UsageError(
                f"sequence_parallel = true can't divide the input of {type(owner).__name__}, which takes no hidden "
                "states; leave it out"
            )
        whole = self.block.gather(hidden, is_replicated=self._copies_latents)
        if self._copies_latents:
            self.block.in_region = True
        else:
            self._copies.append((whole, whole))
        arguments = structure.map_tensors(lambda leaf: whole if leaf is hidden else leaf, (args, dict(kwargs)))
        self._others = [leaf for leaf in structure.tensors(arguments) if leaf is not whole]
        return arguments

    def _gather(self, value: torch.Tensor, block: DividedBlock) -> torch.Tensor:
        """Return the whole of a column-parallel layer's input, which other tokens' workers hold."""
        if self._others is None:
            return block.gather(value)
        # Replicated, such as latents or an encoder's output.
        if self._copies_latents or any(value is other for other in self._others):
            return self.axis.copy_to_region(value)
        raise UsageError(
            "sequence_parallel = true gathers the hidden states of an attention, but the code of one computes other "
            "inputs of its layers from them; leave it out"
        )

    def begin(self, owner: nn.Module, *_: Any) -> None:
        """Run before the owner's forward; clear what an aborted pass has left."""
        self.leave()
        if self._dropout is not None and owner.training:
            self._dropout.__enter__()  # type: ignore[no-untyped-call]
            self._dropout_entered = True

    def end(self, *_: Any) -> None:
        """Run after the owner's forward, even if it raised."""
        if self._dropout is not None and self._dropout_entered:
            self._dropout_entered = False
            self._dropout.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Column(nn.Module):
    """A column-parallel layer: a shard of the output features from the full input."""

    _region: Region

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self._region.enter(x))


class _LatentKeys(nn.Module):
    """A replicated layer that returns a latent, and then a part of the keys that the heads of all workers use."""

    _region: Region
    _latent_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latent, keys = super().forward(x).tensor_split([self._latent_features], -1)
        return torch.cat([latent, self._region.axis.copy_to_region(keys)], -1)


class _Row(nn.Module):
    """A row-parallel layer: partial sums from a shard of the input features.

    Each worker adds its share of the bias in the product. Where the sequence is divided, the bias is added afterwards,
    to this worker's tokens.
    """

    _region: Region
    weight: torch.Tensor
    bias: torch.Tensor | None
    _transposed: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._region.leave()
        if isinstance(self, _CONVOLUTIONS):
            return self._convolve(x)
        rows, block, axis = x.reshape(-1, x.size(-1)), self._region.block, self._region.axis
        # Conv1D stores its weight transposed.
        weight = self.weight.t() if self._transposed else self.weight
        if block is None:
            share = None if self.bias is None else axis.share(self.bias)
            total = axis.reduce_from_region(functional.linear(rows, weight, share))
            return total.view(*x.shape[:-1], total.size(-1))
        partial = functional.linear(rows, weight)
        total = block.scatter(partial.view(*x.shape[:-1], partial.size(-1)))
        return (
            total if self.bias is None else total + self.bias.to(total.dtype)
        )  # as autocast does in an unsharded layer

    def _convolve(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Return what a row-parallel convolution computes; channels come before the dimensions of space."""
        total: torch.Tensor = self._region.axis.reduce_from_region(self._conv_forward(x, self.weight, None))
        if self.bias is None:
            return total
        bias: torch.Tensor = self.bias.to(total.dtype).view(-1, *(1 for _ in self.kernel_size))
        return total + bias


class _Shared(nn.Module):
    """A replicated layer inside a region, applied to each head: its gradient is all-reduced over the workers."""

    _region: Region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parameters = dict(self._parameters)
        try:
            for name, value in parameters.items():
                del self._parameters[name]
                self.__dict__[name] = None if value is None else self._region.axis.copy_to_region(value)
            return super().forward(*args, **kwargs)
        finally:
            for name, value in parameters.items():
                self.__dict__.pop(name, None)
                self._parameters[name] = value


class _Norm(nn.Module):
    """An RMS norm over the features of all heads, of which this worker holds a shard."""

    _region: Region
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axis, values = self._region.axis, x.float()
        squares = axis.copy_to_region(axis.reduce_from_region(values.square().sum(-1, keepdim=True)))
        scale = torch.rsqrt(squares / (x.size(-1) * axis.num_workers) + self.variance_epsilon)
        return (self.weight * (values * scale)).to(x.dtype)


class _Channel(nn.Module):
    """A norm or a grouped convolution of this worker's channels."""

    _region: Region


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_STYLES: dict[str, type[nn.Module]] = {
    "keys": _LatentKeys,
    "column": _Column,
    "row": _Row,
    "shared": _Shared,
    "norm": _Norm,
    "channel": _Channel,
}
_SIZES = {
    "column": ("out_features", "nf", "out_channels", "num_heads"),
    "row": ("in_features", "nx", "in_channels"),
    "channel": ("num_features", "num_channels", "num_groups", "in_channels", "out_channels", "groups"),
}
"""Attributes that are divided by the number of workers, by style."""
_CHANNEL_TENSORS = ("weight", "bias", "running_mean", "running_var")
_classes: dict[tuple[str, type], type] = {}


def shard_layer(layer: nn.Module, style: str, region: Region, sections: tuple[int, ...] = (1,)) -> None:
    """Make a layer part of a region, in place: change its class and sizes, keep this worker's shard of the weights."""
    kind = type(layer)
    if kind is nn.MultiheadAttention:
        _classes[style, kind] = ColumnMultiheadAttention
    elif (style, kind) not in _classes:
        _classes[style, kind] = type(f"{style.title()}{kind.__name__}", (_STYLES[style], kind), {})
    axis = region.axis
    if style not in ("keys", "shared"):
        dims = _sharded_dims(layer, style)
        layouts = {name: ShardLayout(dim=dim, sections=sections, axis=axis) for name, dim in dims.items()}
        for name, layout in layouts.items():
            value = getattr(layer, name)
            # Keep the parameter object: the caller may hold references to it.
            value.grad = None
            value.data = layout.shard(value.data)
        setattr(layer, LAYOUTS, layouts)
        for size in _SIZES.get(style, ()):
            if hasattr(layer, size):
                setattr(layer, size, getattr(layer, size) // axis.num_workers)
    layer._transposed = is_transposed(layer)  # type: ignore[assignment]
    layer.__class__ = _classes[style, kind]
    layer._region = region  # type: ignore[assignment]


def shard_head_parameter(owner: nn.Module, name: str, axis: TensorAxis) -> None:
    """Keep this worker's heads of a parameter with one value per head, in place."""
    parameter, layout = owner.get_parameter(name), ShardLayout(dim=0, sections=(1,), axis=axis)
    parameter.grad = None
    parameter.data = layout.shard(parameter.data)
    owner.__dict__.setdefault(LAYOUTS, {})[name] = layout


def _sharded_dims(layer: nn.Module, style: str) -> dict[str, int]:
    """Return the dimension of each sharded tensor of a layer, by its name."""
    if isinstance(layer, nn.MultiheadAttention):
        return {name: 0 for name in ("in_proj_weight", "in_proj_bias") if getattr(layer, name) is not None}
    if style == "channel":
        return {name: 0 for name in _CHANNEL_TENSORS if getattr(layer, name, None) is not None}
    out_dim, in_dim = (1, 0) if is_transposed(layer) and style != "norm" else (0, 1)
    has_bias = style == "column" and getattr(layer, "bias", None) is not None
    return {"weight": in_dim if style == "row" else out_dim} | ({"bias": 0} if has_bias else {})


def shard_layouts(model: nn.Module) -> dict[str, ShardLayout]:
    """Return the layout of every sharded parameter, by its name in ``model``."""
    return {
        f"{prefix}.{name}" if prefix else name: layout
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, layout in getattr(module, LAYOUTS, {}).items()
    }
