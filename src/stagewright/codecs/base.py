"""The base class of codecs: a tensor becomes one buffer, whose size depends on shape and dtype only, and back.

    buffer:   │ header │ payload: packed codes │ scales │ zeros up to 16 bytes │

A custom codec is a class with three methods; ``register`` names it:

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

import torch

from stagewright.codecs.header import build_header, check_header, header_bytes, write_checksum
from stagewright.codecs.name import CodecName
from stagewright.errors import CorruptMessage, UsageError

_headers: dict[tuple[bytes, torch.device], torch.Tensor] = {}


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of 16."""
    return -(-num_bytes // 16) * 16


def num_values(shape: Sequence[int]) -> int:
    """Count the elements of a tensor of this shape."""
    return math.prod(shape)


def header_tensor(header: bytes, device: torch.device) -> torch.Tensor:
    """Return a header's bytes on a device, cached."""
    key = (header, device)
    if key not in _headers:
        if len(_headers) >= 1024:
            _headers.clear()
        _headers[key] = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
    return _headers[key]


def rounding_error(values: torch.Tensor) -> torch.Tensor:
    """Bound the error of one rounding to the tensor's dtype, as float32."""
    relative = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[values.dtype]
    smallest = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-24}[values.dtype]
    return values.detach().float().abs() * relative + smallest


class Codec(ABC):
    """Encoder and decoder between float tensors and bytes."""

    summary: str = ""
    """One line for users."""

    def __init__(self, name: CodecName | str) -> None:
        self.name = name if isinstance(name, str) else name.text
        """The full name; `get` accepts it and the header carries its hash."""

    @abstractmethod
    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the payload's size before it is padded to a multiple of 16."""

    @abstractmethod
    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Fill the whole payload (uint8, including its padding) from a contiguous tensor."""

    @abstractmethod
    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor in a payload; raise CorruptMessage on invalid codes, never crash."""

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        """Bound |x − decode(encode(x))| for each finite value, as float32."""
        raise NotImplementedError(f"codec {self.name} states no error bound")

    def num_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the size of a message, including the header."""
        return header_bytes(len(shape)) + aligned(self.payload_bytes(shape, dtype))

    def header(self, shape: Sequence[int], dtype: torch.dtype) -> bytes:
        """Return the header of a message without checksum; both ends of a link compare it when the link is set up."""
        return build_header(self.name, tuple(shape), dtype, aligned(self.payload_bytes(shape, dtype)))

    def encode(self, values: torch.Tensor, *, out: torch.Tensor | None = None, checked: bool = True) -> torch.Tensor:
        """Encode a float tensor as a message; equal tensors give equal bytes.

        ``out`` is a buffer of the right size to write to. ``checked`` adds a checksum of the payload; a sender on a
        reliable link may leave it out.
        """
        values = values.detach()
        shape = tuple(values.shape)
        header = self.header(shape, values.dtype)
        size = len(header) + aligned(self.payload_bytes(shape, values.dtype))
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=values.device)
        elif out.numel() != size or out.dtype is not torch.uint8 or out.device != values.device:
            raise UsageError(
                f"codec {self.name} needs a buffer of {size} uint8 on {values.device}, got {out.numel()} {out.dtype} "
                f"on {out.device}"
            )
        self._encode_into(values.contiguous(), out, header)
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
        """Decode a message of this shape and dtype; raise CorruptMessage if it is not one.

        ``checked`` verifies the header and, if present, the checksum (which synchronizes a GPU). A receiver that
        agreed on both when the link was set up may leave it out.
        """
        header = self.header(shape, dtype)
        description = f"codec {self.name} and {str(dtype).removeprefix('torch.')}{list(shape)}"
        if buffer.dtype is torch.uint8 and (not buffer.is_contiguous() or buffer.storage_offset() % 16):
            buffer = buffer.clone(memory_format=torch.contiguous_format)
        if checked:
            check_header(buffer, header, description)
        elif buffer.dtype is not torch.uint8 or buffer.shape != (self.num_bytes(shape, dtype),):
            size = self.num_bytes(shape, dtype)
            raise CorruptMessage(
                f"a message for {description} has {size} bytes, got {buffer.dtype} {tuple(buffer.shape)}"
            )
        return self._decode_payload(buffer[len(header) :], tuple(shape), dtype, out)

    def _encode_into(self, values: torch.Tensor, out: torch.Tensor, header: bytes) -> None:
        """Write header and payload; overridden by codecs whose kernel writes both in one launch."""
        out[: len(header)] = header_tensor(header, out.device)
        self.write(values, out[len(header) :])

    def _decode_payload(
        self, payload: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        values = self.read(payload, shape, dtype)
        return values if out is None else out.copy_(values)

    def __repr__(self) -> str:
        return f"<codec {self.name}>"
