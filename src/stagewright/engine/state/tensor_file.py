"""Write a safetensors file tensor by tensor: its writer holds one full tensor at a time, and hashes what it writes.

8 bytes    length of the header
header     JSON: dtype, shape and offsets of each tensor, then metadata; padded to a multiple of 8 bytes
tensors    in the order of the header, those with the largest elements first, so that each one is aligned
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from stagewright.errors import RunError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStream:
    """Tensors to write, made one after another when they are asked for."""

    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of each tensor, in the order of ``values``, which has those with the largest elements first."""
    values: Iterable[tuple[str, torch.Tensor]]
    """Each tensor with its name, to be read once and to the end: gathering is collective."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> TensorStream:
        """Return a stream of tensors that are there."""
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        return cls(shapes={name: (tuple(value.shape), value.dtype) for name, value in ordered}, values=ordered)


def write_tensors(path: Path, stream: TensorStream, metadata: Mapping[str, str] | None = None) -> str:
    """Write one file, flush it to disk and return its SHA-256."""
    digest = hashlib.sha256()
    try:
        with open(path, "wb") as file:
            header = _header(path, stream.shapes, {"format": "pt", **(metadata or {})})
            digest.update(header)
            file.write(header)
            expected = iter(stream.shapes.items())
            for name, value in stream.values:
                assert (name, (tuple(value.shape), value.dtype)) == next(expected), f"{name} is not as announced"
                content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                digest.update(content)
                file.write(content)
                del value, content  # free them before the next is gathered
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"can't write {path}: {error}") from error
    return digest.hexdigest()


def _header(
    path: Path, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]
) -> bytes:
    """Return the length of the header and the header."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (shape, dtype) in shapes.items():
        if dtype not in _DTYPES:
            raise RunError(f"can't write {path}: {name} is of {dtype}, which safetensors does not have")
        start, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
