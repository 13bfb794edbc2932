"""Compression of the tensors that cross a link: tensors to bytes and back, each codec with a stated error bound.

    x ─► get("hadamard4").encode(x) ─► one uint8 buffer, size known from shape and dtype ─► .decode(…) ─► x + error

Importing this package does not import torch; `get` and `Codec` do. Where numba (the extra `fast`) or Triton is
installed, its kernels produce the same bytes faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagewright.codecs.name import CodecName
from stagewright.codecs.registry import codec_names, get, register

if TYPE_CHECKING:
    from stagewright.codecs.base import Codec as Codec

__all__ = ["Codec", "CodecName", "codec_names", "get", "register"]


def __getattr__(name: str) -> Any:
    if name == "Codec":
        from stagewright.codecs.base import Codec

        return Codec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
