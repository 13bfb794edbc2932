"""Analytic costs of a transformer's units from its configuration, without building it.

The units are embedding, blocks and head; their times and saved activations come from `stagewright.analytic`, operator
by operator. This is an estimate: if the device is available, measure instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from stagewright.analytic.block import Operator, Operators
from stagewright.analytic.devices import Accelerator, accelerator_of
from stagewright.analytic.kernels import Kernels
from stagewright.analytic.layout import Layout, Precision
from stagewright.analytic.shape import TransformerShape
from stagewright.analytic.stacks import STACKS
from stagewright.cluster.cluster import Cluster
from stagewright.codecs.registry import get
from stagewright.errors import UsageError
from stagewright.planner.costs.measure import ModelCosts
from stagewright.profiler.profile import Amount, Profile, Time, UnitProfile
from stagewright.simulator.costs.link_codec import NO_CODEC, LinkCodec
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.simulator.costs.tensor_traffic import TensorTraffic
from stagewright.spec.plan import ModelSpec, Plan


def shape_of(spec: ModelSpec) -> TransformerShape:
    """Read the config.json of `hf:folder`, without weights."""
    folder = Path(spec.name.removeprefix("hf:")).expanduser()
    path = folder / "config.json" if folder.is_dir() else folder
    if not spec.name.startswith("hf:") or not path.is_file():
        raise UsageError(
            f"an analytic plan needs a configuration: write hf:FOLDER with a config.json in it, not {spec.name!r}"
        )
    return TransformerShape.read(path, spec.sequence_length)


def analytic_source(plan: Plan, cluster: Cluster, efficiency: float | None = None) -> AnalyticModel:
    """Return the computed costs of a plan's model on a cluster's devices."""
    shape = shape_of(plan.model)
    if shape.experts is not None:
        raise UsageError(
            f"{plan.model.name} has {shape.experts.num_experts} experts in a layer, and the engine runs no expert "
            "parallelism; forecast a layout instead: stagewright forecast --analytic --model MODEL --layout ep=8,…"
        )
    device = accelerator_of(cluster.devices[0])
    if efficiency is not None:
        device = replace(device, matmul_share=efficiency)
    return AnalyticModel(
        name=plan.model.name, shape=shape, device=device, kind=cluster.devices[0].kind, precision=plan.dtype
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticModel:
    """A computed cost source, with the interface of `CostSource`."""

    name: str
    shape: TransformerShape
    device: Accelerator
    kind: str = "cuda"
    """Kind of device: cuda or cpu."""
    precision: Precision = "bfloat16"
    _cache: dict[tuple[int, int], ModelCosts] = field(default_factory=dict, repr=False)

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return 4 if self.precision == "float32" else 2

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
        seconds = (1 + ratio) / self.device.bandwidth_bytes_per_s
        return LinkCodec(ratio=ratio, encode_s_per_byte=seconds, decode_s_per_byte=seconds)

    def model(self, size: int, tensor: int) -> ModelCosts:
        """Return the costs of a micro-batch of that size on one of `tensor` workers."""
        if (size, tensor) not in self._cache:
            self._cache[size, tensor] = self._model(size, tensor)
        return self._cache[size, tensor]

    def _model(self, size: int, tensor: int) -> ModelCosts:
        shape, item = self.shape, self.item_bytes
        builder = Operators(
            shape=shape,
            layout=Layout(
                tensor=tensor,
                microbatch=size,
                precision=self.precision,
                gradient_bytes=item,
                divided_vocabulary=False,
                stack="stagewright",
            ),
            kernels=Kernels(device=self.device, precision=self.precision, fused_attention=False),
        )
        tokens = size * shape.sequence_length
        hidden = tokens * shape.width * item
        ends = shape.vocabulary * shape.width
        head_shares = ((0, ends * item),) if shape.tied else ()
        logits = tokens * shape.vocabulary * item
        *head, loss = builder.head()
        block = builder.block(experts=False)
        block_parameters = Amount(total=shape.block_parameters * item // tensor)
        units = [
            self._unit("embedding", None, (builder.embedding(),), Amount(total=ends * item), hidden),
            *(
                self._unit(f"block.{index}", f"block.{index}", block, block_parameters, hidden)
                for index in range(shape.num_layers)
            ),
            self._unit("head", None, head, Amount(total=ends * item, shares=head_shares), 0, more_saved=logits),
        ]
        units[0] = replace(units[0], recompute_saved_bytes=8 * tokens)  # the inputs are token ids
        per_block = (hidden, hidden)
        traffic = [
            TensorTraffic(),
            *[TensorTraffic(forward_bytes=per_block, backward_bytes=per_block)] * shape.num_layers,
        ]
        per_byte = 1 / (self.device.bandwidth_bytes_per_s * builder.kernels.constants.bandwidth_share)
        profile = Profile(
            model=self.name,
            device=f"{self.kind}:0",
            dtype=self.precision,
            batch_size=size,
            training=True,
            units=tuple(units),
            whole_forward=Time(median_s=sum(unit.forward.median_s for unit in units), spread_s=0.0),
            whole_backward=Time(median_s=sum(unit.backward_s for unit in units), spread_s=0.0),
            whole_macs=sum(unit.macs for unit in units),
            versions={},
            source="analytic",
        )
        overheads = ModelOverheads(
            loss_forward_s=loss.forward_s,
            loss_backward_s=loss.backward_s,
            loss_kept_bytes=logits,
            optimizer_s_per_byte=6 * per_byte,  # reads and writes of parameters, gradients and two optimizer states
            accumulate_s_per_byte=3 * per_byte,
        )
        tensors = (*traffic, TensorTraffic()) if tensor > 1 else None
        whole = self.model(size, 1).profile if tensor > 1 else None
        return ModelCosts(profile=profile, overheads=overheads, tensor=tensors, num_tensor=tensor, whole=whole)

    def _unit(
        self,
        name: str,
        block: str | None,
        operators: Sequence[Operator],
        parameters: Amount,
        crossing: int,
        more_saved: int = 0,
    ) -> UnitProfile:
        """Sum up operators; where the host enqueues kernels more slowly than they run, its time counts."""
        stack = STACKS["stagewright"]
        forward = sum(operator.forward_s for operator in operators)
        backward = sum(operator.backward_s for operator in operators)
        weight = sum(operator.weight_s for operator in operators)
        forward_host = stack.host_kernel_s * sum(operator.kernels for operator in operators)
        backward_host = stack.host_backward_s * sum(operator.backward_kernels for operator in operators)
        slower = max(1.0, backward_host / backward) if backward else 1.0
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
            macs=round(sum(operator.flops for operator in operators) / 2),
            forward=Time(median_s=max(forward, forward_host), spread_s=0.0),
            backward_input=Time(median_s=slower * (backward - weight), spread_s=0.0),
            backward_weight=Time(median_s=slower * weight, spread_s=0.0),
            output_bytes=crossing,
            saved_bytes=Amount(total=round(sum(operator.saved_bytes for operator in operators)) + more_saved),
            recompute_saved_bytes=crossing,
            crossing_bytes=crossing,
        )
