"""The analytic forecast of a layout on a cluster: time, memory, tokens per second, MFU, and how sure it is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from stagewright.analytic.attention import context_attentions, rank_heads
from stagewright.analytic.hardware.devices import Accelerator, accelerator_of
from stagewright.analytic.hardware.kernels import Kernels
from stagewright.analytic.hardware.named_cluster import network_of, peak_flops, rank_limits, rank_speeds
from stagewright.analytic.layout import Layout
from stagewright.analytic.memory import RankMemory
from stagewright.analytic.pipeline import shared_parts
from stagewright.analytic.plan_layout import layout_of
from stagewright.analytic.shape import TransformerShape
from stagewright.analytic.stacks import STACKS
from stagewright.analytic.step import StepModel
from stagewright.cluster.cluster import Cluster
from stagewright.display import Displayed
from stagewright.errors import UsageError
from stagewright.spec.plan import ContextAttention, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticForecast(Displayed):
    """The predicted step of a layout."""

    step_s: float
    batch: int
    """Global batch in samples."""
    tokens_per_s: float
    mfu: float
    """Model FLOPs utilization: useful arithmetic over the peak of all devices."""
    memory: tuple[RankMemory, ...]
    """One entry per pipeline rank."""
    memory_limit_bytes: int | None
    """Memory of the smallest device."""
    parts: dict[str, float]
    """Seconds of the step by cause, on the bottleneck rank."""
    num_devices: int
    spread: float
    """Half-width of the interval as a factor: 0.1 means from step_s / 1.1 to step_s · 1.1."""
    source: str
    """Where the kernels' efficiency comes from: measured kernels, measured kernels scaled, or formulas."""
    price_per_hour: float | None = None
    """Cost of all devices for an hour; None: the cluster states no price."""
    rank_limits_bytes: tuple[int | None, ...] = ()
    """Memory of each pipeline rank's smallest device, where devices differ; (): all have memory_limit_bytes."""
    context_attention: ContextAttention | None = None
    """Attention of context parallel ranks: stated, or the faster kind; None: no context parallelism."""
    serial_s: float | None = None
    """Step time of the same batch on one device, whatever its memory; None: not computed."""

    @property
    def samples_per_s(self) -> float:
        """Samples per second."""
        return self.batch / self.step_s

    @property
    def speedup(self) -> float:
        """serial_s over step_s; NaN where it was not computed."""
        return math.nan if self.serial_s is None else self.serial_s / self.step_s

    @property
    def price_per_step(self) -> float | None:
        """Cost of a step."""
        return None if self.price_per_hour is None else self.price_per_hour * self.step_s / 3600

    @property
    def price_per_million_tokens(self) -> float | None:
        """Cost of a million tokens."""
        return None if self.price_per_hour is None else self.price_per_hour / (self.tokens_per_s * 3600) * 1e6

    @property
    def low_s(self) -> float:
        """Lower end of the interval."""
        return self.step_s / (1 + self.spread)

    @property
    def high_s(self) -> float:
        """Upper end of the interval."""
        return self.step_s * (1 + self.spread)

    @property
    def peak_memory_bytes(self) -> int:
        """The largest peak memory of any rank."""
        return max(rank.peak_bytes for rank in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank's peak memory is within its device's."""
        return not self.ranks_above_limit

    @property
    def ranks_above_limit(self) -> tuple[int, ...]:
        """The pipeline ranks whose peak memory is above their devices'."""
        limits = self.rank_limits_bytes or (self.memory_limit_bytes,) * len(self.memory)
        pairs = zip(self.memory, limits, strict=True)
        return tuple(rank.rank for rank, limit in pairs if limit is not None and rank.peak_bytes > limit)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "memory": [rank.to_dict() for rank in self.memory],
            "samples_per_s": self.samples_per_s,
            "price_per_step": self.price_per_step,
            "price_per_million_tokens": self.price_per_million_tokens,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "fits": self.fits,
        }


@lru_cache(maxsize=64)
def kernels_for(device: Accelerator, precision: str, fused_attention: bool) -> Kernels:
    """Return the kernel times of a device; cached, because kernels repeat from one layout to the next."""
    return Kernels(device=device, precision=precision, fused_attention=fused_attention)


def forecast_layout(
    shape: TransformerShape, layout: Layout, cluster: Cluster, device: Accelerator | None = None
) -> AnalyticForecast:
    """Forecast a step of a layout on a cluster.

    Args:
        shape: The model.
        layout: How its step is laid out.
        cluster: Devices and links.
        device: Rates of the first devices; None: those of the cluster.
    """
    check_layout(shape, layout, cluster)
    model = step_model(shape, layout, cluster, device)
    return forecast_model(model, cluster, layout.batch)


def forecast_plan(
    plan: Plan,
    shape: TransformerShape,
    cluster: Cluster,
    *,
    innermost: str = "pipeline",
    device: Accelerator | None = None,
) -> AnalyticForecast:
    """Forecast a step of a plan that the engine runs; blocks are divided by their times where the plan has no cuts."""
    model = plan_model(plan, shape, cluster, innermost=innermost, device=device)
    return forecast_model(model, cluster, plan.batch, plan)


def plan_model(
    plan: Plan, shape: TransformerShape, cluster: Cluster, *, innermost: str, device: Accelerator | None
) -> StepModel:
    """Return the model of a plan's step."""
    layout = layout_of(plan, shape.num_layers, innermost)
    check_layout(shape, layout, cluster)
    model = step_model(shape, layout, cluster, device)
    if layout.pipeline > 1 and not layout.layers and plan.split in ("optimal", "time"):
        return model.balanced()
    return model


def memory_limits(
    cluster: Cluster, layout: Layout, plan: Plan | None = None
) -> tuple[int | None, tuple[int | None, ...]]:
    """Return the memory of the smallest device, and of each pipeline rank's where they differ, or a plan's."""
    stated = None if plan is None else plan.memory_bytes
    smallest = _smaller(stated, *(group.memory_bytes for group in cluster.devices))
    return smallest, tuple(_smaller(stated, limit) for limit in rank_limits(cluster, layout))


def _smaller(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def fits(model: StepModel, cluster: Cluster, plan: Plan | None = None) -> bool:
    """Whether every rank's peak memory is within its devices'; much faster than a forecast."""
    smallest, by_rank = memory_limits(cluster, model.layout, plan)
    if by_rank:
        pairs = zip(model.memory(), by_rank, strict=True)
        return all(limit is None or rank.peak_bytes <= limit for rank, limit in pairs)
    return smallest is None or model.peak_memory_bytes() <= smallest


def check_layout(shape: TransformerShape, layout: Layout, cluster: Cluster) -> None:
    """Raise UsageError for a layout that does not fit the model or the number of devices."""
    if layout.num_devices > cluster.num_devices:
        raise UsageError(
            f"the layout needs {layout.num_devices} devices, but the cluster has {cluster.num_devices}; "
            "use a smaller mesh or a larger cluster"
        )
    stages = layout.pipeline * layout.virtual
    if stages > shape.num_layers + 2 and not layout.layers:  # embedding and head may be stages of their own
        raise UsageError(f"{stages} pipeline stages can't divide {shape.num_layers} blocks; use fewer")
    if layout.layers and sum(layout.layers) != shape.num_layers:
        raise UsageError(f"layers = {layout.layers} has {sum(layout.layers)} blocks, but the model {shape.num_layers}")
    if layout.expert > 1 and shape.experts is None:
        raise UsageError(f"the layout has {layout.expert} expert parallel ranks, but the model has no experts")
    if shape.experts is not None and shape.experts.num_experts % layout.expert:
        raise UsageError(
            f"{layout.expert} expert parallel ranks do not divide the model's {shape.experts.num_experts} experts"
        )
    if shape.num_heads % layout.tensor:
        raise UsageError(f"{layout.tensor} tensor parallel ranks do not divide the model's {shape.num_heads} heads")
    if shape.sequence_length < layout.context:
        raise UsageError(
            f"{layout.context} context parallel ranks can't divide a sequence of {shape.sequence_length} tokens, fewer "
            f"than ranks: use a longer sequence, or context = {shape.sequence_length} or less"
        )
    if layout.context > 1 and layout.context_attention not in (None, *context_attentions(shape, layout)):
        heads, key_heads = rank_heads(shape, layout)
        raise UsageError(
            f"{layout.context} context parallel ranks do not divide the {heads} attention heads and {key_heads} key "
            f"heads of a tensor rank for all-to-all attention on the stack {layout.stack!r}: use context_attention=ring"
        )
    if layout.stack != "stagewright" and shape.sequence_length % layout.context:
        raise UsageError(
            f"{layout.context} context parallel ranks do not divide a sequence of {shape.sequence_length} tokens, and "
            f'unequal shares run on the stack "stagewright" alone, not on {layout.stack!r}: use a multiple of '
            f"{layout.context} tokens"
        )


def step_model(
    shape: TransformerShape, layout: Layout, cluster: Cluster, device: Accelerator | None = None
) -> StepModel:
    """Return the model of a step on a cluster's devices and links, with the faster attention of context ranks that
    fits where the layout states none."""
    device = device or accelerator_of(cluster.devices[0])
    kernels = kernels_for(device, layout.precision, STACKS[layout.stack].fused_attention)
    network = network_of(cluster)
    speeds = rank_speeds(cluster, layout)
    layouts = [layout]
    if layout.context > 1 and layout.context_attention is None:
        layouts = [replace(layout, context_attention=kind) for kind in context_attentions(shape, layout)]
    models = [
        StepModel(
            shape=shape,
            layout=chosen,
            kernels=kernels,
            network=network,
            devices_speed=speeds,
            shared=shared_parts(shape, chosen, kernels, network),
        )
        for chosen in layouts
    ]
    if len(models) == 1:
        return models[0]
    return min(models, key=lambda model: (not fits(model, cluster), model.step()[0]))


def forecast_model(
    model: StepModel, cluster: Cluster, batch: int, plan: Plan | None = None, serial_s: float | None = None
) -> AnalyticForecast:
    """Return the forecast of a step's model.

    Args:
        model: The step's model.
        cluster: Devices, for their price and memory.
        batch: Global batch in samples.
        plan: The plan, which may state a limit of memory.
        serial_s: Step time on one device, where it is known.
    """
    shape, layout, device = model.shape, model.layout, model.kernels.device
    step_s, parts = model.step()
    tokens = batch * shape.sequence_length
    if len(cluster.devices) == 1:
        peak = device.flops(layout.precision) * layout.num_devices
    else:
        peak = peak_flops(cluster, layout.num_devices, layout.precision)
    smallest, by_rank = memory_limits(cluster, layout, plan)
    return AnalyticForecast(
        step_s=step_s,
        batch=batch,
        tokens_per_s=tokens / step_s,
        mfu=shape.model_flops_per_token * tokens / step_s / peak,
        memory=model.memory(),
        memory_limit_bytes=smallest,
        rank_limits_bytes=by_rank,
        parts=parts,
        num_devices=layout.num_devices,
        spread=_spread(device, layout, parts, step_s, hosts=layout.num_devices > model.network.devices_per_host),
        source=device.source,
        price_per_hour=cluster.price_per_hour(layout.num_devices),
        context_attention=layout.context_attention if layout.context > 1 else None,
        serial_s=serial_s,
    )


def _spread(device: Accelerator, layout: Layout, parts: dict[str, float], step_s: float, *, hosts: bool) -> float:
    """Return the half-width of the interval, so that four of five measured steps of the league fall inside.

    Kernels that were measured are surest. Network, pipeline messages between hosts and host time are less sure.
    """
    base = {"measured kernels": 0.10, "published kernels": 0.16}.get(device.source, 0.14)
    waiting = min(1.0, (parts["host"] + parts["gradient collectives"] + parts["tensor collectives"]) / step_s)
    return base + 0.15 * waiting + (0.05 + 0.10 * (layout.pipeline > 1) if hosts else 0.0)
