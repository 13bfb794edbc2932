"""Measured costs of a step that are not in the units' profile. None of them is a fitted correction factor.

    per action   executor overhead                  per P2P op      device time at both ends
    per step     start, end, batch splitting        per collective  compute slowed down by it, and its speed meanwhile
    loss         forward and backward, per sample   optimizer       per parameter byte
    gradient accumulation, per byte                 contention      compute when all devices of a host are busy

The defaults describe an ideal machine. `planner.calibration` measures this machine. For a cluster that is not
available here, the device's overheads are kept and the links come from the cluster file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOverheads:
    """Costs of a model's step on a device, apart from its units."""

    loss_forward_s: float = 0.0
    """Loss of one micro-batch of the profiled size."""
    loss_backward_s: float = 0.0
    loss_kept_bytes: int = 0
    """Activations that the loss saves for backward."""
    optimizer_s_per_byte: float = 0.0
    """Optimizer step, per parameter byte."""
    accumulate_s_per_byte: float = 0.0
    """Gradient accumulation, per gradient byte."""
    split_input: float = 1.0
    """Slowdown of the input-gradient half of a split backward, relative to its part of an unsplit one."""
    split_weight: float = 1.0
    """Slowdown of the weight-gradient half."""
    split_held_share: float = 0.0
    """Extra memory held between the halves, as a fraction of the saved activations. 0 on a CPU."""
    statistics_s: float = 0.0
    """Device time to average batch norm's running statistics over replicas."""
    statistics_bytes: int = 0
    """Bytes of that average's all-reduce."""
    loss_forward_working_bytes: int = 0
    """Temporary memory of the loss forward above its start. 0 on a CPU, as are the fields below."""
    loss_backward_working_bytes: int = 0
    """Temporary memory of the loss backward."""
    optimizer_working_share: float = 0.0
    """Temporary memory of the optimizer step, per parameter byte."""
    workspace_bytes: int = 0
    """Memory that libraries hold permanently (cuBLAS workspaces)."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelOverheads:
        """Read a dictionary; keys missing from older files get their defaults."""
        return cls(**{entry.name: data.get(entry.name, entry.default) for entry in fields(cls)})


_JSON_KEYS = {"contention": "crowding"}  # fields whose key in calibration files differs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOverheads:
    """Costs of the engine on a machine, apart from compute and bytes on links."""

    action_s: float = 0.0
    """Executor overhead per action."""
    step_s: float = 0.0
    """Overhead per step."""
    chunk_s: float = 0.0
    """Overhead per micro-batch before the first action: splitting the batch."""
    message_s: float = 0.0
    """Device time per P2P send or receive."""
    message_s_per_byte: float = 0.0
    """Device time per byte sent or received."""
    collective_share: float = 0.0
    """Fraction of the device's time that an overlapped collective takes: large on one core, small on a GPU."""
    collective_pace: float = 1.0
    """Speed of a collective overlapped with compute, relative to its speed alone."""
    fsdp_unit_s: float = 0.0
    """Device time of FSDP's hooks in a step, per unit: two all-gathers and one reduce-scatter. 0 if not measured."""
    fsdp_s_per_byte: float = 0.0
    """Device time of FSDP's copies in a step, per byte of parameters."""
    contention: float = 0.0
    """Relative slowdown of compute when a host's devices are busy at once, until the slowest is done. Measured with
    two devices. More devices are assumed to add none: multiplying the value would multiply its noise."""

    @property
    def collective_cost(self) -> float:
        """Compute time lost per second of an overlapped collective."""
        return min(1.0, self.collective_share / self.collective_pace)

    def contention_factor(self, num_on_host: int) -> float:
        """Return the factor on compute time with that many busy devices on a host."""
        return 1.0 + self.contention if num_on_host > 1 else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {_JSON_KEYS.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineOverheads:
        """Read a dictionary; keys missing from older files get the values of an ideal machine."""
        keys = {entry.name: _JSON_KEYS.get(entry.name, entry.name) for entry in fields(cls)}
        return cls(**{entry.name: float(data.get(keys[entry.name], entry.default)) for entry in fields(cls)})
