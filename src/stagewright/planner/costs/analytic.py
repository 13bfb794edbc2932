"""A transformer that nobody has built, from its configuration alone: what its units would cost on a device of a kind.

    unit        multiply-accumulates of a token           bytes kept of a token (16 bit; 32 bit twice that)
    embedding   0                                         2 h
    block       4 h² + k h f + 2 s h                      10 h + (8 h + 4 f) / t: attention that keeps no weights
    head        h · vocabulary                            2 h + 2 · vocabulary (the logits)

h width, f feed-forward width, s sequence length, k 2 (or 3 with a gate), t workers of a tensor axis. Each of these has
a part of queries, keys, values and heads' results (8 h) and of what is inside feed-forward layers (4 f), and all of
what enters norms and layers (8 h) and of dropout's masks (2 h): the engine does not share a sequence out.

A pass takes the longer of its arithmetic at the device's peak times an efficiency, and its bytes at the memory's
bandwidth; backward twice that. An estimate: where the device is at hand, measure instead.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stagewright.cluster.cluster import Cluster
from stagewright.codecs.registry import get
from stagewright.errors import UsageError
from stagewright.planner.costs.measure import ModelCosts
from stagewright.profiler.profile import Amount, Profile, Time, UnitProfile
from stagewright.simulator.costs.tensor_traffic import TensorTraffic
from stagewright.simulator.costs.link_codec import NO_CODEC, LinkCodec
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.spec.plan import ModelSpec

__all__ = ["HARDWARE", "AnalyticModel", "DevicePeak", "TransformerShape", "device_peak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """What a device can do at best."""

    flops: float
    """Floating point operations a second in 16 bit, dense."""
    bandwidth_bytes_per_s: float
    """Bytes a second from its memory."""


# As the vendors' data sheets say; a part of the hardware's name finds it.
HARDWARE = {
    "V100": DevicePeak(flops=125e12, bandwidth_bytes_per_s=0.9e12),
    "A100": DevicePeak(flops=312e12, bandwidth_bytes_per_s=2.0e12),
    "H100": DevicePeak(flops=989e12, bandwidth_bytes_per_s=3.35e12),
    "H200": DevicePeak(flops=989e12, bandwidth_bytes_per_s=4.8e12),
    "B200": DevicePeak(flops=2250e12, bandwidth_bytes_per_s=8.0e12),
}

# Families whose feed-forward layers have a gate, whatever their activation is called.
_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
# Families whose head is their embedding where their configuration does not say.
_TIED = ("gpt2", "bert", "t5", "opt", "gemma", "gemma2", "gemma3_text", "gpt_neo", "bloom", "starcoder2", "cohere")


def device_peak(cluster: Cluster) -> DevicePeak:
    """The peak of the cluster's devices, by their hardware's name."""
    name = cluster.devices[0].hardware or ""
    for part, peak in HARDWARE.items():
        if part in name:
            return peak
    raise UsageError(
        f"the cluster's hardware is {name!r}, of which no peak is known: write one of {', '.join(HARDWARE)} as "
        "hardware in the cluster's file, or measure the model on a device instead of --analytic"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The numbers that say what a transformer costs."""

    num_layers: int
    """Its blocks."""
    width: int
    """Width of the hidden state."""
    num_heads: int
    """Attention heads, and of keys and values."""
    num_key_heads: int
    feed_forward: int
    """Width inside the feed-forward layers."""
    num_matrices: int
    """Matrices of a feed-forward layer: 2, or 3 with a gate."""
    vocabulary: int
    """Tokens that it knows."""
    sequence_length: int
    """Tokens of a sample."""
    tied: bool
    """Whether embedding and head are one matrix."""
    head_width: int | None = None
    """Width of an attention head; None: all of them together are as wide as the hidden state."""

    @property
    def attention_width(self) -> int:
        """All heads of the queries together."""
        return self.width if self.head_width is None else self.num_heads * self.head_width

    @property
    def block_parameters(self) -> int:
        """Matrices of one block; norms and biases are left out."""
        keys = self.attention_width * self.num_key_heads // self.num_heads
        return self.width * (2 * self.attention_width + 2 * keys) + self.num_matrices * self.width * self.feed_forward

    @property
    def parameters(self) -> int:
        """All of it."""
        ends = self.vocabulary * self.width * (1 if self.tied else 2)
        return self.num_layers * self.block_parameters + ends

    @classmethod
    def of(cls, spec: ModelSpec) -> TransformerShape:
        """Read `hf:folder`'s config.json; no weights are read or made."""
        folder = Path(spec.name.removeprefix("hf:")).expanduser()
        path = folder / "config.json" if folder.is_dir() else folder
        if not spec.name.startswith("hf:") or not path.is_file():
            raise UsageError(
                f"an analytic plan needs a configuration: write hf:FOLDER with a config.json in it, not {spec.name!r}"
            )
        try:
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}") from None
        return cls._from(config, str(path), spec.sequence_length)

    @classmethod
    def _from(cls, config: dict[str, Any], where: str, length: int | None) -> TransformerShape:
        def number(*names: str) -> int:
            for name in names:
                if isinstance(config.get(name), int):
                    return int(config[name])
            raise UsageError(f"{where} names none of {', '.join(names)}, so that it is no transformer's configuration")

        width, heads = number("hidden_size", "n_embd", "d_model"), number("num_attention_heads", "n_head", "num_heads")
        inner = config.get("intermediate_size") or config.get("n_inner") or config.get("ffn_dim") or 4 * width
        kind = str(config.get("model_type", ""))
        gated = kind in _GATED or "silu" in str(config.get("hidden_act", ""))
        longest = config.get("max_position_embeddings") or config.get("n_positions") or config.get("n_ctx") or 2048
        return cls(
            num_layers=number("num_hidden_layers", "n_layer", "num_layers"),
            width=width,
            num_heads=heads,
            num_key_heads=int(config.get("num_key_value_heads") or heads),
            feed_forward=int(inner),
            num_matrices=3 if gated else 2,
            vocabulary=number("vocab_size"),
            sequence_length=length or int(longest),
            tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
            head_width=config.get("head_dim"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticModel:
    """A source of what a model costs, computed; the same face as what is measured."""

    name: str
    """Its name."""
    shape: TransformerShape
    """Its numbers."""
    peak: DevicePeak
    """The device's peak."""
    kind: str = "cuda"
    """The kind of device: cuda or cpu."""
    item_bytes: int = 2
    """Bytes of a number."""
    efficiency: float = 0.5
    """How much of the peak products reach."""
    _known: dict[tuple[int, int], ModelCosts] = field(default_factory=dict, repr=False)
    """What was asked before."""

    @property
    def num_units(self) -> int:
        """Embedding, blocks, head."""
        return self.shape.num_layers + 2

    def tensor_sizes(self, most: int) -> list[int]:
        """Numbers of workers that its layers can be divided among."""
        shape = self.shape
        return [
            size
            for size in range(1, most + 1)
            if shape.num_heads % size == 0 and shape.num_key_heads % size == 0 and shape.feed_forward % size == 0
        ]

    def measure_size(self, size: int, tensor: int) -> bool:
        return False  # formulas hold at every size

    def codec(self, name: str) -> LinkCodec:
        """A codec at the pace of the device's memory: one end reads values and writes fewer bytes, the other back."""
        if name in ("none", "auto"):
            return NO_CODEC
        shape, dtype = (1 << 10, 1 << 6), torch.bfloat16 if self.item_bytes == 2 else torch.float32
        ratio = get(name).num_bytes(shape, dtype) / (math.prod(shape) * self.item_bytes)
        seconds = (1 + ratio) / self.peak.bandwidth_bytes_per_s
        return LinkCodec(ratio=ratio, encode_s_per_byte=seconds, decode_s_per_byte=seconds)

    def model(self, size: int, tensor: int) -> ModelCosts:
        """What a micro-batch of that size costs one of `tensor` workers."""
        if (size, tensor) not in self._known:
            self._known[size, tensor] = self._model(size, tensor)
        return self._known[size, tensor]

    def _model(self, size: int, tensor: int) -> ModelCosts:
        shape, item = self.shape, self.item_bytes
        tokens = size * shape.sequence_length
        hidden = tokens * shape.width * item
        block_macs = shape.block_parameters + 2 * shape.sequence_length * shape.attention_width
        shared = 8 * shape.width + 4 * shape.feed_forward
        kept = round(tokens * (10 * shape.width + shared / tensor) * item / 2)
        ends = shape.vocabulary * shape.width
        head_shares = ((0, ends * item),) if shape.tied else ()
        logits = tokens * shape.vocabulary * item
        units = [
            self._unit("embedding", None, 0, Amount(total=ends * item), hidden, hidden, 2 * hidden),
            *(
                self._unit(
                    f"block.{index}",
                    f"block.{index}",
                    tokens * block_macs // tensor,
                    Amount(total=shape.block_parameters * item // tensor),
                    kept,
                    hidden,
                    kept,
                )
                for index in range(shape.num_layers)
            ),
            self._unit(
                "head",
                None,
                tokens * ends,
                Amount(total=ends * item, shares=head_shares),
                hidden + logits,
                0,
                2 * logits,
            ),
        ]
        units[0] = replace(units[0], recompute_saved_bytes=8 * tokens)  # numbers of tokens are what comes in
        once = (hidden, hidden)
        traffic = [TensorTraffic(), *[TensorTraffic(forward_bytes=once, backward_bytes=once)] * shape.num_layers]
        forward = sum(unit.forward.median_s for unit in units)
        per_byte = 1 / self.peak.bandwidth_bytes_per_s
        profile = Profile(
            model=self.name,
            device=f"{self.kind}:0",
            dtype="bfloat16" if item == 2 else "float32",
            batch_size=size,
            training=True,
            units=tuple(units),
            whole_forward=Time(median_s=forward, spread_s=0.0),
            whole_backward=Time(median_s=2 * forward, spread_s=0.0),
            whole_macs=sum(unit.macs for unit in units),
            versions={},
            source="analytic",
        )
        terms = ModelOverheads(
            loss_forward_s=2 * logits * per_byte,
            loss_backward_s=2 * logits * per_byte,
            loss_kept_bytes=logits,
            optimizer_s_per_byte=6 * per_byte,  # reads and writes of parameters, gradients and two states
            accumulate_s_per_byte=3 * per_byte,
        )
        tensors = (*traffic, TensorTraffic()) if tensor > 1 else None
        whole = self.model(size, 1).profile if tensor > 1 else None
        return ModelCosts(profile=profile, terms=terms, tensor=tensors, num_tensor=tensor, whole=whole)

    def _unit(
        self, name: str, block: str | None, macs: int, held: Amount, kept: int, crossing: int, touched: int
    ) -> UnitProfile:
        seconds = max(
            2 * macs / (self.peak.flops * self.efficiency), (touched + held.total) / self.peak.bandwidth_bytes_per_s
        )
        time = Time(median_s=seconds, spread_s=0.0)
        elements = Amount(
            total=held.total // self.item_bytes,
            shares=tuple((index, part // self.item_bytes) for index, part in held.shares),
        )
        return UnitProfile(
            name=name,
            kind="TransformerBlock" if block else "Linear",
            block=block,
            parameters=elements,
            parameter_bytes=held,
            buffer_bytes=0,
            macs=macs,
            forward=time,
            backward_input=time,
            backward_weight=time,
            output_bytes=crossing,
            saved_bytes=Amount(total=kept),
            recompute_saved_bytes=crossing,
            crossing_bytes=crossing,
        )
