"""Strategies as people name them: serial, data (ddp), fsdp, hsdp, zero1, zero2, tensor, pipeline, expert,
context, a mesh.

pp            on 4 devices ─► pipeline=4
fsdp          on 2 devices ─► data=2, parameters sharded (FSDP, ZeRO-3)
hsdp          on 4 devices ─► data=4, parameters sharded in two groups of 2 that replicate each other
zero1, zero2  on 2 devices ─► data=2, optimizer states sharded; with zero2 gradients too
ep            on 4 devices ─► data=4,expert=4: replicas that divide the experts
dp=2,pp=2                  ─► data=2,pipeline=2
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stagewright.errors import UnknownName, UsageError
from stagewright.spec.plan import AXES, AXIS_ALIASES, Mesh

_ZERO_STAGES = {"zero1": 1, "zero2": 2, "fsdp": 3, "hsdp": 3}
STRATEGIES = ("serial", *AXES, *_ZERO_STAGES, "expert", "context")


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy on a number of devices."""

    mesh: Mesh
    zero: int = 0
    """ZeRO stage of its replicas: 3 is FSDP."""
    fsdp_shards: int | None = None
    """Replicas among which HSDP shards; None: all."""


def strategy_name(text: str) -> str:
    """Return a strategy's name without aliases; a mesh is returned as it is."""
    return AXIS_ALIASES.get(text.strip(), text.strip())


def parse_strategy(text: str, num_devices: int, fsdp_shards: int | None = None) -> Strategy:
    """Return a strategy on a number of devices; ``fsdp_shards``: those of HSDP, by default half of the replicas."""
    name = strategy_name(text)
    found = _SHARDED_AXIS.search(name)
    sharding = found[1] if found else name if name in _ZERO_STAGES else ""
    if "=" in name:
        words = [word.strip() for word in name.split(",")]
        if alone := [word for word in words if strategy_name(word) in STRATEGIES]:
            meshes = ",".join(word for word in words if word not in alone)
            raise UsageError(
                f"{text!r} mixes strategies with a mesh: separate them with spaces, like {' '.join((*alone, meshes))!r}"
            )
        mesh = Mesh.parse(_SHARDED_AXIS.sub("data=", name))
    elif name not in STRATEGIES:
        raise UnknownName("strategy", text, STRATEGIES, hint="(or a mesh, like data=2,pipeline=2)")
    else:
        mesh = Mesh() if name == "serial" else Mesh.parse(f"{'data' if sharding else name}={num_devices}")
    if sharding == "hsdp" and fsdp_shards is None:
        if mesh.data < 4 or mesh.data % 2:
            raise UsageError(
                f"hsdp shards in groups of replicas that replicate each other, and {mesh.data} replicas are not two "
                "groups of two or more: use fsdp, or 4 replicas"
            )
        fsdp_shards = mesh.data // 2
    zero = _ZERO_STAGES.get(sharding, 0)
    return Strategy(mesh, zero, fsdp_shards if zero == 3 else None)


_SHARDED_AXIS = re.compile(rf"\b({'|'.join(_ZERO_STAGES)})\s*=")


def sharding_name(shard: bool, zero: int, gather: str = "auto", shards: int | None = None) -> str:
    """Name what replicas shard: "FSDP", "FSDP per step", "HSDP of 2", "ZeRO-1", "ZeRO-2"; "" if nothing."""
    if shard:
        return ("FSDP" if shards is None else f"HSDP of {shards}") + {
            "step": " per step",
            "microbatch": " per micro-batch",
        }.get(gather, "")
    return f"ZeRO-{zero}" if zero else ""
