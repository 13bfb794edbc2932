"""Linear interpolation of a model's costs between two measured micro-batch sizes.

seconds and bytes of a unit = a + b · samples
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from stagewright.planner.costs.measure import ModelCosts
from stagewright.profiler.profile import Amount, AttentionProfile, Profile, Time, UnitProfile
from stagewright.simulator.costs.expert_traffic import ExpertTraffic
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.simulator.costs.tensor_traffic import TensorTraffic

# Fields of ModelOverheads that are constants, of which the mean or the maximum is used; the others scale with samples.
_MEAN = (
    "optimizer_s_per_byte",
    "accumulate_s_per_byte",
    "split_input",
    "split_weight",
    "split_held_share",
    "statistics_s",
)
_MAXIMUM = ("optimizer_working_share", "workspace_bytes")
_UNIT_INTEGERS = (
    "macs",
    "output_bytes",
    "recompute_saved_bytes",
    "crossing_bytes",
    "forward_working_bytes",
    "backward_working_bytes",
)


def nearest_sizes(size: int, known: Sequence[int]) -> tuple[int, int]:
    """Return the two ascending sizes around another one, or the nearest two if it lies beyond all."""
    index = min(max(1, bisect.bisect(known, size)), len(known) - 1)
    return known[index - 1], known[index]


def interpolate_at(models: Sequence[ModelCosts], size: int) -> ModelCosts:
    """Return the costs at a size: measured, or interpolated between the two nearest."""
    known = {model.profile.batch_size: model for model in models}
    if size in known or len(known) == 1:
        return known.get(size, models[0])
    low, high = nearest_sizes(size, sorted(known))
    return interpolate(known[low], known[high], size)


def interpolate(small: ModelCosts, large: ModelCosts, size: int) -> ModelCosts:
    """Interpolate or extrapolate the costs of two measurements to another size, at least 0."""
    first, second = small.profile, large.profile
    line = _Line((size - first.batch_size) / (second.batch_size - first.batch_size))
    tensor = None
    if small.tensor is not None and large.tensor is not None:
        tensor = tuple(line.traffic(a, b) for a, b in zip(small.tensor, large.tensor, strict=True))
    whole = None
    if small.whole is not None and large.whole is not None:
        unsplit_small = ModelCosts(profile=small.whole, overheads=small.overheads)
        unsplit_large = ModelCosts(profile=large.whole, overheads=large.overheads)
        whole = interpolate(unsplit_small, unsplit_large, size).profile
    profile: Profile = replace(
        first,
        batch_size=size,
        source="line",
        units=tuple(line.unit(a, b) for a, b in zip(first.units, second.units, strict=True)),
        whole_forward=line.time(first.whole_forward, second.whole_forward),
        whole_backward=line.time(first.whole_backward, second.whole_backward),
        whole_macs=line.integer(first.whole_macs, second.whole_macs),
        first_pass_s=line.number(first.first_pass_s, second.first_pass_s),
        following_pass_s=line.number(first.following_pass_s, second.following_pass_s),
    )
    overheads = line.overheads(small.overheads, large.overheads)
    experts = None
    if small.experts is not None and large.experts is not None:
        experts = tuple(line.experts(a, b) for a, b in zip(small.experts, large.experts, strict=True))
    return ModelCosts(
        profile=profile, overheads=overheads, tensor=tensor, num_tensor=small.num_tensor, whole=whole, experts=experts
    )


class _Line:
    """Interpolates values; ``share`` is 0 at the first measurement and 1 at the second."""

    def __init__(self, share: float) -> None:
        self.share = share

    def number(self, first: float, second: float) -> float:
        return max(0.0, first + self.share * (second - first))

    def integer(self, first: float, second: float) -> int:
        return round(self.number(first, second))

    def time(self, first: Time, second: Time) -> Time:
        # Apart from noise, a larger batch never takes less time.
        minimum = 1e-9 if first.median_s else 0.0
        return Time(median_s=max(self.number(first.median_s, second.median_s), minimum), spread_s=0.0)

    def amount(self, first: Amount, second: Amount) -> Amount:
        shares = first.shares
        if [unit for unit, _ in first.shares] == [unit for unit, _ in second.shares]:
            pairs = zip(first.shares, second.shares, strict=True)
            shares = tuple((unit, self.integer(a, b)) for (unit, a), (_, b) in pairs)
        return Amount(total=self.integer(first.total, second.total), shares=shares)

    def unit(self, first: UnitProfile, second: UnitProfile) -> UnitProfile:
        values = {
            **self.by_name(first, second, self.integer, _UNIT_INTEGERS),
            **self.by_name(first, second, self.time, ("forward", "backward_input", "backward_weight")),
        }
        return replace(
            first,
            saved_bytes=self.amount(first.saved_bytes, second.saved_bytes),
            glue_s=self.number(first.glue_s, second.glue_s),
            attention=self.attention(first.attention, second.attention),
            **values,
        )

    def by_name(
        self, first: object, second: object, interpolate_field: Callable[[Any, Any], Any], names: Iterable[str]
    ) -> dict[str, Any]:
        """Interpolate fields of two values alike, by name."""
        return {name: interpolate_field(getattr(first, name), getattr(second, name)) for name in names}

    def attention(self, first: AttentionProfile | None, second: AttentionProfile | None) -> AttentionProfile | None:
        if first is None or second is None:
            return None
        return replace(
            first,
            saved_bytes=self.amount(first.saved_bytes, second.saved_bytes),
            recompute=self.time(first.recompute, second.recompute),
            **self.by_name(first, second, self.integer, ("recomputed_bytes", "later_bytes")),
        )

    def overheads(self, first: ModelOverheads, second: ModelOverheads) -> ModelOverheads:
        def value(name: str) -> float:
            a: float = getattr(first, name)
            b: float = getattr(second, name)
            if name in _MEAN:
                return (a + b) / 2
            if name in _MAXIMUM:
                return max(a, b)
            if name == "statistics_bytes":
                return int(a)
            return self.integer(a, b) if name.endswith("_bytes") else self.number(a, b)

        return ModelOverheads(**{entry.name: value(entry.name) for entry in fields(ModelOverheads)})  # type: ignore[arg-type]

    def experts(self, first: ExpertTraffic, second: ExpertTraffic) -> ExpertTraffic:
        rows = zip(first.row_bytes, second.row_bytes, strict=True)
        return replace(first, row_bytes=tuple(self.integer(a, b) for a, b in rows))

    def traffic(self, first: TensorTraffic, second: TensorTraffic) -> TensorTraffic:
        def sizes(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
            return tuple(self.integer(x, y) for x, y in zip(a, b, strict=True))

        return TensorTraffic(
            forward_bytes=sizes(first.forward_bytes, second.forward_bytes),
            backward_bytes=sizes(first.backward_bytes, second.backward_bytes),
            gathered_bytes=sizes(first.gathered_bytes, second.gathered_bytes),
            loss_bytes=sizes(first.loss_bytes, second.loss_bytes),
            sequence=replace(
                first.sequence,
                gathered_bytes=sizes(first.sequence.gathered_bytes, second.sequence.gathered_bytes),
                replicated_bytes=sizes(first.sequence.replicated_bytes, second.sequence.replicated_bytes),
                scattered_bytes=sizes(first.sequence.scattered_bytes, second.sequence.scattered_bytes),
                joined_bytes=sizes(first.sequence.joined_bytes, second.sequence.joined_bytes),
                divided_bytes=sizes(first.sequence.divided_bytes, second.sequence.divided_bytes),
            ),
        )
