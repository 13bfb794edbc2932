"""The codecs of a pipeline's links on this worker: which tensors they compress, and the state of both ends.

    stage ─► tensor ─► encode ─► bytes ═══ link ═══ bytes ─► decode ─► tensor ─► stage
                      forward: activations that need a gradient       backward: their gradients

Other tensors (ids, masks) are sent unchanged, and so is everything between two stages of one worker. Float64 is rounded
to float32 first, which is what codecs encode: `to_encoded`. The first transfer
of every kind carries a checksum that the receiver verifies; that sets the link up. With ``STAGEWRIGHT_CODEC_CHECK=1``
every transfer is verified.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stagewright.codecs.base import Codec
from stagewright.codecs.builtin.stateful import Channel, open_channel
from stagewright.codecs.header import DTYPES
from stagewright.codecs.name import AUTO, CodecName
from stagewright.codecs.registry import get
from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.pipeline.links import TensorShape
from stagewright.engine.pipeline.transfers import Transfer
from stagewright.engine.worker.recorder import recorder
from stagewright.spec.plan import Plan

CHECK = "STAGEWRIGHT_CODEC_CHECK"
"""The environment variable that turns on verification of every transfer."""
LINK_DTYPES = frozenset({*DTYPES, torch.float64})
"""The dtypes that links compress."""


def make_link_codecs(plan: Plan) -> LinkCodecs | None:
    """Make the codecs of a plan's cuts; None if nothing is compressed."""
    if not plan.has_codecs:
        return None
    cuts = range(plan.num_stages - 1)
    return LinkCodecs(
        [plan.codec_of(cut) for cut in cuts],
        [plan.codec_of(cut, backward=True) for cut in cuts],
        always_check=os.environ.get(CHECK, "0") not in ("", "0"),
    )


def fake_link_codecs(plan: Plan) -> list[tuple[str, str]]:
    """Return each cut's codecs (forward, backward) that the single-device baseline must apply to match the plan."""
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
        """The codec of each cut, by whether the direction is backward."""
        self._is_stateful = any(CodecName.parse(name).is_stateful for names in self.names.values() for name in names)
        self._always_check = always_check
        self._channels: dict[str, Channel] = {}
        self._verified: set[tuple[str, bytes]] = set()
        self._compressible: Sequence[Sequence[bool]] = ()
        self._sample_keys: list[list[int]] = []
        self._training = False

    def begin(self, compressible: Sequence[Sequence[bool]], batch: Sequence[MicroBatch] | None) -> None:
        """Begin a step.

        ``compressible``: for each cut and tensor, whether it is an activation that codecs may compress. ``batch``: the
        micro-batches to train on; None for inference, which leaves the codecs' state unchanged.
        """
        self._compressible, self._training = compressible, batch is not None
        self._sample_keys = []
        if self._is_stateful:
            self._sample_keys = [_hash_samples(microbatch.inputs, microbatch.num_samples) for microbatch in batch or ()]

    def finish(self) -> None:
        """End a step: update the codecs' state."""
        if self._training:
            for channel in self._channels.values():
                channel.finish_step()

    def codec(self, transfer: Transfer, position: int, dtype: torch.dtype) -> Codec | None:
        """Return the codec of one tensor of a transfer; None if it is sent unchanged."""
        name = self.names[transfer.backward][transfer.cut]
        if name in ("none", AUTO) or dtype not in LINK_DTYPES:
            return None
        if not transfer.backward and not self._compressible[transfer.cut][position]:
            return None
        return get(name)

    def encode(self, transfer: Transfer, position: int, values: torch.Tensor) -> torch.Tensor:
        """Return what to send for a tensor."""
        codec = self.codec(transfer, position, values.dtype)
        if codec is None:
            return values
        start = recorder.now()
        values = to_encoded(values)
        channel = self._channel(transfer, position, codec, "send", values.shape, values.dtype)
        encoded = channel.encode(values, transfer.microbatch, self._keys_of(transfer))
        recorder.add("encode", start, num_bytes=encoded.nbytes)
        return encoded

    def num_bytes(self, transfer: Transfer, position: int, expected: TensorShape) -> int | None:
        """Return the encoded size of a tensor; None if it is sent unchanged."""
        codec = self.codec(transfer, position, expected.dtype)
        return None if codec is None else codec.num_bytes(expected.shape, _encoded_dtype(expected.dtype))

    def decode(self, transfer: Transfer, position: int, expected: TensorShape, buffer: torch.Tensor) -> torch.Tensor:
        """Decode a received tensor."""
        codec = self.codec(transfer, position, expected.dtype)
        if codec is None:
            return buffer
        start = recorder.now()
        dtype = _encoded_dtype(expected.dtype)
        channel = self._channel(transfer, position, codec, "receive", expected.shape, dtype)
        keys = self._keys_of(transfer)
        decoded = channel.decode(buffer, expected.shape, dtype, transfer.microbatch, keys).to(expected.dtype)
        recorder.add("decode", start, num_bytes=buffer.nbytes)
        return decoded

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state of this worker's ends, for a checkpoint."""
        return {
            f"{end}|{name}": value
            for end, channel in sorted(self._channels.items())
            for name, value in channel.state().items()
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint."""
        self.reset()
        ends: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            end, _, name = key.rpartition("|")
            ends.setdefault(end, {})[name] = value
        for end, values in ends.items():
            direction, cut, *_ = end.split()
            channel = self._channels[end] = open_channel(get(self.names[direction == "backward"][int(cut)]))
            channel.load_state(values)

    def reset(self) -> None:
        """Drop all state."""
        self._channels.clear()

    def _keys_of(self, transfer: Transfer) -> list[int]:
        """Return a hash of each sample if codecs are stateful."""
        return self._sample_keys[transfer.microbatch] if self._sample_keys else []

    def _channel(
        self, transfer: Transfer, position: int, codec: Codec, side: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Channel:
        end = f"{'backward' if transfer.backward else 'forward'} {transfer.cut} {position} {side}"
        channel = self._channels.get(end)
        if channel is None:
            channel = self._channels[end] = open_channel(codec)
        kind = (end, codec.header(shape, dtype))
        channel.checked = self._always_check or kind not in self._verified
        channel.frozen = not self._training
        self._verified.add(kind)
        return channel


def to_encoded(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype that codecs encode.

    Two float64 tensors that differ by 1e-16 nearly always round to the same float32 tensor, and then have the same
    message. This also removes noise around the values 0, 1 and 0.5, which are edges of many codecs.
    """
    return values.to(_encoded_dtype(values.dtype))


def _encoded_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.float64 else dtype


def round_trip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Encode and decode a tensor, as a link does."""
    encoded = to_encoded(values)
    decoded = codec.decode(codec.encode(encoded, checked=False), encoded.shape, encoded.dtype, checked=False)
    return decoded.to(values.dtype)


class FakeLink(torch.autograd.Function):
    """A compressed link inside one process: round-trips the activation in forward and its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward: str, backward: str, perturbation: float = 0.0) -> torch.Tensor:
        """Apply the forward codec; first perturb the values by up to ``perturbation`` times the largest of them."""
        ctx.backward_codec, ctx.perturbation = backward, perturbation
        values = _perturb(values, perturbation)
        return values.clone() if forward == "none" else round_trip(get(forward), values.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Apply the backward codec to the gradient."""
        gradient = _perturb(gradients[0], ctx.perturbation)
        if ctx.backward_codec != "none":
            gradient = round_trip(get(ctx.backward_codec), gradient.contiguous())
        return gradient, None, None, None


def _perturb(values: torch.Tensor, perturbation: float) -> torch.Tensor:
    """Add uniform noise, the same at each call."""
    if perturbation == 0 or values.numel() == 0:
        return values
    noise = torch.rand(values.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (values + noise.to(values.device) * perturbation * values.abs().max()).to(values.dtype)


def _hash_samples(inputs: Sequence[Any], num_samples: int) -> list[int]:
    """Hash the model inputs of each sample; the same on every worker."""
    hashes = [hashlib.blake2b(digest_size=8) for _ in range(num_samples)]
    for value in inputs:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous()
            is_batched = value.ndim and value.shape[0] == num_samples
            samples = value if is_batched else value.expand(num_samples, *value.shape)
            for sample_hash, sample in zip(hashes, samples, strict=True):
                sample_hash.update(sample.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return [int.from_bytes(sample_hash.digest(), "little") >> 1 for sample_hash in hashes]
