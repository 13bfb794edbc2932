"""The cost of a given split: every stage, every device, the step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from stagewright.errors import SplitError, UsageError
from stagewright.partition.conditions import Conditions
from stagewright.partition.memory import StageMemory
from stagewright.partition.split_result import DeviceCost, Split, StageCost
from stagewright.profiler.profile import Profile, amount_of


def is_training(profile: Profile, conditions: Conditions) -> bool:
    """Whether the split is for training; raise an error if the profile has no backward times."""
    if conditions.training and not profile.training:
        raise UsageError(
            f"the profile of {profile.model!r} has no backward times, which a split for training needs: "
            "profile the model for training"
        )
    return profile.training if conditions.training is None else conditions.training


def unit_times(profile: Profile, conditions: Conditions) -> list[tuple[float, float]]:
    """Return (forward, backward) of every unit on the profiled device; backward includes recomputation."""
    training = is_training(profile, conditions)
    times = []
    for unit in profile.units:
        forward_s = unit.forward.median_s
        recompute_s = forward_s if conditions.recompute else 0.0
        times.append((forward_s, unit.backward_s + recompute_s if training else 0.0))
    return times


def assess(
    profile: Profile, policy: str, cuts: Sequence[int], conditions: Conditions, placement: Sequence[int] | None = None
) -> Split:
    """Compute the costs of the split that cuts after those units; stage i is on device i by default."""
    num_units = len(profile.units)
    if list(cuts) != sorted(set(cuts)) or any(not 0 <= cut < num_units - 1 for cut in cuts):
        raise SplitError(
            f"policy {policy!r} cuts after the units {list(cuts)}, but cuts must be increasing and within 0 … "
            f"{num_units - 2} for {num_units} units"
        )
    placement = range(len(cuts) + 1) if placement is None else placement
    if len(placement) != len(cuts) + 1 or set(placement) != set(range(max(placement, default=0) + 1)):
        raise SplitError(
            f"policy {policy!r} places {len(cuts) + 1} stages on the devices {list(placement)}: give one device per "
            "stage, numbered from 0 without gaps"
        )
    memory = StageMemory(profile, conditions, training=is_training(profile, conditions))
    bounds = list(zip((0, *(cut + 1 for cut in cuts)), (*cuts, num_units - 1), strict=True))
    stages = tuple(
        _stage(profile, conditions, memory, index, first, last, placement) for index, (first, last) in enumerate(bounds)
    )
    devices = tuple(_device(conditions, memory, stages, device) for device in range(max(placement) + 1))
    bottleneck_s = max(device.busy_s for device in devices)
    first_microbatch_s = sum(stage.time_s for stage in stages)
    serial_s = _serial_s(profile, conditions, len(devices))
    num_microbatches = conditions.num_microbatches
    if num_microbatches is None:
        step_s, speedup_bound = None, _ratio(serial_s, bottleneck_s)
    else:
        step_s = first_microbatch_s + (num_microbatches - 1) * bottleneck_s
        speedup_bound = _ratio(num_microbatches * serial_s, step_s)
    return Split(
        policy=policy,
        model=profile.model,
        training=is_training(profile, conditions),
        num_microbatches=num_microbatches,
        cuts=tuple(cuts),
        cut_names=tuple(profile.units[cut].name for cut in cuts),
        stages=stages,
        devices=devices,
        bottleneck_s=bottleneck_s,
        balance=_ratio(fmean(device.busy_s for device in devices), bottleneck_s),
        step_s=step_s,
        serial_s=serial_s,
        speedup_bound=speedup_bound,
    )


def _stage(
    profile: Profile,
    conditions: Conditions,
    memory: StageMemory,
    index: int,
    first: int,
    last: int,
    placement: Sequence[int],
) -> StageCost:
    num_stages, device = len(placement), placement[index]
    units, times = profile.units[first : last + 1], unit_times(profile, conditions)[first : last + 1]
    forward_s = sum(forward for forward, _ in times) / conditions.speed(device)
    backward_s = sum(backward for _, backward in times) / conditions.speed(device)
    sends_bytes, link_s = 0, 0.0
    if index < num_stages - 1:
        sends_bytes = units[-1].crossing_bytes
        link_s = conditions.link_s(sends_bytes, training=is_training(profile, conditions))
    compute_s = forward_s + backward_s
    in_flight = conditions.in_flight(index, num_stages)
    return StageCost(
        index=index,
        device=device,
        first=first,
        last=last,
        units=tuple(unit.name for unit in units),
        parameters=amount_of([unit.parameters for unit in profile.units], first, last),
        macs=sum(unit.macs for unit in units),
        forward_s=forward_s,
        backward_s=backward_s,
        link_s=link_s,
        time_s=compute_s + link_s,
        busy_s=max(compute_s, link_s) if conditions.overlap_links else compute_s + link_s,
        sends_bytes=sends_bytes,
        in_flight=in_flight,
        memory_bytes=memory.of(first, last, in_flight),
    )


def _device(conditions: Conditions, memory: StageMemory, stages: Sequence[StageCost], device: int) -> DeviceCost:
    placed = [stage for stage in stages if stage.device == device]
    shared_bytes = sum(
        memory.shared_bytes(stage.first, stage.last, earlier.first, earlier.last)
        for position, stage in enumerate(placed)
        for earlier in placed[:position]
    )
    return DeviceCost(
        device=device,
        busy_s=sum(stage.busy_s for stage in placed),
        memory_bytes=sum(stage.memory_bytes for stage in placed) - shared_bytes,
        memory_limit_bytes=conditions.memory_limit(device),
    )


def _serial_s(profile: Profile, conditions: Conditions, num_devices: int) -> float:
    """Return the time of one micro-batch on the fastest device alone."""
    training = is_training(profile, conditions)
    work_s = sum(unit.total_s if training else unit.forward.median_s for unit in profile.units)
    return work_s / max(conditions.speed(device) for device in range(num_devices))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0
