"""hadamard8, hadamard4: `block` quantization of rotated blocks, in the same layout.

Best for tensors with outliers (transformer activations, gradients). Worse for tensors with many exact zeros (after
ReLU): `block` keeps zeros, rotation spreads the other values over them.
"""

from __future__ import annotations

from stagewright.codecs.builtin.block import BlockCodec
from stagewright.codecs.name import CodecName
from stagewright.codecs.registry import register


@register("hadamard")
class HadamardCodec(BlockCodec):
    """Affine quantization of rotated blocks."""

    rotated = True

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        self.summary = f"{self.bits} bits per value, in blocks of 64 rotated to spread outliers"
