"""A tensor in a safetensors file: read whole, or the part of it that a worker holds, a piece at a time.

Pages of a mapped file count as the memory of a process, so each piece is unmapped before the next one is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stagewright.errors import UsageError

_PIECE_BYTES = 16 * 2**20
"""Bytes that are mapped at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """Ranges along one dimension of a tensor, concatenated."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    """Start and stop of each."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    path: Path
    key: str
    """Its name in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape."""
        with open_safetensors(self.path) as file:
            return tuple(file.get_slice(self.key).get_shape())

    def read(self) -> torch.Tensor:
        """Map the full tensor into memory."""
        with open_safetensors(self.path) as file:
            try:
                value: torch.Tensor = file.get_tensor(self.key)
            except Exception as error:  # safetensors and torch raise several kinds for a damaged header
                raise UsageError(f"can't read {self.key} from {self.path}: {error}") from None
            return value

    @torch.no_grad()
    def copy_to(self, target: torch.Tensor, part: TensorPart | None = None) -> None:
        """Copy the tensor, or a part of it, into ``target``."""
        shape = self.shape
        if not shape:
            target.copy_(self.read())
            return
        rows_at_once = max(1, _PIECE_BYTES * shape[0] // max(1, target.element_size() * torch.Size(shape).numel()))
        row_ranges = part.ranges if part is not None and part.dim == 0 else ((0, shape[0]),)
        offset = 0
        for start, stop in _pieces(row_ranges, rows_at_once):
            with open_safetensors(self.path) as file:
                piece = file.get_slice(self.key)[start:stop]
                rows = target[offset : offset + stop - start]
                if part is None or part.dim == 0:
                    rows.copy_(piece)
                else:
                    _copy_ranges(rows, piece, part)
                del piece
            offset += stop - start


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """A tensor of all experts, of which one tensor or several are stored for each expert, to be joined by rows."""

    experts: tuple[tuple[StoredTensor, ...], ...]

    @torch.no_grad()
    def copy_to(self, target: torch.Tensor, part: TensorPart | None = None) -> None:
        """Copy the tensor, or a part of it, into ``target``, expert by expert."""
        numbers: list[int] = list(range(len(self.experts)))
        if part is not None and part.dim == 0:
            numbers = [number for start, stop in part.ranges for number in range(start, stop)]
        for row, number in zip(target, numbers, strict=True):
            values = [stored.read() for stored in self.experts[number]]
            joined = values[0] if len(values) == 1 else torch.cat(values)
            if part is None or part.dim == 0:
                row.copy_(joined)
            else:
                _copy_ranges(row, joined, TensorPart(dim=part.dim - 1, ranges=part.ranges))


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file; raise UsageError if it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        raise UsageError(f"{str(path)!r} is not a safetensors file: {error}") from None


def _pieces(ranges: tuple[tuple[int, int], ...], size: int) -> Iterator[tuple[int, int]]:
    for start, stop in ranges:
        for first in range(start, stop, size):
            yield first, min(first + size, stop)


def _copy_ranges(target: torch.Tensor, piece: torch.Tensor, part: TensorPart) -> None:
    offset = 0
    for start, stop in part.ranges:
        target.narrow(part.dim, offset, stop - start).copy_(piece.narrow(part.dim, start, stop - start))
        offset += stop - start
