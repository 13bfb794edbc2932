"""Stateful codecs: delta sends the change since a sample was last seen, feedback adds the error of the last message.

    delta(C)       sender: C(x − seen[sample])             both ends: seen[sample] += the decoded change
    feedback(C)    sender: C(x + lost[micro-batch])        sender: lost = x + lost − the decoded value

Called directly (`encode`, `decode`) they are C with empty state. On a link each end holds a `Channel` with the state:
it reads the state from before the step and applies updates at the end of the step, so that both ends agree for every
order of micro-batches. Both ends identify samples by a hash of the model's inputs. Delta's state is bounded: the least
recently seen samples are evicted. Evaluation neither reads nor changes the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from stagewright.codecs.base import Codec
from stagewright.codecs.name import CodecName
from stagewright.codecs.registry import build_codec, register
from stagewright.quantity import format_bytes, parse_bytes

_MAX_STATE_BYTES = 2**30  # of one tensor at one end of a link, unless the codec's name sets it


class StatefulCodec(Codec):
    """A codec that wraps another; without a channel it does what the inner codec does."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        assert name.inner is not None
        self.inner = build_codec(name.inner)

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return self.inner.payload_bytes(shape, dtype)

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        self.inner.write(values, payload)

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.inner.read(payload, shape, dtype)

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner.bound(values)


@register("delta")
class Delta(StatefulCodec):
    """The change since a sample was last seen."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        self.max_state_bytes = parse_bytes(name.option) if name.option is not None else _MAX_STATE_BYTES
        limit = format_bytes(self.max_state_bytes)
        self.summary = f"{self.inner.name} of the change since the sample was last seen; state of at most {limit}"


@register("feedback")
class Feedback(StatefulCodec):
    """Error feedback: the error of a message is added to the next one."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        self.summary = f"{self.inner.name} with error feedback: adds the error of the micro-batch's last message"


class Channel:
    """One end of one direction of a link, for one tensor of its crossing; this class is that of stateless codecs."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.frozen = False
        """In evaluation: the state is neither read nor changed."""
        self.checked = False
        """Whether messages carry a checksum and are verified."""

    def encode(self, values: torch.Tensor, microbatch: int, keys: Sequence[int]) -> torch.Tensor:
        """Encode a tensor; ``keys`` identify its samples, in order."""
        return self.codec.encode(values, checked=self.checked)

    def decode(
        self, buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, microbatch: int, keys: Sequence[int]
    ) -> torch.Tensor:
        """Decode a message."""
        return self.codec.decode(buffer, shape, dtype, checked=self.checked)

    def finish_step(self) -> None:
        """Apply the state updates of the step."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state, for a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the state from a checkpoint."""


def open_channel(codec: Codec) -> Channel:
    """Create a channel with empty state."""
    if isinstance(codec, Delta):
        return DeltaChannel(codec)
    return FeedbackChannel(codec) if isinstance(codec, Feedback) else Channel(codec)


class FeedbackChannel(Channel):
    """Channel whose sender stores the error of its last message for each micro-batch."""

    def __init__(self, codec: Feedback) -> None:
        super().__init__(codec)
        self._lost: dict[int, torch.Tensor] = {}

    def encode(self, values: torch.Tensor, microbatch: int, keys: Sequence[int]) -> torch.Tensor:
        if self.frozen:
            return super().encode(values, microbatch, keys)
        lost = self._lost.get(microbatch)
        corrected = values if lost is None or lost.shape != values.shape else values + lost
        buffer = super().encode(corrected, microbatch, keys)
        error = corrected - self.codec.decode(buffer, values.shape, values.dtype, checked=False)
        self._lost[microbatch] = error.nan_to_num_(0.0, 0.0, 0.0)  # an overflow must not persist
        return buffer

    def state(self) -> dict[str, torch.Tensor]:
        return {str(microbatch): error for microbatch, error in sorted(self._lost.items())}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._lost = {int(microbatch): error for microbatch, error in state.items()}


class DeltaChannel(Channel):
    """Channel whose ends both store each sample as the receiver last decoded it."""

    def __init__(self, codec: Delta) -> None:
        super().__init__(codec)
        self._max_bytes = codec.max_state_bytes
        self._seen: dict[int, torch.Tensor] = {}
        self._last_step: dict[int, int] = {}
        self._step = 0
        self._updates: dict[int, tuple[Sequence[int], torch.Tensor]] = {}

    def encode(self, values: torch.Tensor, microbatch: int, keys: Sequence[int]) -> torch.Tensor:
        if self.frozen:
            return super().encode(values, microbatch, keys)
        base = self._base(values.shape, values.dtype, values.device, keys)
        buffer = self.codec.encode((values.float() - base).to(values.dtype), checked=self.checked)
        self._reconstruct(buffer, values.shape, values.dtype, microbatch, keys, base)
        return buffer

    def decode(
        self, buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, microbatch: int, keys: Sequence[int]
    ) -> torch.Tensor:
        if self.frozen:
            return super().decode(buffer, shape, dtype, microbatch, keys)
        base = self._base(shape, dtype, buffer.device, keys)
        return self._reconstruct(buffer, shape, dtype, microbatch, keys, base)

    def finish_step(self) -> None:
        for _, (keys, values) in sorted(self._updates.items()):
            for key, value in zip(keys, _samples(values, len(keys)), strict=True):
                self._seen[key] = value.clone()
                self._last_step[key] = self._step
        self._updates.clear()
        self._step += 1
        state_bytes = sum(value.numel() * value.element_size() for value in self._seen.values())
        if state_bytes <= self._max_bytes:
            return
        for key in sorted(self._seen, key=lambda key: (self._last_step[key], key)):
            if state_bytes <= self._max_bytes:
                break
            evicted = self._seen.pop(key)
            state_bytes -= evicted.numel() * evicted.element_size()
            del self._last_step[key]

    def state(self) -> dict[str, torch.Tensor]:
        samples = {f"{key}": value for key, value in self._seen.items()}
        steps = [[key, self._last_step[key]] for key in self._seen]
        return {**samples, "last": torch.tensor([[0, self._step], *steps], dtype=torch.int64)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if not state:
            return
        (_, self._step), *steps = state["last"].tolist()
        self._last_step = {int(key): int(step) for key, step in steps}
        self._seen = {key: state[str(key)] for key in self._last_step}

    def _base(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, keys: Sequence[int]
    ) -> torch.Tensor:
        """Return the stored values of a message's samples in float32; zeros for new samples."""
        base = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
        for key, row in zip(_row_keys(shape, keys), _samples(base, len(_row_keys(shape, keys))), strict=True):
            stored = self._seen.get(key)
            if stored is not None and stored.shape == row.shape:
                row.copy_(stored)
        return base

    def _reconstruct(
        self,
        buffer: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        microbatch: int,
        keys: Sequence[int],
        base: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the receiver's tensor and keep it as an update for the end of the step."""
        change = self.codec.decode(buffer, shape, dtype, checked=self.checked)
        values = (base + change.float()).to(dtype)
        if bool(values.isfinite().all()):  # an overflow must not persist
            self._updates[microbatch] = (_row_keys(shape, keys), values.clone())
        return values


def _row_keys(shape: Sequence[int], keys: Sequence[int]) -> Sequence[int]:
    """Return one key per row, or one for the whole tensor where rows are not samples."""
    if len(shape) and shape[0] == len(keys):
        return keys
    mixed = 0
    for key in keys:
        mixed = (mixed * 6364136223846793005 + key + 1) % 2**63
    return [mixed]


def _samples(values: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    return [values] if count == 1 and (not values.ndim or values.shape[0] != 1) else list(values)
