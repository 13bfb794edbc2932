"""hadamard8, hadamard4: `block` after a rotation of every 64 values; the layout is the same.

Best where few values are far larger than the rest (activations of transformers, gradients). It hurts where many are
exactly zero (after ReLU): `block` keeps zeros, a rotation spreads the others over them.
"""

from __future__ import annotations

from stagewright.codecs.builtin.block import BlockCodec
from stagewright.codecs.name import CodecName
from stagewright.codecs.registry import register

__all__ = ["HadamardCodec"]


@register("hadamard")
class HadamardCodec(BlockCodec):
    """Blocks, rotated."""

    rotated = True

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        self.summary = f"{self.bits} bits for every 64 values after a rotation that shares outliers"
