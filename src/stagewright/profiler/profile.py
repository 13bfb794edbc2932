"""The profile: what every unit of a model costs on one kind of device, as plain values.

Pure Python, no torch: splitting, planning and forecasting read these values, and they are saved as JSON.
What several units hold in common (a tied weight, a tensor that one unit returns and the next one saves) is
written down once, as a share, so that the amount of any contiguous range of units can be had exactly:

    unit      0        1        2            range 0..2 = 10 + 8 + 10 - 4 - 10 = 14
    total    10        8       10            range 1..2 =      8 + 10          = 18   (0 is outside)
    shares         (0, 4)   (0, 10)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Amount", "Profile", "StageTime", "Time", "UnitProfile", "amount_of", "amounts_of_held"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A quantity that a unit holds, and how much of it earlier units hold too."""

    total: int
    """Everything that the unit holds."""
    shares: tuple[tuple[int, int], ...] = ()
    """(index of the latest earlier unit that holds it too, amount in common), by rising index."""

    def added(self, first: int) -> int:
        """What no earlier unit holds, of the units from ``first`` on."""
        return self.total - sum(part for earlier, part in self.shares if earlier >= first)

    def to_dict(self) -> dict[str, Any]:
        return {"total": self.total, "shares": [list(share) for share in self.shares]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Amount:
        shares = tuple((int(index), int(amount)) for index, amount in data["shares"])
        return cls(total=int(data["total"]), shares=shares)


def amount_of(amounts: Sequence[Amount], first: int, last: int) -> int:
    """The amount of the units first..last, both included, with what they have in common counted once."""
    held = amounts[first : last + 1]
    shared = sum(amount for one in held for index, amount in one.shares if index >= first)
    return sum(one.total for one in held) - shared


def amounts_of_held(held: Sequence[Mapping[Hashable, int]]) -> tuple[Amount, ...]:
    """The amounts of units that each hold the given things, each thing with its size."""
    latest: dict[Hashable, int] = {}
    amounts = []
    for index, things in enumerate(held):
        shares: dict[int, int] = {}
        for thing, size in things.items():
            if thing in latest:
                shares[latest[thing]] = shares.get(latest[thing], 0) + size
            latest[thing] = index
        amounts.append(Amount(total=sum(things.values()), shares=tuple(sorted(shares.items()))))
    return tuple(amounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """A measured time."""

    median_s: float
    """The median over the repeats."""
    spread_s: float
    """The interquartile range over the repeats."""

    def to_dict(self) -> dict[str, Any]:
        return {"median_s": self.median_s, "spread_s": self.spread_s}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Time:
        return cls(median_s=float(data["median_s"]), spread_s=float(data["spread_s"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitProfile:
    """What one call of one unit costs."""

    name: str
    """The call's unique name: "encoder.layer.3", or "encoder.layer.3@2" for a second call."""
    kind: str
    """The unit's class name."""
    block: str | None
    """The repeated block that the call lies in; None for the stem and the head."""
    parameters: Amount
    """Parameters, by number of elements."""
    parameter_bytes: Amount
    """Parameters, by bytes."""
    buffer_bytes: int
    """Buffers of the unit, by bytes."""
    macs: int
    """Multiply-accumulates of one forward pass."""
    forward: Time
    """One forward pass, with the operations between units that run in its stage."""
    backward_input: Time
    """The backward pass as far as the gradients of the unit's inputs need it; 0 where no input needs one. That of the
    operations between units is in it."""
    backward_weight: Time
    """The rest of the backward pass: the gradients of the unit's parameters."""
    output_bytes: int
    """The tensors that the unit returns."""
    kept_bytes: Amount
    """What autograd keeps from forward to backward, parameters and buffers left out."""
    recompute_kept_bytes: int
    """What is kept instead when the unit is recomputed in the backward pass: its inputs."""
    crossing_bytes: int
    """What crosses a cut right after this unit; 0 for the last one."""
    forward_working_bytes: int = 0
    """How far an allocator's memory rises above the start of a forward pass, results among it; on a CPU, by tensors
    that an inference makes, and 0 in training."""
    backward_working_bytes: int = 0
    """… and of a backward pass, gradients among it."""
    glue_s: float = 0.0
    """Of the times above, what the operations between units take."""

    @property
    def backward_s(self) -> float:
        """The whole backward pass of the unit."""
        return self.backward_input.median_s + self.backward_weight.median_s

    @property
    def total_s(self) -> float:
        """Forward and backward pass of the unit."""
        return self.forward.median_s + self.backward_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "block": self.block,
            "parameters": self.parameters.to_dict(),
            "parameter_bytes": self.parameter_bytes.to_dict(),
            "buffer_bytes": self.buffer_bytes,
            "macs": self.macs,
            "forward": self.forward.to_dict(),
            "backward_input": self.backward_input.to_dict(),
            "backward_weight": self.backward_weight.to_dict(),
            "output_bytes": self.output_bytes,
            "kept_bytes": self.kept_bytes.to_dict(),
            "recompute_kept_bytes": self.recompute_kept_bytes,
            "crossing_bytes": self.crossing_bytes,
            "forward_working_bytes": self.forward_working_bytes,
            "backward_working_bytes": self.backward_working_bytes,
            "glue_s": self.glue_s,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> UnitProfile:
        return cls(
            name=data["name"],
            kind=data["kind"],
            block=data["block"],
            parameters=Amount.from_dict(data["parameters"]),
            parameter_bytes=Amount.from_dict(data["parameter_bytes"]),
            buffer_bytes=int(data["buffer_bytes"]),
            macs=int(data["macs"]),
            forward=Time.from_dict(data["forward"]),
            backward_input=Time.from_dict(data["backward_input"]),
            backward_weight=Time.from_dict(data["backward_weight"]),
            output_bytes=int(data["output_bytes"]),
            kept_bytes=Amount.from_dict(data["kept_bytes"]),
            recompute_kept_bytes=int(data["recompute_kept_bytes"]),
            crossing_bytes=int(data["crossing_bytes"]),
            forward_working_bytes=int(data.get("forward_working_bytes", 0)),
            backward_working_bytes=int(data.get("backward_working_bytes", 0)),
            glue_s=float(data.get("glue_s", 0.0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """What one stage was measured to take, run as a whole."""

    forward: Time
    """One forward pass."""
    backward_s: float
    """The whole backward pass; 0 where not training."""
    backward_spread_s: float
    """Its interquartile range."""

    @property
    def total_s(self) -> float:
        """Forward and backward pass."""
        return self.forward.median_s + self.backward_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "forward_s": self.forward.median_s,
            "backward_s": self.backward_s,
            "total_s": self.total_s,
            "spread_s": self.forward.spread_s + self.backward_spread_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a model costs, unit by unit and as a whole, on one kind of device."""

    model: str
    """The model's name."""
    device: str
    """The device as it was asked for: "cpu:0-1", "cuda:0"."""
    dtype: str
    """The parameters' dtype: "float32"."""
    batch_size: int
    """Samples in the batch that was measured."""
    training: bool
    """Whether forward and backward were measured, or forward alone without gradients."""
    units: tuple[UnitProfile, ...]
    """The unit calls in order."""
    whole_forward: Time
    """One forward pass of the whole model, measured in the same rounds as its units; 0 where it does not fit there."""
    whole_backward: Time
    """One backward pass of the whole model; 0 where not training, or where it does not fit."""
    whole_macs: int
    """MACs of the whole model by torch's own counter."""
    versions: dict[str, str]
    """Versions of the libraries that were measured with."""
    source: str = field(default="measured", compare=False)
    """Where these are from: "cache", "measured", "measured: …" and why the cache was refused, or "line" between two
    that were. Not saved."""
    age_s: float = field(default=0.0, compare=False)
    """How long ago it was measured, where it is from the cache. Not saved."""

    @property
    def has_whole(self) -> bool:
        """Whether the whole model was measured beside its units: it fits on the device."""
        return self.whole_forward.median_s > 0

    @property
    def coverage(self) -> float:
        """The units' times, summed, over the whole model's time: 1 where the units explain the whole."""
        whole_s = self.whole_forward.median_s + self.whole_backward.median_s
        return sum(unit.total_s for unit in self.units) / whole_s if whole_s else 1.0

    @property
    def glue_share(self) -> float:
        """The share of the units' times that is what lies between them."""
        summed_s = sum(unit.total_s for unit in self.units)
        return sum(unit.glue_s for unit in self.units) / summed_s if summed_s else 0.0

    @property
    def parameters(self) -> int:
        """Parameters that the units hold, each counted once."""
        return amount_of([unit.parameters for unit in self.units], 0, len(self.units) - 1)

    @property
    def kept_bytes(self) -> int:
        """What a whole pass keeps for backward, each storage counted once."""
        return amount_of([unit.kept_bytes for unit in self.units], 0, len(self.units) - 1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "batch_size": self.batch_size,
            "training": self.training,
            "units": [unit.to_dict() for unit in self.units],
            "whole_forward": self.whole_forward.to_dict(),
            "whole_backward": self.whole_backward.to_dict(),
            "whole_macs": self.whole_macs,
            "versions": dict(self.versions),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        return cls(
            model=data["model"],
            device=data["device"],
            dtype=data["dtype"],
            batch_size=int(data["batch_size"]),
            training=bool(data["training"]),
            units=tuple(UnitProfile.from_dict(unit) for unit in data["units"]),
            whole_forward=Time.from_dict(data["whole_forward"]),
            whole_backward=Time.from_dict(data["whole_backward"]),
            whole_macs=int(data["whole_macs"]),
            versions=dict(data["versions"]),
        )
