"""The program of one rank for a collective and size: its sends and receives on each connection, in order.

    chunk        ├──────── 1 MiB ────────┤├──────── 1 MiB ────────┤
    slices       ├ 256K ┤├ 256K ┤├ …                                   slice i uses stream i mod number of streams

Chunks are split into slices, so that one slice is reduced while the next is in flight. Slices have a fixed order per
connection; a send waits only for the receives that wrote its slice in earlier steps (dataflow). Both ends derive the
same order from the moves, so headers need no position.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.fabric.collectives.collective import Collective, chunk_bounds

SLICE_BYTES = 256 * 1024
_MODULUS = 13  # payloads are small integers: their sums are exact in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One slice on one connection."""

    index: int
    """Index among the rank's receives or sends."""
    step: int
    peer: int
    stream: int
    offset: int
    """Byte offset in the rank's buffer."""
    size: int
    reduce: bool = False
    """For receives: whether to add to the buffer."""
    blockers: int = 0
    """For sends: number of receives that must complete first."""
    frees: tuple[int, ...] = ()
    """For receives: the sends that wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The transfers and buffer layout of one rank."""

    rank: int
    buffer_bytes: int
    item_bytes: int
    chunks: dict[int, tuple[int, int]]
    """Chunk → (offset, size)."""
    sends: tuple[Transfer, ...]
    """Ordered by step."""
    receives: tuple[Transfer, ...]
    """Ordered by step."""
    num_steps: int


def item_type(num_bytes: int) -> npt.DTypeLike:
    """Return float32, as for gradients; uint8 if the size is not a multiple of four."""
    return np.float32 if num_bytes % 4 == 0 else np.uint8


def compile_program(
    collective: Collective, rank: int, num_bytes: int, *, streams: int = 1, slice_bytes: int = SLICE_BYTES
) -> Program:
    """Compile the program of one rank."""
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
            common = {"step": move.step, "stream": number % streams, "offset": begin + low, "size": high - low}
            if move.source == rank:
                waits = [index for step, index in wrote[move.chunk, number] if step < move.step]
                for index in waits:
                    frees[index].append(len(sends))
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
        sends=tuple(Transfer(index=index, blockers=blockers[index], **send) for index, send in enumerate(sends)),
        receives=tuple(
            Transfer(index=index, frees=tuple(frees[index]), **receive) for index, receive in enumerate(receives)
        ),
        num_steps=collective.num_steps,
    )


def _slices(size: int, item_bytes: int, streams: int, slice_bytes: int) -> list[tuple[int, int]]:
    """Split a chunk into slices: none if it is empty, at least one per stream if it is large enough."""
    items = size // item_bytes
    if items == 0:
        return []
    number = max(-(-size // slice_bytes), min(streams, -(-size // 4096)))
    bounds = [bound * item_bytes for bound in chunk_bounds(items, min(number, items))]
    return list(itertools.pairwise(bounds))


def expected(
    collective: Collective, program: Program, num_bytes: int, seed: int, variant: int
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_] | None]:
    """Return the expected final contents and a mask of the checked elements; None: all."""
    values = payload(collective, program, num_bytes, seed, variant, final=True)
    checked = np.zeros(len(values), dtype=np.bool_)
    for chunk, (offset, size) in program.chunks.items():
        if (program.rank, chunk) in collective.after:
            checked[offset // program.item_bytes : (offset + size) // program.item_bytes] = True
    return values, None if checked.all() else checked


def payload(
    collective: Collective, program: Program, num_bytes: int, seed: int, variant: int, *, final: bool = False
) -> npt.NDArray[np.generic]:
    """Return the initial or final contents of a rank's buffer; chunks that it does not hold are zero."""
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
