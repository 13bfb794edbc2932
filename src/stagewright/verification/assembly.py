"""Assemble the tensors of a recorded step: which samples each rank has, and the full tensor behind each shard.

    rank 0  rows 0-3 ┐                       rank 0  [8, 0:16] ┐
    rank 1  rows 4-7 ┘ compared row by row   rank 1  [8, 16:32]┘ concatenated in the dimension that is smaller

Rows are found by comparing the model's inputs with those of the baseline, so contiguous slices, a strided sampler and
micro-batches need no description.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from stagewright.verification.layout import Layout, join_parts
from stagewright.verification.record import Entry, Kind, ModuleInfo, Recording

STATE_KINDS = ("parameter", "buffer", "local gradient", "gradient", "parameter after", "buffer after")


class Key(NamedTuple):
    """One tensor of a step, over all forward passes and ranks."""

    kind: Kind
    module: str
    name: str
    call: int = 0


class Piece(NamedTuple):
    """What one rank holds of a tensor in one forward pass."""

    forward_pass: int
    value: torch.Tensor
    layout: Layout | None


@dataclass(slots=True, kw_only=True)
class Part:
    """A tensor to compare with the baseline's: that of one rank, or one assembled from several."""

    ranks: tuple[int, ...]
    value: torch.Tensor
    expected: torch.Tensor
    """The same rows of the baseline."""
    joined: str = ""
    """How it was assembled: ``dimension 1``, ``DTensor``, ``flat shards`` or nothing."""
    dim: int | None = None
    """The dimension of the concatenation."""


@dataclass(slots=True, kw_only=True)
class Step:
    """A recorded step with its tensors in memory."""

    recording: Recording
    pieces: dict[Key, dict[int, list[Piece]]]
    order: dict[Key, int]
    entries: dict[Key, Entry]

    @property
    def modules(self) -> Mapping[str, ModuleInfo]:
        """All modules of all ranks."""
        return {name: info for rank in self.recording.ranks for name, info in rank.modules.items()}

    def called_leaves(self, rank: int) -> list[str]:
        """Return the modules without children that ran on a rank, in order."""
        names = self.recording.ranks[rank].modules
        parents = {name.rpartition(".")[0] for name in names if name}
        ran = [key for key, held in self.pieces.items() if key.kind == "output" and rank in held]
        return list(dict.fromkeys(key.module for key in ran if key.module not in parents and key.module))


def load_step(recording: Recording) -> Step:
    """Read a record into memory."""
    pieces: dict[Key, dict[int, list[Piece]]] = {}
    order: dict[Key, int] = {}
    entries: dict[Key, Entry] = {}
    for index, record in enumerate(recording.ranks):
        tensors = recording.load(record.rank)
        for entry in record.entries:
            key = Key(entry.kind, entry.module, entry.name, entry.call)
            piece = Piece(entry.forward_pass, tensors[entry.key], entry.layout)
            pieces.setdefault(key, {}).setdefault(index, []).append(piece)
            order.setdefault(key, entry.order)
            entries.setdefault(key, entry)
    return Step(recording=recording, pieces=pieces, order=order, entries=entries)


@dataclass(slots=True, kw_only=True)
class Baseline:
    """The tensors of the plain model's step, its forward passes concatenated."""

    step: Step
    rows: int
    """Samples in the batch; 0 if the model has no tensor as input."""
    values: dict[Key, torch.Tensor] = field(default_factory=dict)


def make_baseline(step: Step) -> Baseline:
    """Concatenate the passes (gradient accumulation) of a step on one rank."""
    rows = [_num_rows(inputs) for inputs in _root_inputs(step, 0)]
    baseline = Baseline(step=step, rows=sum(rows))
    for key, held in step.pieces.items():
        parts = held[0]
        if len(parts) == 1 or key.kind in STATE_KINDS or parts[0].value.ndim == 0:
            baseline.values[key] = parts[-1].value
        else:
            dim = batch_dim(parts[0].value.shape, rows[0])
            baseline.values[key] = torch.cat([part.value for part in parts], dim=dim or 0)
    return baseline


def batch_dim(shape: Sequence[int], rows: int) -> int | None:
    """Return the first dimension that is a multiple of the number of samples."""
    return next((dim for dim, size in enumerate(shape) if rows and size and size % rows == 0), None)


def _num_rows(inputs: Mapping[str, torch.Tensor]) -> int:
    return next((value.shape[0] for value in inputs.values() if value.ndim), 0)


def _root_inputs(step: Step, rank: int) -> list[dict[str, torch.Tensor]]:
    """Return the model's input tensors of each forward pass on a rank."""
    passes: dict[int, dict[str, torch.Tensor]] = {}
    for key, held in step.pieces.items():
        if key.kind == "input" and key.module == "" and key.call == 0:
            for piece in held.get(rank, []):
                passes.setdefault(piece.forward_pass, {})[key.name] = piece.value
    return [passes[index] for index in sorted(passes)]


@dataclass(slots=True, kw_only=True)
class Rows:
    """Which samples of the baseline's batch each rank has, pass by pass."""

    by_rank: dict[int, list[list[int] | None]]
    """None for a pass with none of the samples, like a trial run for shapes."""
    stages: frozenset[int]
    """Ranks with only a part of the model."""
    fed: frozenset[int]
    """Ranks that get the model's inputs: all, or the first stage's."""
    problem: str = ""
    """What is wrong with the batch, if anything."""


def match_rows(baseline: Baseline, candidate: Step) -> Rows:
    """Find the samples of each rank in the baseline's batch by the model's inputs."""
    num_ranks = len(candidate.recording.ranks)
    leaves = {rank: candidate.called_leaves(rank) for rank in range(num_ranks)}
    everything = set().union(*leaves.values())
    stages = frozenset(rank for rank in leaves if set(leaves[rank]) != everything)
    first = next(iter(baseline.step.called_leaves(0)), "")
    inputs = {key.name: value for key, value in baseline.values.items() if key[:2] == ("input", "") and key.call == 0}
    by_rank: dict[int, list[list[int] | None]] = {}
    problems: list[str] = []
    for rank in range(num_ranks):
        if rank in stages and first not in leaves[rank]:
            continue
        passes = _root_inputs(candidate, rank)
        by_rank[rank] = _match_passes(inputs, passes, baseline.rows)
        if passes and all(rows is None for rows in by_rank[rank]):
            problems.append(f"the inputs of rank {rank} are not samples of the baseline's batch")
            by_rank[rank] = []
    matched = {row for passes in by_rank.values() for rows in passes for row in rows or ()}
    if not problems and inputs and baseline.rows and len(matched) < baseline.rows and by_rank:
        missing = sorted(set(range(baseline.rows)) - matched)
        problems.append(
            f"{len(missing)} of {baseline.rows} samples of the baseline's batch are on no rank, first row {missing[0]}"
        )
    fed = frozenset(by_rank)
    for rank in range(num_ranks):  # a later stage has the samples of the first stage of its replica
        if rank not in by_rank:
            replica = candidate.recording.ranks[rank].replica
            mates = [other for other in by_rank if candidate.recording.ranks[other].replica == replica]
            by_rank[rank] = by_rank[mates[0]] if mates else [list(range(baseline.rows))]
    return Rows(by_rank=by_rank, stages=stages, fed=fed, problem="; ".join(problems))


def _match_passes(
    expected: Mapping[str, torch.Tensor], passes: Sequence[Mapping[str, torch.Tensor]], rows: int
) -> list[list[int] | None]:
    """Match by the first input of which every row is found; a pass without any such row is None."""
    best: list[list[int] | None] = [None] * len(passes)
    for name, value in expected.items():
        if value.ndim == 0 or value.shape[0] != rows:
            continue
        known: dict[bytes, list[int]] = {}
        dtype = next((inputs[name].dtype for inputs in passes if name in inputs), value.dtype)
        for index, row in enumerate(value.to(dtype)):
            known.setdefault(_row_bytes(row), []).append(index)
        unused = {content: list(indices) for content, indices in known.items()}
        matched: list[list[int] | None] = []
        for inputs in passes:
            rows_found: list[int] | None = []
            for row in inputs.get(name, torch.empty(0)):
                content = _row_bytes(row)
                if content not in known:
                    rows_found = None
                    break
                assert rows_found is not None
                rows_found.append(unused[content].pop(0) if unused[content] else known[content][0])
            matched.append(rows_found or None)
        if sum(map(bool, matched)) > sum(map(bool, best)):
            best = matched
        if all(best):
            break
    # A pass whose samples come again in a later one was a trial run for shapes.
    return [None if indices in best[index + 1 :] else indices for index, indices in enumerate(best)]


def _row_bytes(row: torch.Tensor) -> bytes:
    return str(tuple(row.shape)).encode() + row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assemble(key: Key, baseline: Baseline, candidate: Step, rows: Rows) -> list[Part]:
    """Return the candidate's tensor in comparable parts; empty if no rank has it or it is not comparable."""
    expected = baseline.values[key]
    held = candidate.pieces.get(key, {})
    if key.module == "" and key.kind in ("input", "output", "output gradient"):
        is_input = key.kind == "input"
        held = {
            rank: pieces for rank, pieces in held.items() if rank not in rows.stages or (is_input and rank in rows.fed)
        }
    if key.kind in STATE_KINDS:
        groups = {(): {rank: (pieces[-1].value, pieces[-1].layout) for rank, pieces in held.items()}}
        return _join_group(key, groups[()], expected, candidate) if held else []
    if _has_no_batch(held, expected.shape, rows, baseline.rows):
        return _join_without_batch(key, held, expected, rows)
    grouped: dict[tuple[int, ...], dict[int, tuple[torch.Tensor, Layout | None]]] = {}
    for rank, pieces in held.items():
        index, value = _join_passes(pieces, rows.by_rank[rank], expected.shape, baseline.rows)
        grouped.setdefault(index, {})[rank] = (value, pieces[-1].layout)
    parts: list[Part] = []
    for index, group in grouped.items():
        parts += _join_group(key, group, _select(expected, index, baseline.rows, group), candidate)
    return parts


def _has_no_batch(held: Mapping[int, list[Piece]], shape: torch.Size, rows: Rows, num_rows: int) -> bool:
    """Whether each pass has the whole tensor although it has only some of the samples: it has no batch dimension."""
    pieces = [piece for own in held.values() for piece in own]
    is_divided = any(len(own) > 1 or len(_row_set(rows, rank)) < num_rows for rank, own in held.items())
    return is_divided and all(piece.value.shape == shape for piece in pieces)


def _join_without_batch(key: Key, held: Mapping[int, list[Piece]], expected: torch.Tensor, rows: Rows) -> list[Part]:
    """Compare such a tensor in each pass; its gradient is the sum over all samples."""
    if key.kind != "output gradient":
        return [
            Part(ranks=(rank,), value=piece.value, expected=expected) for rank, own in held.items() for piece in own
        ]
    chosen = {_row_set(rows, rank): rank for rank in held}
    total = torch.stack([piece.value.double() for rank in chosen.values() for piece in held[rank]]).sum(0)
    return [Part(ranks=tuple(chosen.values()), value=total.to(expected.dtype), expected=expected, joined="sum")]


def _row_set(rows: Rows, rank: int) -> frozenset[int]:
    return frozenset(row for indices in rows.by_rank[rank] for row in indices or ())


def _join_passes(
    pieces: list[Piece], passes: list[list[int] | None], shape: Sequence[int], rows: int
) -> tuple[tuple[int, ...], torch.Tensor]:
    """Concatenate the passes of a rank; return the rows that they have (empty: all, in order) and the tensor."""
    pieces = sorted(pieces, key=lambda piece: piece.forward_pass)
    index = [row for indices in passes for row in indices or ()]
    if pieces[-1].forward_pass < len(passes):
        pieces = [piece for piece in pieces if passes[piece.forward_pass] is not None] or pieces
    value = pieces[0].value
    if len(pieces) > 1 and value.ndim and value.ndim == len(shape):
        dim = next((dim for dim in range(value.ndim) if value.shape[dim] != shape[dim]), 0)
        surplus = sum(piece.value.shape[dim] for piece in pieces) - (len(index) * shape[dim] // rows if rows else 0)
        while surplus > 0 and len(pieces) > 1:  # a later stage: passes before the samples were trials for shapes
            surplus -= pieces.pop(0).value.shape[dim]
        value = torch.cat([piece.value for piece in pieces], dim=dim)
    return (() if index == list(range(rows)) else tuple(index)), value


def _select(
    expected: torch.Tensor, index: tuple[int, ...], rows: int, group: Mapping[int, tuple[torch.Tensor, Layout | None]]
) -> torch.Tensor:
    """Return the baseline's rows of a group; all of them for a tensor without a batch dimension."""
    if not index or not rows:
        return expected
    shape = next(iter(group.values()))[0].shape
    if len(shape) != expected.ndim:
        return expected
    for dim, size in enumerate(expected.shape):
        if size and size % rows == 0 and shape[dim] * rows == size * len(index):
            width = size // rows
            positions = torch.tensor([row * width + offset for row in index for offset in range(width)])
            return expected.index_select(dim, positions)
    return expected


def _join_group(
    key: Key, group: Mapping[int, tuple[torch.Tensor, Layout | None]], expected: torch.Tensor, candidate: Step
) -> list[Part]:
    """Compare the ranks of a group one by one, or assemble their shards."""
    ranks = tuple(group)
    layouts = [layout for _, layout in group.values()]
    if all(layout is not None and set(layout.placements) != {"replicate"} for layout in layouts):
        instances: dict[int, list[tuple[int, Layout, torch.Tensor]]] = {}
        count: dict[tuple[int, ...], int] = {}
        for rank, (value, layout) in group.items():
            assert layout is not None
            number = count[layout.coordinate] = count.get(layout.coordinate, -1) + 1
            instances.setdefault(number, []).append((rank, layout, value))
        return [
            Part(
                ranks=tuple(rank for rank, _, _ in parts),
                value=join_parts([(layout, value) for _, layout, value in parts]),
                expected=expected,
                joined="DTensor",
            )
            for parts in instances.values()
        ]
    values = [value for value, _ in group.values()]
    if all(value.shape == expected.shape for value in values):
        return [Part(ranks=(rank,), value=value, expected=expected) for rank, (value, _) in group.items()]
    dims = [
        dim
        for dim in range(expected.ndim)
        if all(value.ndim == expected.ndim for value in values)
        and sum(value.shape[dim] for value in values) == expected.shape[dim]
        and all(
            value.shape[:dim] + value.shape[dim + 1 :] == expected.shape[:dim] + expected.shape[dim + 1 :]
            for value in values
        )
    ]
    if dims:
        joined = _concatenate(values, dims[0], _num_blocks(key.module, candidate))
        return [Part(ranks=ranks, value=joined, expected=expected, joined=f"dimension {dims[0]}", dim=dims[0])]
    if all(value.ndim == 1 for value in values) and sum(value.numel() for value in values) == expected.numel():
        return [
            Part(ranks=ranks, value=torch.cat(values).reshape(expected.shape), expected=expected, joined="flat shards")
        ]
    return [Part(ranks=(rank,), value=value, expected=expected) for rank, (value, _) in group.items()]


def _concatenate(values: Sequence[torch.Tensor], dim: int, blocks: int) -> torch.Tensor:
    if blocks == 1 or any(value.shape[dim] % blocks for value in values):
        return torch.cat(list(values), dim=dim)
    chunks = [value.chunk(blocks, dim=dim) for value in values]
    return torch.cat([chunk[block] for block in range(blocks) for chunk in chunks], dim=dim)


def _num_blocks(module: str, candidate: Step) -> int:
    """Return how many fused projections a module has, according to the script."""
    described = shard_kind(module, candidate)
    _, _, count = described.partition(":")
    return int(count) if count.isdigit() else 1


def shard_kind(module: str, candidate: Step) -> str:
    """Return how the script says a module is sharded: column, row, column:N or nothing."""
    shards = candidate.recording.ranks[0].shards
    return next((kind for pattern, kind in shards.items() if fnmatchcase(module, pattern)), "")


def relative_error(value: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """Return the largest difference relative to a scale; infinite for other shapes or NaN in other places."""
    if value.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(value.to(expected.dtype), expected) else math.inf
    left, right = value.double(), expected.double()
    unequal = ~((left == right) | (left.isnan() & right.isnan()))
    if not bool(unequal.any()):
        return 0.0
    error = float((left - right)[unequal].abs().max()) / max(scale, 1e-30)
    return error if math.isfinite(error) else math.inf
