"""Workers that Slurm's `srun` starts without torchrun: ranks from Slurm's variables, a store in worker 0.

srun --ntasks 8 stagewright run plan.toml

SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NUM_TASKS    ─►  RANK, LOCAL_RANK, WORLD_SIZE
the first host of SLURM_STEP_NODELIST, the job's id  ─►  MASTER_ADDR, MASTER_PORT
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Iterator, Mapping, MutableMapping

_FIRST_PORT, _NUM_PORTS = 20_000, 20_000
_END_S = 60.0  # how long worker 0 keeps the store for the others


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task of `srun`; empty where another launcher or none started this process."""
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    port = _FIRST_PORT + (int(environment["SLURM_JOB_ID"]) * 31 + int(environment["SLURM_STEP_ID"])) % _NUM_PORTS
    num_machines = environment.get("SLURM_STEP_NUM_NODES", "1")
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(-(-int(environment["SLURM_STEP_NUM_TASKS"]) // int(num_machines))),
        "GROUP_WORLD_SIZE": num_machines,
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store below takes the place of the agent's
    }


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's compressed list: node[07-09,12],login ─► node07."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", hosts)
    return "" if match is None else match[1] + (match[2] or "")


@contextlib.contextmanager
def slurm_workers(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Set torchrun's variables under `srun`; worker 0 holds the store until all workers have left the block."""
    variables = slurm_variables(environment)
    if not variables:
        yield
        return
    environment.update(variables)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    is_first = variables["RANK"] == "0"
    host, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    store = TCPStore(host, port, is_master=is_first, wait_for_workers=False, timeout=datetime.timedelta(seconds=300))
    yield
    store.set(f"left {variables['RANK']}", "")
    if is_first:
        others = [f"left {rank}" for rank in range(1, int(variables["WORLD_SIZE"]))]
        with contextlib.suppress(RuntimeError):  # one ended early, and has reported it
            store.wait(others, datetime.timedelta(seconds=_END_S))
