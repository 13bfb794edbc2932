"""The profile: what every unit of a model costs on one kind of device, as plain values.

Pure Python, no torch: splitting, planning and forecasting read these values, and they are saved as JSON. A tied weight,
or a tensor that one unit returns and the next one saves, is held by several units. Each such overlap is recorded once
as a share, so that the amount of any contiguous range of units is exact:

    unit      0        1        2            range 0..2 = 10 + 8 + 10 - 4 - 10 = 14
    total    10        8       10            range 1..2 =      8 + 10          = 18   (0 is outside)
    shares         (0, 4)   (0, 10)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stagewright.display import Displayed
from stagewright.files.json_values import from_json, to_json
from stagewright.quantity import format_bytes, format_count, format_s
from stagewright.table import Cell, Table, number_columns, text_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A quantity that a unit holds, and how much of it earlier units hold too."""

    total: int
    shares: tuple[tuple[int, int], ...] = ()
    """(index of the latest earlier unit that holds it too, shared amount), by ascending index."""

    def added(self, first: int) -> int:
        """Return the amount that no unit from ``first`` up to this one holds already."""
        return self.total - sum(amount for earlier, amount in self.shares if earlier >= first)


def amount_of(amounts: Sequence[Amount], first: int, last: int) -> int:
    """Return the amount of the units first..last, both included, with shared amounts counted once."""
    return sum(amount.added(first) for amount in amounts[first : last + 1])


def amounts_with_shares(sizes_by_unit: Sequence[Mapping[Hashable, int]]) -> tuple[Amount, ...]:
    """Return the amount of each unit, given the size of every item (parameter, storage) that it holds."""
    latest: dict[Hashable, int] = {}
    amounts = []
    for index, sizes in enumerate(sizes_by_unit):
        shares: dict[int, int] = {}
        for item, size in sizes.items():
            if item in latest:
                shares[latest[item]] = shares.get(latest[item], 0) + size
            latest[item] = index
        amounts.append(Amount(total=sum(sizes.values()), shares=tuple(sorted(shares.items()))))
    return tuple(amounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """A measured time over several repeats."""

    median_s: float
    spread_s: float
    """The interquartile range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProfile:
    """What recomputation of the attention inside one unit call costs."""

    saved_bytes: Amount
    """Activations that the unit saves then."""
    recomputed_bytes: int
    """Activations that the recomputation of one attention adds; the most, where a unit has several."""
    later_bytes: int
    """Part of `saved_bytes` that is saved after attention: backward frees it before it recomputes."""
    earlier_parameter_bytes: int
    """Parameters of the linear layers before attention: backward makes their gradients after it recomputes."""
    recompute: Time
    """The recomputation of one backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitProfile:
    """What one call of one unit costs."""

    name: str
    """Unique name of the call: "encoder.layer.3", or "encoder.layer.3@2" for a second call."""
    kind: str
    """Class name of the unit."""
    block: str | None
    """The repeated block that contains the call; None for the stem and the head."""
    parameters: Amount
    """Number of parameter elements."""
    parameter_bytes: Amount
    buffer_bytes: int
    macs: int
    """Multiply-accumulates of one forward pass."""
    forward: Time
    """One forward pass, including the glue operations that run in the unit's stage."""
    backward_input: Time
    """Input gradient (B), including the backward of glue operations; 0 where no input needs a gradient."""
    backward_weight: Time
    """Weight gradient (W): the rest of the backward pass."""
    output_bytes: int
    """Tensors that the unit returns."""
    saved_bytes: Amount
    """Activations that autograd saves for backward, without parameters and buffers (JSON: ``kept_bytes``)."""
    recompute_saved_bytes: int
    """Saved activations under activation checkpointing: the unit's inputs (JSON: ``recompute_kept_bytes``)."""
    crossing_bytes: int
    """Tensors that cross a cut right after this unit; 0 for the last unit."""
    forward_working_bytes: int = 0
    """Peak memory of a forward pass above its start, results included; on a CPU counted for inference only."""
    backward_working_bytes: int = 0
    """Peak memory of a backward pass above its start, gradients included."""
    largest_parameter_bytes: int = 0
    """The largest parameter."""
    glue_s: float = 0.0
    """Share of the times above that glue operations between units take."""
    attention: AttentionProfile | None = None
    """With `recompute = "attention"`; None: the unit has no attention, or was measured compiled or for inference."""

    @property
    def kept_bytes(self) -> Amount:
        """Former name of `saved_bytes`."""
        return self.saved_bytes

    @property
    def backward_s(self) -> float:
        """Time of the whole backward pass."""
        return self.backward_input.median_s + self.backward_weight.median_s

    @property
    def total_s(self) -> float:
        """Time of forward and backward."""
        return self.forward.median_s + self.backward_s

    def to_dict(self) -> dict[str, Any]:
        return {_KEYS.get(name, name): value for name, value in to_json(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> UnitProfile:
        return from_json(cls, {**data, **{name: data[key] for name, key in _KEYS.items()}})


_MAX_S = 1e6
"""The longest time of a unit that is read from a file; a longer one is damage."""
_KEYS = {"saved_bytes": "kept_bytes", "recompute_saved_bytes": "recompute_kept_bytes"}
"""JSON keys of a unit's fields, where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """The measured time of one stage, run as a whole."""

    forward: Time
    backward_s: float
    """The whole backward pass; 0 for inference."""
    backward_spread_s: float
    """Interquartile range of the backward pass."""

    @property
    def total_s(self) -> float:
        """Time of forward and backward."""
        return self.forward.median_s + self.backward_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "forward_s": self.forward.median_s,
            "backward_s": self.backward_s,
            "total_s": self.total_s,
            "spread_s": self.forward.spread_s + self.backward_spread_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Displayed):
    """The cost of a model, unit by unit and as a whole, on one kind of device."""

    model: str
    device: str
    """The device as requested: "cpu:0-1", "cuda:0"."""
    dtype: str
    """The parameters' dtype: "float32"."""
    batch_size: int
    """Samples in the measured batch."""
    training: bool
    """Whether forward and backward were measured, or forward alone without gradients."""
    units: tuple[UnitProfile, ...]
    """The unit calls in order."""
    whole_forward: Time
    """Forward pass of the whole model, measured in the same rounds as the units; 0 where it does not fit."""
    whole_backward: Time
    """Backward pass of the whole model; 0 for inference, or where it does not fit."""
    whole_macs: int
    """MACs of the whole model, measured in one run."""
    versions: dict[str, str]
    """Library versions at the time of the measurement."""
    first_pass_s: float = 0.0
    """On a GPU, forward and backward of the whole model from a standstill: less than both alone, because the host
    launches the one while the other runs. 0 on a CPU."""
    following_pass_s: float = 0.0
    """On a GPU, forward and backward right after another micro-batch's. 0 on a CPU."""
    source: str = field(default="measured", compare=False)
    """Origin of the numbers: "cache", "measured", "measured: …" with the reason why the cache was not used, or "line"
    for an interpolation. Not saved."""
    age_s: float = field(default=0.0, compare=False)
    """Age of a cached measurement. Not saved."""

    @property
    def has_whole(self) -> bool:
        """Whether the whole model was measured too, that is, whether it fits on the device."""
        return self.whole_forward.median_s > 0

    @property
    def coverage(self) -> float:
        """Sum of the units' times over the whole model's time: 1 where the units explain the whole."""
        whole_s = self.whole_forward.median_s + self.whole_backward.median_s
        return sum(unit.total_s for unit in self.units) / whole_s if whole_s else 1.0

    @property
    def glue_share(self) -> float:
        """Share of the units' times that glue operations take."""
        units_s = sum(unit.total_s for unit in self.units)
        return sum(unit.glue_s for unit in self.units) / units_s if units_s else 0.0

    @property
    def parameters(self) -> int:
        """Number of parameters, each counted once."""
        return amount_of([unit.parameters for unit in self.units], 0, len(self.units) - 1)

    @property
    def saved_bytes(self) -> int:
        """Saved activations of the whole model, each storage counted once."""
        return amount_of([unit.saved_bytes for unit in self.units], 0, len(self.units) - 1)

    def table(self) -> Table:
        """Tabulate the units: parameters, MACs, times, output, crossing and saved activations."""
        units = self.units
        names = ["parameters", "MACs", "forward"]
        if self.training:
            names += ["backward\n(input)", "backward\n(weight)"]
        names += ["output", "crossing"]
        if self.training:
            names += ["saved\nactivations", "saved with\nrecompute"]
        totals = [f"{len(units)} units", "", format_count(self.parameters), format_count(sum(u.macs for u in units))]
        totals.append(format_s(sum(unit.forward.median_s for unit in units)))
        if self.training:
            totals.append(format_s(sum(unit.backward_input.median_s for unit in units)))
            totals.append(format_s(sum(unit.backward_weight.median_s for unit in units)))
        totals += ["", ""]
        if self.training:
            totals += [format_bytes(self.saved_bytes), ""]
        mode = "training" if self.training else "inference"
        return Table(
            title=f"{self.model}: batch {self.batch_size}, {self.dtype}, {mode}, {self.device}",
            columns=(*text_columns("unit", "kind"), *number_columns(*names)),
            rows=(
                *(_unit_row(unit, training=self.training) for unit in units),
                tuple(Cell(text, "strong") for text in totals),
            ),
            notes=(_whole_model_note(self),),
        )

    def to_dict(self) -> dict[str, Any]:
        content = {**to_json(self), "units": [unit.to_dict() for unit in self.units]}
        return {name: value for name, value in content.items() if name not in ("source", "age_s")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        profile = from_json(cls, {**data, "units": tuple(UnitProfile.from_dict(unit) for unit in data["units"])})
        times = [part.median_s for unit in profile.units for part in (unit.forward, unit.backward_input)]
        times += [unit.backward_weight.median_s for unit in profile.units]
        if _has_huge_integer(data):
            raise ValueError("a number has more than 64 bits")
        if not all(0 <= seconds <= _MAX_S for seconds in times):
            raise ValueError(f"a time is not between 0 and {_MAX_S:.0f} s")
        return profile


def _has_huge_integer(value: Any) -> bool:
    """Whether a JSON value holds an integer that no array can hold."""
    if isinstance(value, Mapping):
        return any(_has_huge_integer(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_has_huge_integer(item) for item in value)
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _unit_row(unit: UnitProfile, *, training: bool) -> tuple[str, ...]:
    cells = [unit.name, unit.kind, format_count(unit.parameters.total), format_count(unit.macs)]
    cells.append(_format_time(unit.forward))
    if training:
        cells += [_format_time(unit.backward_input), _format_time(unit.backward_weight)]
    cells += [format_bytes(unit.output_bytes), format_bytes(unit.crossing_bytes)]
    if training:
        cells += [format_bytes(unit.saved_bytes.total), format_bytes(unit.recompute_saved_bytes)]
    return tuple(cells)


def _whole_model_note(profile: Profile) -> str:
    whole, coverage = "whole model: not measured, because it does not fit on the device", ""
    if profile.has_whole:
        whole = f"whole model: forward {format_s(profile.whole_forward.median_s)}"
        if profile.training:
            whole += f", backward {format_s(profile.whole_backward.median_s)}"
        coverage = f"; units sum to {profile.coverage:.1%} of its time"
    if profile.glue_share >= 0.005:
        coverage += f", of which glue operations between units take {profile.glue_share:.1%}"
    return f"{whole}, {format_count(profile.whole_macs)} MACs{coverage}"


def _format_time(time: Time) -> str:
    """Format the median ± half the interquartile range in percent."""
    if time.median_s == 0:
        return "–"
    return f"{format_s(time.median_s)} ±{50 * time.spread_s / time.median_s:.0f}%"
