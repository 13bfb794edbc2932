"""What every codec is: a tensor becomes one buffer whose size its shape and dtype tell, and a tensor again.

    buffer:   │ header │ payload: packed codes │ scales │ zeros up to 16 bytes │

A codec of your own is a class with three methods; ``register`` gives it a name:

    @register("half")
    class Half(Codec):
        def payload_bytes(self, shape, dtype): …      # from shape and dtype alone
        def write(self, values, payload): …           # a float tensor into that many bytes
        def read(self, payload, shape, dtype): …      # and back
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from stagewright.codecs.header import check_header, header_bytes, header_of, write_checksum
from stagewright.errors import CorruptMessage, UsageError

__all__ = ["Codec", "aligned", "header_tensor", "num_values", "rounding"]

_headers: dict[tuple[bytes, torch.device], torch.Tensor] = {}


def aligned(num_bytes: int) -> int:
    """Up to a multiple of 16."""
    return -(-num_bytes // 16) * 16


def num_values(shape: Sequence[int]) -> int:
    """Elements of a tensor of that shape."""
    return math.prod(shape)


def header_tensor(header: bytes, device: torch.device) -> torch.Tensor:
    """A header's bytes on a device; made once."""
    key = (header, device)
    if key not in _headers:
        if len(_headers) >= 1024:
            _headers.clear()
        _headers[key] = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
    return _headers[key]


def rounding(values: torch.Tensor) -> torch.Tensor:
    """What one rounding to the tensor's own type may change, as float32."""
    share = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[values.dtype]
    smallest = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-24}[values.dtype]
    return values.detach().float().abs() * share + smallest


class Codec(ABC):
    """Tensors to bytes and back."""

    summary: str = ""
    """One line for people."""

    def __init__(self, name: str) -> None:
        self.name = name
        """The full name, by which it is found again and which the header carries."""

    @abstractmethod
    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of what follows the header, before it is rounded up to a multiple of 16."""

    @abstractmethod
    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Fill the payload (uint8, its padding included) with a contiguous tensor's values."""

    @abstractmethod
    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor in a payload; codes that can't be are CorruptMessage, never a crash."""

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        """The largest |x − decode(encode(x))| that this codec may make, for each finite value, as float32."""
        raise NotImplementedError(f"codec {self.name} states no bound")

    def num_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of a message, header and all; no tensor is needed."""
        return header_bytes(len(shape)) + aligned(self.payload_bytes(shape, dtype))

    def header(self, shape: Sequence[int], dtype: torch.dtype) -> bytes:
        """The header of an unchecked message; two ends of a link compare these when it is set up."""
        return header_of(self.name, tuple(shape), dtype, aligned(self.payload_bytes(shape, dtype)))

    def encode(self, values: torch.Tensor, *, out: torch.Tensor | None = None, checked: bool = True) -> torch.Tensor:
        """The message of a float tensor; the same tensor gives the same bytes.

        ``out``: a buffer of the right size to use. ``checked``: with a checksum of the payload, which a sender whose
        link is reliable may leave out.
        """
        values = values.detach()
        shape = tuple(values.shape)
        header = self.header(shape, values.dtype)
        size = len(header) + aligned(self.payload_bytes(shape, values.dtype))
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=values.device)
        elif out.numel() != size or out.dtype is not torch.uint8 or out.device != values.device:
            raise UsageError(f"codec {self.name} needs {size} uint8 on {values.device}, not {out.numel()} {out.dtype}")
        self._fill(values.contiguous(), out, header)
        if checked:
            write_checksum(out, len(header))
        return out

    def decode(
        self,
        buffer: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
        checked: bool = True,
    ) -> torch.Tensor:
        """The tensor in a message of that shape and type; CorruptMessage where it is not such a message.

        ``checked`` reads the header and the checksum if there is one (on a GPU that waits for it); a receiver that
        agreed on both when the link was set up may leave it out.
        """
        header = self.header(shape, dtype)
        what = f"codec {self.name} and {str(dtype).removeprefix('torch.')}{list(shape)}"
        if buffer.dtype is torch.uint8 and (not buffer.is_contiguous() or buffer.storage_offset() % 16):
            buffer = buffer.clone(memory_format=torch.contiguous_format)
        if checked:
            check_header(buffer, header, what)
        elif buffer.dtype is not torch.uint8 or buffer.shape != (self.num_bytes(shape, dtype),):
            size = self.num_bytes(shape, dtype)
            raise CorruptMessage(f"a message for {what} has {size} bytes, not {buffer.dtype} {tuple(buffer.shape)}")
        return self._take(buffer[len(header) :], tuple(shape), dtype, out)

    def _fill(self, values: torch.Tensor, out: torch.Tensor, header: bytes) -> None:
        """Header and payload; a codec with a kernel that writes both at once has its own."""
        out[: len(header)] = header_tensor(header, out.device)
        self.write(values, out[len(header) :])

    def _take(
        self, payload: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        found = self.read(payload, shape, dtype)
        return found if out is None else out.copy_(found)

    def __repr__(self) -> str:
        return f"<codec {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        from stagewright.codecs.registry import get

        return get, (self.name,)
