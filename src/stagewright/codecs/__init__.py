"""What crosses a link, compressed: tensors to bytes and back, each codec with a stated error.

    x ─► get("hadamard4").encode(x) ─► one uint8 buffer, its size known from shape and dtype ─► .decode(…) ─► x + error

Names are read without importing torch; `get` imports what it needs. numba (the extra `fast`) and triton make the same
bytes sooner and are used where they are installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagewright.codecs.name import CodecName

if TYPE_CHECKING:
    from stagewright.codecs.base import Codec as Codec
    from stagewright.codecs.registry import codec_names as codec_names
    from stagewright.codecs.registry import get as get
    from stagewright.codecs.registry import register as register

__all__ = ["Codec", "CodecName", "codec_names", "get", "register"]


def __getattr__(name: str) -> Any:
    if name == "Codec":
        from stagewright.codecs import base

        return base.Codec
    if name in ("codec_names", "get", "register"):
        from stagewright.codecs import registry

        return getattr(registry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
