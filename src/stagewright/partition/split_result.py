"""A split of a model into stages, with the cost of each stage and each device, and a comparison of splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from stagewright.display import Displayed
from stagewright.errors import UnknownName
from stagewright.files.json_values import to_json
from stagewright.profiler.profile import StageTime
from stagewright.quantity import format_bytes, format_count, format_s
from stagewright.table import Cell, Column, Table, number_columns

MeasuredStages: TypeAlias = Sequence[Sequence[StageTime]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The cost of one stage for one micro-batch."""

    index: int
    device: int
    """Index of the device that runs the stage."""
    first: int
    last: int
    """Index of the last unit, included."""
    units: tuple[str, ...]
    parameters: int
    """Number of parameters, shared ones counted once."""
    macs: int
    """Multiply-accumulates of one forward pass."""
    forward_s: float
    backward_s: float
    """Backward time, including recomputation under activation checkpointing; 0 for inference."""
    link_s: float
    """P2P time of the link behind the stage, both directions in training; 0 for the last stage and for free links."""
    time_s: float
    """Forward, backward and link time."""
    busy_s: float
    """Time per micro-batch in steady state: time_s, or the longer of compute and link where these overlap."""
    sends_bytes: int
    """Bytes sent to the next stage; in training, gradients of the same size come back."""
    in_flight: int
    """Micro-batches held at once."""
    memory_bytes: int
    """Memory that the stage needs (see `memory`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCost:
    """The cost of one device: the sum over its stages (usually one)."""

    device: int
    busy_s: float
    """Time per micro-batch in steady state."""
    memory_bytes: int
    """Memory of its stages, shared parameters counted once."""
    memory_limit_bytes: int | None
    """Available memory; None: not limited."""

    @property
    def fits(self) -> bool:
        """Whether the stages fit in memory."""
        return self.memory_limit_bytes is None or self.memory_bytes <= self.memory_limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(Displayed):
    """Where a model is cut, and what each stage costs.

    A step of m micro-batches takes the first one through all stages, then one more in each interval of the bottleneck
    device:  step_s = Σ time_s + (m - 1) · bottleneck_s.  This is exact for inference. For training it is the estimate
    that planners use: a schedule may hide a part of the pipeline bubble, or lose more time by waiting.
    """

    policy: str
    model: str
    training: bool
    """Forward and backward, or forward alone."""
    num_microbatches: int | None
    """Micro-batches in a step; None: an endless stream."""
    cuts: tuple[int, ...]
    """Indices of the units to cut after."""
    cut_names: tuple[str, ...]
    """Names of the units to cut after."""
    stages: tuple[StageCost, ...]
    devices: tuple[DeviceCost, ...]
    bottleneck_s: float
    """Time of the bottleneck device for one micro-batch."""
    balance: float
    """Mean busy time of the devices over that of the bottleneck: 1 is perfect balance."""
    step_s: float | None
    """Time of one step; None for an endless stream."""
    serial_s: float
    """Single-device baseline: one micro-batch on the fastest device, without links and recomputation."""
    speedup_bound: float
    """Upper bound of the speed-up over the single-device baseline: m · serial_s / step_s."""

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def placement(self) -> tuple[int, ...]:
        """The device of each stage."""
        return tuple(stage.device for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether every device's stages fit in its memory."""
        return all(device.fits for device in self.devices)

    @property
    def sends_bytes(self) -> int:
        """Bytes that cross all cuts in one forward pass."""
        return sum(stage.sends_bytes for stage in self.stages)

    @property
    def peak_memory_bytes(self) -> int:
        """Memory of the device that needs most."""
        return max(device.memory_bytes for device in self.devices)

    def to_dict(self) -> dict[str, Any]:
        return {
            **to_json(self),
            "num_stages": self.num_stages,
            "num_devices": len(self.devices),
            "placement": list(self.placement),
            "sends_bytes": self.sends_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            "fits": self.fits,
            "devices": [{**to_json(device), "fits": device.fits} for device in self.devices],
        }

    def table(self, *, policies: Sequence[str] | None = None, measured: Sequence[StageTime] | None = None) -> Table:
        """Tabulate the stages of a split; the bottleneck stage is bold, the balance and speed-up bound are below."""
        reordered = self.placement != tuple(range(self.num_stages))
        has_links = any(stage.link_s for stage in self.stages)
        names = ["parameters", "MACs", "forward"]
        names += ["backward"] if self.training else []
        names += ["measured"] if measured is not None else []
        names += ["sends", "link", "memory"] if has_links else ["sends", "memory"]
        bottleneck_s = max(stage.busy_s for stage in self.stages)
        rows = []
        for stage in self.stages:
            cells = [str(stage.index)]
            if reordered:
                cells.append(str(stage.device))
            cells += [_unit_range(stage), format_count(stage.parameters), format_count(stage.macs)]
            cells.append(format_s(stage.forward_s))
            if self.training:
                cells.append(format_s(stage.backward_s))
            if measured is not None:
                cells.append(format_s(measured[stage.index].total_s))
            cells.append(format_bytes(stage.sends_bytes) if stage.sends_bytes else "–")
            if has_links:
                cells.append(format_s(stage.link_s) if stage.link_s else "–")
            cells.append(format_bytes(stage.memory_bytes))
            is_bottleneck = stage.busy_s == bottleneck_s and self.num_stages > 1
            rows.append(tuple(Cell(text, "strong" if is_bottleneck else "plain") for text in cells))
        return Table(
            title=f"{', '.join(policies or [self.policy])}: cut after {', '.join(self.cut_names) or 'nothing'}",
            columns=(
                *number_columns("stage", *(["device"] if reordered else [])),
                Column("units", wrap=True),
                *number_columns(*names),
            ),
            rows=tuple(rows),
            notes=(_summary(self),),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedPolicy:
    """A policy that can't be applied to this model, and why."""

    policy: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Displayed):
    """The splits of several policies, in the requested order; iterates over them."""

    splits: tuple[Split, ...]
    """One split for each policy that could be applied."""
    skipped: tuple[SkippedPolicy, ...] = ()
    """The policies that could not be applied."""

    def __iter__(self) -> Iterator[Split]:
        return iter(self.splits)

    def __len__(self) -> int:
        return len(self.splits)

    def __getitem__(self, key: int | str) -> Split:
        """Return a split by its position or by its policy."""
        if isinstance(key, int):
            return self.splits[key]
        by_policy = {split.policy: split for split in self.splits}
        if key not in by_policy:
            raise UnknownName("policy", key, by_policy)
        return by_policy[key]

    def to_dict(self) -> dict[str, Any]:
        return {"policies": [split.to_dict() for split in self.splits], "skipped": to_json(self.skipped)}

    def split_tables(self, measured: MeasuredStages = None) -> list[Table]:
        """Tabulate every split, with measured stage times where given; policies with equal cuts share one table."""
        groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for index, split in enumerate(self):
            groups.setdefault((split.cuts, split.placement), []).append(index)
        return [
            self[group[0]].table(
                policies=[self[index].policy for index in group], measured=measured[group[0]] if measured else None
            )
            for group in groups.values()
        ]

    def table(self, measured: MeasuredStages = None) -> Table:
        """Tabulate the policies, best first."""
        names = ["bottleneck"]
        names += ["measured"] if measured is not None else []
        names += ["balance", "speed-up\nbound", "sends\n(total)", "peak\nmemory"]
        order = sorted(
            range(len(self)), key=lambda index: (-self[index].speedup_bound, self[index].policy != "optimal")
        )
        rows = []
        for index in order:
            split = self[index]
            cells = [split.policy, ", ".join(split.cut_names), format_s(split.bottleneck_s)]
            if measured is not None:
                cells.append(format_s(max(time.total_s for time in measured[index])))
            cells += [f"{split.balance:.2f}", f"{split.speedup_bound:.2f} ×"]
            cells += [format_bytes(split.sends_bytes), format_bytes(split.peak_memory_bytes)]
            rows.append(tuple(cells))
        return Table(
            title=f"Policies, {_microbatches(self[0])}" if len(self) else "Policies",
            columns=(Column("policy"), Column("cut after", wrap=True), *number_columns(*names)),
            rows=tuple(rows),
            notes=tuple(f"left out: {skipped.reason}" for skipped in self.skipped),
        )


def _unit_range(stage: StageCost) -> str:
    if len(stage.units) == 1:
        return stage.units[0]
    return f"{stage.units[0]} … {stage.units[-1]} ({len(stage.units)})"


def _summary(split: Split) -> str:
    text = f"bottleneck {format_s(split.bottleneck_s)}, balance {split.balance:.2f}, "
    text += f"speed-up bound {split.speedup_bound:.2f} × {_microbatches(split)}"
    unfit = next((device for device in split.devices if not device.fits), None)
    if unfit is not None:
        text += (
            f"; does not fit: device {unfit.device} needs {format_bytes(unfit.memory_bytes)} "
            f"of {format_bytes(unfit.memory_limit_bytes or 0)}"
        )
    return text


def _microbatches(split: Split) -> str:
    if split.num_microbatches is None:
        return "with an endless stream"
    plural = "es" if split.num_microbatches != 1 else ""
    return f"with {split.num_microbatches} micro-batch{plural}"
