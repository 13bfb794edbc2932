"""Analytic costs of a transformer from its configuration, without building it.

    unit        multiply-accumulates per token            saved bytes per token (16 bit; 32 bit twice that)
    embedding   0                                         2 h
    block       4 h² + k h f + 2 s h                      10 h + (8 h + 4 f) / t: attention that saves no weights
    head        h · vocabulary                            2 h + 2 · vocabulary (the logits)

h width, f feed-forward width, s sequence length, k 2 (or 3 with a gate), t tensor parallel size. Tensor parallelism
divides queries, keys, values and attention outputs (8 h) and the feed-forward activations (4 f). Inputs of norms and
layers (8 h) and dropout masks (2 h) are not divided: the engine has no sequence parallelism.

Forward takes the longer of its arithmetic at the device's peak times an efficiency and its bytes at the memory
bandwidth; backward takes twice that. This is an estimate: if the device is available, measure instead.
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
from stagewright.simulator.costs.link_codec import NO_CODEC, LinkCodec
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.simulator.costs.tensor_traffic import TensorTraffic
from stagewright.spec.plan import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """Peak performance of a device."""

    flops: float
    """Dense 16-bit floating point operations per second."""
    bandwidth_bytes_per_s: float
    """Memory bandwidth."""


# From the vendors' data sheets, by a part of the hardware's name.
HARDWARE = {
    "V100": DevicePeak(flops=125e12, bandwidth_bytes_per_s=0.9e12),
    "A100": DevicePeak(flops=312e12, bandwidth_bytes_per_s=2.0e12),
    "H100": DevicePeak(flops=989e12, bandwidth_bytes_per_s=3.35e12),
    "H200": DevicePeak(flops=989e12, bandwidth_bytes_per_s=4.8e12),
    "B200": DevicePeak(flops=2250e12, bandwidth_bytes_per_s=8.0e12),
}

# Families with gated feed-forward layers, regardless of the activation's name.
_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
# Families with tied embeddings unless the configuration says otherwise.
_TIED = ("gpt2", "bert", "t5", "opt", "gemma", "gemma2", "gemma3_text", "gpt_neo", "bloom", "starcoder2", "cohere")


def device_peak(cluster: Cluster) -> DevicePeak:
    """Return the peak performance of the cluster's devices by their hardware name."""
    name = cluster.devices[0].hardware or ""
    for part, peak in HARDWARE.items():
        if part in name:
            return peak
    raise UsageError(
        f"the peak performance of the cluster's hardware {name!r} is unknown: set hardware to one of "
        f"{', '.join(HARDWARE)} in the cluster file, or measure the model on a device instead of --analytic"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The dimensions of a transformer."""

    num_layers: int
    width: int
    """Hidden size."""
    num_heads: int
    num_key_heads: int
    """Key/value heads."""
    feed_forward: int
    """Feed-forward size."""
    num_matrices: int
    """Matrices of a feed-forward layer: 2, or 3 with a gate."""
    vocabulary: int
    """Vocabulary size."""
    sequence_length: int
    tied: bool
    """Whether embedding and head share one matrix."""
    head_width: int | None = None
    """Size of an attention head; None: width / num_heads."""

    @property
    def attention_width(self) -> int:
        """Size of all query heads together."""
        return self.width if self.head_width is None else self.num_heads * self.head_width

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, without norms and biases."""
        keys = self.attention_width * self.num_key_heads // self.num_heads
        return self.width * (2 * self.attention_width + 2 * keys) + self.num_matrices * self.width * self.feed_forward

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        ends = self.vocabulary * self.width * (1 if self.tied else 2)
        return self.num_layers * self.block_parameters + ends

    @classmethod
    def of(cls, spec: ModelSpec) -> TransformerShape:
        """Read the config.json of `hf:folder`, without weights."""
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
            raise UsageError(f"{where} has none of {', '.join(names)}, so it is not a transformer configuration")

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
    """A computed cost source, with the interface of `CostSource`."""

    name: str
    shape: TransformerShape
    peak: DevicePeak
    kind: str = "cuda"
    """Kind of device: cuda or cpu."""
    item_bytes: int = 2
    """Bytes per element."""
    efficiency: float = 0.5
    """Fraction of the peak that matrix products reach."""
    _cache: dict[tuple[int, int], ModelCosts] = field(default_factory=dict, repr=False)

    @property
    def num_units(self) -> int:
        """Embedding, blocks and head."""
        return self.shape.num_layers + 2

    def tensor_sizes(self, largest: int) -> list[int]:
        """Return the tensor parallel sizes that divide its heads and feed-forward layers."""
        shape = self.shape
        return [
            size
            for size in range(1, largest + 1)
            if shape.num_heads % size == 0 and shape.num_key_heads % size == 0 and shape.feed_forward % size == 0
        ]

    def measure_size(self, size: int, tensor: int) -> bool:
        return False  # the formulas hold for every size

    def codec(self, name: str) -> LinkCodec:
        """Return a codec whose encoding and decoding are limited by memory bandwidth."""
        if name in ("none", "auto"):
            return NO_CODEC
        shape, dtype = (1 << 10, 1 << 6), torch.bfloat16 if self.item_bytes == 2 else torch.float32
        ratio = get(name).num_bytes(shape, dtype) / (math.prod(shape) * self.item_bytes)
        seconds = (1 + ratio) / self.peak.bandwidth_bytes_per_s
        return LinkCodec(ratio=ratio, encode_s_per_byte=seconds, decode_s_per_byte=seconds)

    def model(self, size: int, tensor: int) -> ModelCosts:
        """Return the costs of a micro-batch of that size on one of `tensor` workers."""
        if (size, tensor) not in self._cache:
            self._cache[size, tensor] = self._model(size, tensor)
        return self._cache[size, tensor]

    def _model(self, size: int, tensor: int) -> ModelCosts:
        shape, item = self.shape, self.item_bytes
        tokens = size * shape.sequence_length
        hidden = tokens * shape.width * item
        block_macs = shape.block_parameters + 2 * shape.sequence_length * shape.attention_width
        shared = 8 * shape.width + 4 * shape.feed_forward
        saved = round(tokens * (10 * shape.width + shared / tensor) * item / 2)
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
                    saved,
                    hidden,
                    saved,
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
        units[0] = replace(units[0], recompute_saved_bytes=8 * tokens)  # the inputs are token ids
        per_block = (hidden, hidden)
        traffic = [
            TensorTraffic(),
            *[TensorTraffic(forward_bytes=per_block, backward_bytes=per_block)] * shape.num_layers,
        ]
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
        overheads = ModelOverheads(
            loss_forward_s=2 * logits * per_byte,
            loss_backward_s=2 * logits * per_byte,
            loss_kept_bytes=logits,
            optimizer_s_per_byte=6 * per_byte,  # reads and writes of parameters, gradients and two optimizer states
            accumulate_s_per_byte=3 * per_byte,
        )
        tensors = (*traffic, TensorTraffic()) if tensor > 1 else None
        whole = self.model(size, 1).profile if tensor > 1 else None
        return ModelCosts(profile=profile, overheads=overheads, tensor=tensors, num_tensor=tensor, whole=whole)

    def _unit(
        self, name: str, block: str | None, macs: int, parameters: Amount, saved: int, crossing: int, accessed: int
    ) -> UnitProfile:
        seconds = max(
            2 * macs / (self.peak.flops * self.efficiency),
            (accessed + parameters.total) / self.peak.bandwidth_bytes_per_s,
        )
        time = Time(median_s=seconds, spread_s=0.0)
        elements = Amount(
            total=parameters.total // self.item_bytes,
            shares=tuple((index, part // self.item_bytes) for index, part in parameters.shares),
        )
        return UnitProfile(
            name=name,
            kind="TransformerBlock" if block else "Linear",
            block=block,
            parameters=elements,
            parameter_bytes=parameters,
            buffer_bytes=0,
            macs=macs,
            forward=time,
            backward_input=time,
            backward_weight=time,
            output_bytes=crossing,
            saved_bytes=Amount(total=saved),
            recompute_saved_bytes=crossing,
            crossing_bytes=crossing,
        )
