"""The rank of this process among the workers, and the device that it computes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stagewright.cluster.device import Device, has_gpu
from stagewright.errors import UsageError
from stagewright.machine.machine import spread_cores
from stagewright.spec.plan import Plan

LAUNCHER = "STAGEWRIGHT_LAUNCHER"
"""Environment variable with the process id of the local launcher, which watches its workers itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Ranks and addresses that the elastic agent assigned to this process."""

    rank: int = 0
    local_rank: int = 0
    num_workers: int = 1
    num_local: int = 1
    """Workers on this machine."""
    num_machines: int = 1
    """Machines, each with one agent."""
    store: tuple[str, int] | None = None
    """Host and port of the agent's store; None for a single process without an agent."""
    launcher: int | None = None
    """Process id of the local launcher; None under torchrun."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RankPlacement:
        """Read the variables that the elastic agent (torchrun's or the local launcher's) sets."""
        if "RANK" not in environment:
            return cls()
        try:
            return cls(
                rank=int(environment["RANK"]),
                local_rank=int(environment["LOCAL_RANK"]),
                num_workers=int(environment["WORLD_SIZE"]),
                num_local=int(environment.get("LOCAL_WORLD_SIZE", "1")),
                num_machines=int(environment.get("GROUP_WORLD_SIZE", "1")),
                store=(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
                launcher=int(environment[LAUNCHER]) if LAUNCHER in environment else None,
            )
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"RANK is set, but a variable that belongs to it is missing or wrong ({error}); start workers with "
                "torchrun, or unset RANK"
            ) from None


def choose_device(plan: Plan, placement: RankPlacement) -> Device:
    """Return the plan's device for this rank; without one, the GPU or core with this local rank."""
    if plan.devices:
        return Device.parse(plan.devices[placement.rank])
    if has_gpu():
        return Device.parse(f"cuda:{placement.local_rank}")
    cores = spread_cores()
    if placement.local_rank >= len(cores):
        raise UsageError(
            f"worker {placement.rank} has local rank {placement.local_rank}, but this machine has {len(cores)} cores "
            'and no GPU; start fewer workers here, or share cores with devices = ["cpu:0", "cpu:0", …] in the plan'
        )
    return Device.parse(f"cpu:{cores[placement.local_rank]}")
