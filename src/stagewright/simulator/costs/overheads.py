"""What a step costs beside the units themselves, each a measured number: nothing here is a factor to please.

    per action   the executor's own work            per message     device time at both ends
    per step     what begins and ends it, dealing   per collective  what it takes of computing, and its pace beside it
    loss         forward and backward, by sample    optimizer       by byte of parameters
    adding up    gradients of later micro-batches   crowding        compute when all devices of a host are busy

The defaults are an ideal machine. `planner.calibrate` measures them on this one; a cluster that nobody has here keeps
the device's own terms and takes its links from its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["EngineOverheads", "ModelOverheads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOverheads:
    """What a model's step costs on a device, beside its units."""

    loss_forward_s: float = 0.0
    """The loss of one micro-batch of the profiled size."""
    loss_backward_s: float = 0.0
    """Its backward pass."""
    loss_kept_bytes: int = 0
    """What it keeps from forward to backward."""
    optimizer_s_per_byte: float = 0.0
    """The optimiser's step, for each byte of parameters."""
    accumulate_s_per_byte: float = 0.0
    """Adding a gradient to the one that is there, for each byte."""
    split_input: float = 1.0
    """How much longer a backward in two halves takes than its parts in one piece: the inputs' half, the weights'."""
    split_weight: float = 1.0
    split_held_share: float = 0.0
    """What is held between its halves beside what forward kept, as a share of that. 0 on a CPU."""
    statistics_s: float = 0.0
    """Averaging batch norm's running statistics over replicas: work of the device, and bytes that are summed."""
    statistics_bytes: int = 0
    loss_forward_working_bytes: int = 0
    """How far an allocator's memory rises above the start of the loss, of its backward pass, and of the optimiser's
    step for each byte of parameters; and what libraries keep for themselves all along. 0 on a CPU."""
    loss_backward_working_bytes: int = 0
    optimizer_working_share: float = 0.0
    workspace_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelOverheads:
        """What an older file does not have is as by default."""
        return cls(**{one.name: data.get(one.name, one.default) for one in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOverheads:
    """What the engine costs on a machine, beside computing and bytes."""

    action_s: float = 0.0
    """Every action: the executor's own work."""
    step_s: float = 0.0
    """Every step: what begins and ends it."""
    chunk_s: float = 0.0
    """… and for each of its micro-batches, before the first action: dealing it out."""
    message_s: float = 0.0
    """Time of the device for each message that it sends or receives."""
    message_s_per_byte: float = 0.0
    """… and for each byte of it."""
    collective_share: float = 0.0
    """The share of the device's time that a collective takes while it runs beside computing: much on one core, little
    on a GPU."""
    collective_pace: float = 1.0
    """How fast a collective goes beside computing, of its speed alone."""
    crowding: float = 0.0
    """How much longer computing takes when a host's devices are busy at once and the slowest of them is waited for.
    Measured with two; more are taken to crowd each other no more than these: multiplied, so would be its noise."""

    @property
    def collective_cost(self) -> float:
        """Computing that is lost for each second of a collective that is hidden behind it."""
        return min(1.0, self.collective_share / self.collective_pace)

    def crowded(self, num_on_host: int) -> float:
        """How much longer computing takes beside that many busy devices, itself among them."""
        return 1.0 + self.crowding if num_on_host > 1 else 1.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineOverheads:
        """What an older file does not have is as on an ideal machine."""
        return cls(**{one.name: float(data.get(one.name, one.default)) for one in fields(cls)})
