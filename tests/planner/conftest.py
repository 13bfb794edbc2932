"""A model made of numbers that can be asked for at any size of micro-batch, as the planner asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from made_profiles import profile_of, unit
from stagewright.cluster.cluster import Cluster, DeviceGroup, Link, Links
from stagewright.planner.costs.measure import ModelCosts
from stagewright.planner.costs.source import plan_costs_of
from stagewright.planner.forecast import PreparedPlan, prepare_plan
from stagewright.profiler.profile import Amount, Time, UnitProfile
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.simulator.costs.tensor_traffic import TensorTraffic
from stagewright.spec.plan import Mesh, ModelSpec, Plan

SLOW = Link(bandwidth_bytes_per_s=100.0, latency_s=0.05)
OVERHEADS = ModelOverheads(loss_forward_s=0.1, loss_backward_s=0.1, loss_kept_bytes=8, optimizer_s_per_byte=1e-3)


@dataclass(frozen=True, kw_only=True)
class MadeSource:
    """Units whose times and activations go with the samples, and of which a tensor axis takes its share."""

    # The units, for one sample.
    units: tuple[UnitProfile, ...]
    # Numbers of workers that may share a layer.
    tensors: tuple[int, ...] = (1,)
    # Loss for one sample, and optimiser.
    overheads: ModelOverheads = OVERHEADS

    @property
    def num_units(self) -> int:
        return len(self.units)

    def tensor_sizes(self, most: int) -> list[int]:
        return [size for size in self.tensors if size <= most]

    @property
    def num_experts(self) -> int:
        return self.model(1, 1).num_experts

    def measure_size(self, size: int, tensor: int) -> bool:
        return False

    def model(self, size: int, tensor: int) -> ModelCosts:
        profile = profile_of([sized_unit(one, size, tensor) for one in self.units], batch_size=size)
        if tensor == 1:
            return ModelCosts(profile=profile, overheads=self._terms(size))
        once = (10 * size,)
        return ModelCosts(
            profile=profile,
            overheads=self._terms(size),
            tensor=(TensorTraffic(forward_bytes=once, backward_bytes=once),) * len(self.units),
            num_tensor=tensor,
            whole=self.model(size, 1).profile,
        )

    def _terms(self, size: int) -> ModelOverheads:
        overheads = self.overheads
        return replace(
            overheads,
            loss_forward_s=size * overheads.loss_forward_s,
            loss_backward_s=size * overheads.loss_backward_s,
            loss_kept_bytes=size * overheads.loss_kept_bytes,
        )

    def prepared(self, plan: Plan, cluster: Cluster, **more: Any) -> PreparedPlan:
        """A plan over this model, with what its forecast needs."""
        return prepare_plan(plan, plan_costs_of(self, plan), cluster, source=self, **more)


@dataclass(frozen=True, kw_only=True)
class FixedSource(MadeSource):
    """The same, but a micro-batch takes as long as if it had some samples more: larger ones take less for each."""

    # Those samples.
    more: int = 6

    def model(self, size: int, tensor: int) -> ModelCosts:
        found, longer = super().model(size, tensor), super().model(size + self.more, tensor)
        pairs = zip(found.profile.units, longer.profile.units, strict=True)
        names = ("forward", "backward_input", "backward_weight")
        units = [replace(one, **{name: getattr(other, name) for name in names}) for one, other in pairs]
        whole = None if found.whole is None else self.model(size, 1).profile
        return replace(found, profile=profile_of(units, batch_size=size), whole=whole)


def sized_unit(one: UnitProfile, size: int, tensor: int = 1) -> UnitProfile:
    def times(found: Time) -> Time:
        return Time(median_s=size * found.median_s / tensor, spread_s=0.0)

    return replace(
        one,
        forward=times(one.forward),
        backward_input=times(one.backward_input),
        backward_weight=times(one.backward_weight),
        parameter_bytes=Amount(total=one.parameter_bytes.total // tensor),
        saved_bytes=Amount(total=size * one.saved_bytes.total // tensor),
        recompute_saved_bytes=size * one.recompute_saved_bytes,
        crossing_bytes=size * one.crossing_bytes,
        output_bytes=size * one.output_bytes,
    )


def random_units(count: int, seed: int) -> tuple[UnitProfile, ...]:
    """Units that differ in everything."""
    draw = np.random.default_rng(seed)
    return tuple(
        unit(
            f"u{at}",
            float(draw.uniform(0.2, 2)),
            (float(draw.uniform(0.2, 2)), float(draw.uniform(0.2, 2))),
            parameter_bytes=Amount(total=int(draw.integers(8, 2000)) // 8 * 8),
            saved_bytes=Amount(total=int(draw.integers(20, 400)) // 4 * 4),
            crossing_bytes=int(draw.integers(1, 20)),
        )
        for at in range(count)
    )


def cluster_of(count: int, link: Link = SLOW, **fields: Any) -> Cluster:
    """Devices that are alike, on one host."""
    return Cluster(devices=(DeviceGroup(kind="cpu", count=count, **fields),), links=Links(intra_host=link))


def plan_of(mesh: Mesh | None = None, batch: int = 8, **fields: Any) -> Plan:
    return Plan(model=ModelSpec(name="made"), batch=batch, mesh=mesh or Mesh(), **fields)


def equal_amounts(units: Sequence[UnitProfile]) -> list[dict[str, Any]]:
    """All of units that is counted and not timed, for comparing models of different origin."""
    names = ("parameters", "parameter_bytes", "saved_bytes", "buffer_bytes", "macs", "output_bytes", "crossing_bytes")
    return [{name: getattr(one, name) for name in (*names, "recompute_saved_bytes")} for one in units]


def layers_to_recompute(count: int) -> list[UnitProfile]:
    """Equal layers, each of which saves 1000 bytes, or 50 if it is recomputed."""
    return [
        unit(
            f"layers.{index}",
            1.0,
            (1.0, 1.0),
            saved_bytes=Amount(total=1000),
            recompute_saved_bytes=50,
            output_bytes=50,
            crossing_bytes=50,
            parameter_bytes=Amount(total=100),
        )
        for index in range(count)
    ]
