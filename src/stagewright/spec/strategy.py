"""Strategies as people name them: serial, data (dp, ddp), fsdp, tensor (tp), pipeline (pp), expert (ep), or a mesh.

pp            on 4 devices ─► pipeline=4
fsdp          on 2 devices ─► data=2, parameters sharded (FSDP)
ep            on 4 devices ─► data=4,expert=4: replicas that divide the experts
dp=2,pp=2                  ─► data=2,pipeline=2
"""

from __future__ import annotations

import re

from stagewright.errors import UnknownName
from stagewright.spec.plan import AXES, AXIS_ALIASES, Mesh

STRATEGIES = ("serial", *AXES, "fsdp", "expert")


def strategy_name(text: str) -> str:
    """Return a strategy's name without aliases; a mesh is returned as it is."""
    return AXIS_ALIASES.get(text.strip(), text.strip())


def parse_strategy(text: str, num_devices: int) -> tuple[Mesh, bool]:
    """Return the mesh of a strategy on a number of devices, and whether it is FSDP."""
    name = strategy_name(text)
    if "=" in name:
        return Mesh.parse(re.sub(r"\bfsdp\s*=", "data=", name)), re.search(r"\bfsdp\b", name) is not None
    if name not in STRATEGIES:
        raise UnknownName("strategy", text, STRATEGIES, hint="(or a mesh, like data=2,pipeline=2)")
    if name == "serial":
        return Mesh(), False
    return Mesh.parse(f"{'data' if name == 'fsdp' else name}={num_devices}"), name == "fsdp"
