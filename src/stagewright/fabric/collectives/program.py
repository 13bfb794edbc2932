"""What one rank does for one collective of one size: its sends and receives on each connection, in order.

    chunk        ├──────── 1 MiB ────────┤├──────── 1 MiB ────────┤
    slices       ├ 256K ┤├ 256K ┤├ …                                   slice i goes over stream i mod number

Chunks are cut into slices, so that one slice is added while the next is on its way. On each connection slices follow in
a fixed order; a send waits for the receives that wrote its slice in earlier steps (dataflow), not for the whole step.
Both ends derive the same order from the same moves, so a header need not say where a slice belongs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.fabric.collectives.collective import Collective

__all__ = ["SLICE_BYTES", "Program", "Transfer", "compile_program", "expected", "item_type", "payload"]

SLICE_BYTES = 256 * 1024
_MODULUS = 13  # payloads are small whole numbers: their sums are exact in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One slice on one connection."""

    index: int
    """Its place among the rank's receives, or among its sends."""
    step: int
    """The step of its move."""
    peer: int
    """The rank at the other end."""
    stream: int
    """Which of the connections to it."""
    offset: int
    """Where it begins in the rank's buffer, in bytes."""
    size: int
    """How long it is."""
    reduce: bool = False
    """Of a receive: whether it is added to what is there."""
    blockers: int = 0
    """Of a send: how many receives must have happened."""
    frees: tuple[int, ...] = ()
    """Of a receive: the sends that wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One rank's part."""

    rank: int
    """The rank within its group."""
    buffer_bytes: int
    """Bytes of its buffer."""
    item_bytes: int
    """One element."""
    chunks: dict[int, tuple[int, int]]
    """Where each chunk that it touches lies: chunk → (offset, size)."""
    sends: tuple[Transfer, ...]
    """Everything that it sends, by step."""
    receives: tuple[Transfer, ...]
    """Everything that it receives, by step."""
    num_steps: int
    """Steps in all."""


def item_type(num_bytes: int) -> npt.DTypeLike:
    """float32, as gradients are; single bytes where the size is not a multiple of four."""
    return np.float32 if num_bytes % 4 == 0 else np.uint8


def compile_program(
    collective: Collective, rank: int, num_bytes: int, *, streams: int = 1, slice_bytes: int = SLICE_BYTES
) -> Program:
    """The part of one rank."""
    item_bytes = np.dtype(item_type(num_bytes)).itemsize
    sizes = [items * item_bytes for items in collective.chunk_sizes(num_bytes // item_bytes)]
    touched = sorted(
        {chunk for (holder, chunk) in collective.before if holder == rank}
        | {chunk for (holder, chunk) in collective.after if holder == rank}
        | {move.chunk for move in collective.moves if rank in (move.source, move.destination)}
    )
    chunks: dict[int, tuple[int, int]] = {}
    offset = 0
    for chunk in touched:
        chunks[chunk] = (offset, sizes[chunk])
        offset += sizes[chunk]
    sends: list[dict[str, Any]] = []
    receives: list[dict[str, Any]] = []
    frees: dict[int, list[int]] = defaultdict(list)
    wrote: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # slice → (step, receive)
    blockers: list[int] = []
    for move in collective.moves:
        if rank not in (move.source, move.destination):
            continue
        begin, size = chunks[move.chunk]
        for number, (low, high) in enumerate(_slices(size, item_bytes, streams, slice_bytes)):
            common = {
                "step": move.step,
                "stream": number % streams,
                "offset": begin + low,
                "size": high - low,
            }
            if move.source == rank:
                waits = [at for step, at in wrote[move.chunk, number] if step < move.step]
                for at in waits:
                    frees[at].append(len(sends))
                blockers.append(len(waits))
                sends.append({**common, "peer": move.destination})
            else:
                wrote[move.chunk, number].append((move.step, len(receives)))
                receives.append({**common, "peer": move.source, "reduce": move.action == "reduce"})
    return Program(
        rank=rank,
        buffer_bytes=offset,
        item_bytes=item_bytes,
        chunks=chunks,
        sends=tuple(Transfer(index=at, blockers=blockers[at], **one) for at, one in enumerate(sends)),
        receives=tuple(Transfer(index=at, frees=tuple(frees[at]), **one) for at, one in enumerate(receives)),
        num_steps=collective.num_steps,
    )


def _slices(size: int, item_bytes: int, streams: int, slice_bytes: int) -> list[tuple[int, int]]:
    """The parts of a chunk: none of nothing, at least one for each stream where there is enough."""
    items = size // item_bytes
    if items == 0:
        return []
    number = max(-(-size // slice_bytes), min(streams, -(-size // 4096)))
    number = min(number, items)
    each, more = divmod(items, number)
    bounds = [(index * each + min(index, more)) * item_bytes for index in range(number + 1)]
    return list(zip(bounds, bounds[1:], strict=False))  # noqa: RUF007 (pairwise gives no list of pairs in order)


def payload(
    collective: Collective, program: Program, num_bytes: int, seed: int, variant: int
) -> npt.NDArray[np.generic]:
    """What a rank's buffer holds at the start; chunks that it does not have are filled with what must not stay."""
    return _filled(collective, program, num_bytes, seed, variant, final=False)


def expected(
    collective: Collective, program: Program, num_bytes: int, seed: int, variant: int
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_] | None]:
    """What it must hold at the end, and where that is checked; None: everywhere."""
    values = _filled(collective, program, num_bytes, seed, variant, final=True)
    checked = np.zeros(len(values), dtype=np.bool_)
    for chunk, (offset, size) in program.chunks.items():
        if (program.rank, chunk) in collective.after:
            checked[offset // program.item_bytes : (offset + size) // program.item_bytes] = True
    return values, None if checked.all() else checked


def _filled(
    collective: Collective, program: Program, num_bytes: int, seed: int, variant: int, *, final: bool
) -> npt.NDArray[np.generic]:
    values = np.zeros(program.buffer_bytes // program.item_bytes, dtype=item_type(num_bytes))
    holding = collective.after if final else collective.before
    for chunk, (offset, size) in program.chunks.items():
        part = values[offset // program.item_bytes : (offset + size) // program.item_bytes]
        mask = holding.get((program.rank, chunk), 0)
        ramp = np.arange(len(part), dtype=np.int64)
        for rank in range(collective.num_ranks):
            if mask >> rank & 1:
                number = seed + 31 * variant + 7 * rank + 3 * chunk
                part += ((ramp + number) % _MODULUS + 1).astype(values.dtype)
    return values
