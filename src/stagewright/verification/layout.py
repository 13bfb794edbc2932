"""How a rank holds a tensor: whole, or as a part of a DTensor; and how the parts are assembled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Placement of a DTensor's local part; plain tensors have none."""

    placements: tuple[str, ...]
    """One for each mesh dimension: ``replicate``, ``shard:DIM``, ``strided:DIM`` (sharded after the later mesh
    dimensions, as FSDP2 does with tensor parallelism) or ``partial:OP``."""
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]


def split_dtensor(value: torch.Tensor) -> tuple[torch.Tensor, Layout | None]:
    """Return the local part of a tensor and its layout."""
    spec: Any = getattr(value, "_spec", None)
    to_local: Any = getattr(value, "to_local", None)
    if spec is None or to_local is None:
        return value, None
    local: Any = to_local()
    if hasattr(local, "wait"):  # an asynchronous collective
        local = local.wait()
    coordinate = spec.mesh.get_coordinate()
    names = []
    for placement in spec.placements:
        dim = getattr(placement, "dim", None)
        if type(placement).__name__ == "_StridedShard":
            names.append(f"strided:{dim}")
        elif dim is not None:
            names.append(f"shard:{dim}")
        elif placement.is_partial():
            names.append(f"partial:{placement.reduce_op}")
        else:
            names.append("replicate")
    return local, Layout(
        placements=tuple(names),
        mesh=tuple(spec.mesh.shape),
        coordinate=tuple(coordinate) if coordinate is not None else (),
    )


def join_parts(parts: Sequence[tuple[Layout, torch.Tensor]]) -> torch.Tensor:
    """Return the full tensor of parts that share a mesh.

    A later mesh dimension divides what an earlier one left, so the last one is joined first; strided shards were
    divided after all others and are joined before them.
    """
    held: Mapping[tuple[int, ...], torch.Tensor] = {layout.coordinate: part for layout, part in parts}
    placements = parts[0][0].placements
    strided = [index for index, name in enumerate(placements) if name.startswith("strided")]
    others = [index for index in reversed(range(len(placements))) if index not in strided]
    for axis in (*strided, *others):
        lines: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
        for coordinate, part in held.items():
            lines.setdefault((*coordinate[:axis], 0, *coordinate[axis + 1 :]), {})[coordinate[axis]] = part
        held = {
            start: _join_line([line[key] for key in sorted(line)], placements[axis]) for start, line in lines.items()
        }
    return next(iter(held.values()))


def _join_line(parts: Sequence[torch.Tensor], placement: str) -> torch.Tensor:
    kind, _, argument = placement.partition(":")
    if kind == "partial":
        total = torch.stack([part.double() for part in parts]).sum(0)
        return (total / len(parts) if argument == "avg" else total).to(parts[0].dtype)
    if kind in ("shard", "strided"):
        return torch.cat(list(parts), dim=int(argument))
    return parts[0]
