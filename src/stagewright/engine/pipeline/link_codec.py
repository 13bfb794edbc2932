"""The codecs of a pipeline's links, at this worker: which tensors they take, and what their two ends remember.

    stage ─► value ─► encode ─► bytes ═══ link ═══ bytes ─► decode ─► value ─► stage
                      forward: activations through which gradients flow       backward: their gradients

Ids, masks and whatever else crosses travel as they are, and so does all that stays on one worker. The first message of
every kind carries a checksum and is checked by its receiver: that sets the link up. ``STAGEWRIGHT_CODEC_CHECK=1`` has
every message checked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stagewright.codecs.base import Codec
from stagewright.codecs.builtin.stateful import Channel, open_channel
from stagewright.codecs.header import DTYPES
from stagewright.codecs.name import AUTO, CodecName
from stagewright.codecs.registry import get
from stagewright.engine.worker.recorder import recorder

if TYPE_CHECKING:
    from stagewright.engine.pipeline.executor import MicroBatch
    from stagewright.engine.pipeline.messages import Message
    from stagewright.engine.pipeline.transport import TensorShape
    from stagewright.spec.plan import Plan

__all__ = ["CHECK", "FakeLink", "LinkCodecs", "fake_links", "make_link_codecs", "through"]

CHECK = "STAGEWRIGHT_CODEC_CHECK"
"""The variable that has every message checked."""


def make_link_codecs(plan: Plan) -> LinkCodecs | None:
    """The codecs of a plan's cuts; None where nothing is compressed."""
    if not plan.has_codecs:
        return None
    cuts = range(plan.num_stages - 1)
    return LinkCodecs(
        [plan.codec_of(cut) for cut in cuts],
        [plan.codec_of(cut, backward=True) for cut in cuts],
        always_check=os.environ.get(CHECK, "0") not in ("", "0"),
    )


def fake_links(plan: Plan) -> list[tuple[str, str]]:
    """For each cut, the codecs of both directions: what a serial run must do to compute what the plan computes."""
    workers = plan.stage_workers
    return [
        (plan.codec_of(cut), plan.codec_of(cut, backward=True))
        if workers[cut] != workers[cut + 1]
        else ("none", "none")
        for cut in range(plan.num_stages - 1)
    ]


class LinkCodecs:
    """This worker's ends of all links."""

    def __init__(self, forward: Sequence[str], backward: Sequence[str], *, always_check: bool = False) -> None:
        self.names = {False: tuple(forward), True: tuple(backward)}
        """For each direction (backward or not), the codec of each cut."""
        self._remembers = any(CodecName.parse(name).is_stateful for names in self.names.values() for name in names)
        self._always_check = always_check
        self._channels: dict[str, Channel] = {}
        self._known: set[tuple[str, bytes]] = set()
        self._coded: Sequence[Sequence[bool]] = ()
        self._keys: list[list[int]] = []
        self._training = False

    def begin(self, coded: Sequence[Sequence[bool]], batch: Sequence[MicroBatch] | None) -> None:
        """A step begins. ``coded``: for each cut and value, whether it is an activation that codecs take.

        ``batch``: what is trained on; None: nothing is.
        """
        self._coded, self._training = coded, batch is not None
        self._keys = [_sample_keys(one.inputs, one.size) for one in batch or ()] if self._remembers else []

    def finish(self) -> None:
        """A step has ended: take over what its messages taught."""
        if self._training:
            for channel in self._channels.values():
                channel.finish_step()

    def codec(self, message: Message, position: int, dtype: torch.dtype) -> Codec | None:
        """What writes a tensor of a message; None: it travels as it is."""
        name = self.names[message.backward][message.edge]
        if name in ("none", AUTO) or dtype not in DTYPES:
            return None
        if not message.backward and not self._coded[message.edge][position]:
            return None
        return get(name)

    def encode(self, message: Message, position: int, values: torch.Tensor) -> torch.Tensor:
        """What travels for a tensor."""
        codec = self.codec(message, position, values.dtype)
        if codec is None:
            return values
        start = recorder.now()
        channel = self._channel(message, position, codec, "send", values.shape, values.dtype)
        encoded = channel.encode(values, message.microbatch, self._keys_of(message))
        recorder.add("encode", start, num_bytes=encoded.numel() * encoded.element_size())
        return encoded

    def num_bytes(self, message: Message, position: int, expected: TensorShape) -> int | None:
        """The size of what arrives for a tensor; None: the tensor itself."""
        codec = self.codec(message, position, expected.dtype)
        return None if codec is None else codec.num_bytes(expected.shape, expected.dtype)

    def decode(self, message: Message, position: int, expected: TensorShape, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor in what arrived."""
        codec = self.codec(message, position, expected.dtype)
        if codec is None:
            return buffer
        start = recorder.now()
        channel = self._channel(message, position, codec, "receive", expected.shape, expected.dtype)
        keys = self._keys_of(message)
        decoded = channel.decode(buffer, expected.shape, expected.dtype, message.microbatch, keys)
        recorder.add("decode", start, num_bytes=buffer.numel() * buffer.element_size())
        return decoded

    def state(self) -> dict[str, torch.Tensor]:
        """All that this worker's ends remember, for a checkpoint."""
        return {
            f"{end}|{name}": value
            for end, channel in sorted(self._channels.items())
            for name, value in channel.state().items()
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put back what was remembered."""
        self.forget()
        ends: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            end, _, name = key.rpartition("|")
            ends.setdefault(end, {})[name] = value
        for end, values in ends.items():
            way, edge, *_ = end.split()
            channel = self._channels[end] = open_channel(get(self.names[way == "backward"][int(edge)]))
            channel.load_state(values)

    def forget(self) -> None:
        """Begin with an empty memory."""
        self._channels.clear()

    def _keys_of(self, message: Message) -> list[int]:
        """A number for each sample, where codecs remember them."""
        return self._keys[message.microbatch] if self._keys else []

    def _channel(
        self, message: Message, position: int, codec: Codec, side: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Channel:
        end = f"{'backward' if message.backward else 'forward'} {message.edge} {position} {side}"
        channel = self._channels.get(end)
        if channel is None:
            channel = self._channels[end] = open_channel(codec)
        kind = (end, codec.header(shape, dtype))
        channel.checked = self._always_check or kind not in self._known
        channel.frozen = not self._training
        self._known.add(kind)
        return channel


def through(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """What a receiver makes of a tensor."""
    return codec.decode(codec.encode(values, checked=False), values.shape, values.dtype, checked=False)


class FakeLink(torch.autograd.Function):
    """A link inside one process: what a receiver makes of the activation, and the sender of its gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward: str, backward: str, nudge: float = 0.0) -> torch.Tensor:
        """Through the codec of the way there; what enters it is moved by up to ``nudge`` of its largest value."""
        ctx.backward_codec, ctx.nudge = backward, nudge
        values = _nudged(values, nudge)
        return values.clone() if forward == "none" else through(get(forward), values.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Through the codec of the way back."""
        gradient = _nudged(gradients[0], ctx.nudge)
        if ctx.backward_codec != "none":
            gradient = through(get(ctx.backward_codec), gradient.contiguous())
        return gradient, None, None, None


def _nudged(values: torch.Tensor, nudge: float) -> torch.Tensor:
    """Each value moved a little, the same way at each call."""
    if nudge == 0 or values.numel() == 0:
        return values
    by = torch.rand(values.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (values + by.to(values.device) * nudge * values.abs().max()).to(values.dtype)


def _sample_keys(inputs: Sequence[Any], size: int) -> list[int]:
    """A number for each sample, made of what the model is given of it: the same on every worker."""
    rows = [hashlib.blake2b(digest_size=8) for _ in range(size)]
    for value in inputs:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous()
            each = value if value.ndim and value.shape[0] == size else value.expand(size, *value.shape)
            for row, one in zip(rows, each, strict=True):
                row.update(one.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return [int.from_bytes(row.digest(), "little") >> 1 for row in rows]
