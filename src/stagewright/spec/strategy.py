"""Strategies as people name them: serial, data (ddp), fsdp, zero1, zero2, tensor, pipeline, expert, context, a mesh.

pp            on 4 devices ─► pipeline=4
fsdp          on 2 devices ─► data=2, parameters sharded (FSDP, ZeRO-3)
zero1, zero2  on 2 devices ─► data=2, optimizer states sharded; with zero2 gradients too
ep            on 4 devices ─► data=4,expert=4: replicas that divide the experts
dp=2,pp=2                  ─► data=2,pipeline=2
"""

from __future__ import annotations

import re

from stagewright.errors import UnknownName
from stagewright.spec.plan import AXES, AXIS_ALIASES, Mesh

_ZERO_STAGES = {"zero1": 1, "zero2": 2, "fsdp": 3}
STRATEGIES = ("serial", *AXES, *_ZERO_STAGES, "expert", "context")


def strategy_name(text: str) -> str:
    """Return a strategy's name without aliases; a mesh is returned as it is."""
    return AXIS_ALIASES.get(text.strip(), text.strip())


def parse_strategy(text: str, num_devices: int) -> tuple[Mesh, int]:
    """Return the mesh of a strategy on a number of devices, and the ZeRO stage of its replicas: 3 is FSDP."""
    name = strategy_name(text)
    if "=" in name:
        stages = "|".join(_ZERO_STAGES)
        found = re.search(rf"\b({stages})\s*=", name)
        return Mesh.parse(re.sub(rf"\b({stages})\s*=", "data=", name)), _ZERO_STAGES[found[1]] if found else 0
    if name not in STRATEGIES:
        raise UnknownName("strategy", text, STRATEGIES, hint="(or a mesh, like data=2,pipeline=2)")
    if name == "serial":
        return Mesh(), 0
    zero = _ZERO_STAGES.get(name, 0)
    return Mesh.parse(f"{'data' if zero else name}={num_devices}"), zero


def sharding_name(shard: bool, zero: int, gather: str = "auto") -> str:
    """Name what replicas shard: "FSDP", "FSDP per step", "ZeRO-1", "ZeRO-2"; "" if nothing."""
    if shard:
        return "FSDP" + {"step": " per step", "microbatch": " per micro-batch"}.get(gather, "")
    return f"ZeRO-{zero}" if zero else ""
