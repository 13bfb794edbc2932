"""Codecs with a memory: delta sends the change since a sample was last seen, feedback adds what was lost last time.

    delta(C)       sender: C(x − seen[sample])             both: seen[sample] += what C made of it
    feedback(C)    sender: C(x + lost[micro-batch])        sender: lost = x + lost − what C made of it

Used alone (`encode`, `decode`) they are C with an empty memory. On a link each end has a `Channel`, which keeps the
memory: it reads what was known before the step, notes what is new, and takes it over when the step ends, so both ends
agree whatever the order of micro-batches. Samples are known by a number that both ends make of the model's inputs.
A delta's memory is capped: the samples that were not seen for the longest time are forgotten. In evaluation nothing is
read from the memory and nothing changes in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from stagewright.codecs.base import Codec
from stagewright.codecs.name import CodecName
from stagewright.codecs.registry import make, register
from stagewright.quantity import format_bytes, parse_bytes

__all__ = ["Channel", "Delta", "Feedback", "PlainChannel", "WithMemory", "open_channel"]

MOST_BYTES = 2**30
"""That one end of a link remembers for one tensor, unless the codec's name says otherwise."""


class WithMemory(Codec):
    """A codec around another; by itself it does what that one does."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name.text)
        assert name.inner is not None
        self.inner = make(name.inner)

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return self.inner.payload_bytes(shape, dtype)

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        self.inner.write(values, payload)

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.inner.read(payload, shape, dtype)

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner.bound(values)


@register("delta")
class Delta(WithMemory):
    """The change since a sample was last seen."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        self.most_bytes = parse_bytes(name.option) if name.option is not None else MOST_BYTES
        kept = format_bytes(self.most_bytes)
        self.summary = f"{self.inner.name} of the change since the sample was last seen; remembers {kept} at most"


@register("feedback")
class Feedback(WithMemory):
    """What was lost is added next time."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        self.summary = f"{self.inner.name} of the value and what the last message of its micro-batch lost"


class Channel(ABC):
    """One end of one direction of a link, for one tensor of its crossing."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.frozen = False
        """In evaluation: the memory is neither read nor changed."""
        self.checked = False
        """Whether messages carry a checksum and are checked."""

    @abstractmethod
    def encode(self, values: torch.Tensor, microbatch: int, keys: Sequence[int]) -> torch.Tensor:
        """The message of a tensor; ``keys`` are its samples' numbers, in order."""

    @abstractmethod
    def decode(
        self, buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, microbatch: int, keys: Sequence[int]
    ) -> torch.Tensor:
        """The tensor in a message."""

    def finish_step(self) -> None:  # noqa: B027 - most have nothing to take over
        """Take over what the step's messages taught."""

    def state(self) -> dict[str, torch.Tensor]:
        """The memory, for a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: B027 - nor anything to put back
        """Put a memory back."""


def open_channel(codec: Codec) -> Channel:
    """A channel with an empty memory."""
    if isinstance(codec, Delta):
        return DeltaChannel(codec)
    return FeedbackChannel(codec) if isinstance(codec, Feedback) else PlainChannel(codec)


class PlainChannel(Channel):
    """Without a memory."""

    def encode(self, values: torch.Tensor, microbatch: int, keys: Sequence[int]) -> torch.Tensor:
        return self.codec.encode(values, checked=self.checked)

    def decode(
        self, buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, microbatch: int, keys: Sequence[int]
    ) -> torch.Tensor:
        return self.codec.decode(buffer, shape, dtype, checked=self.checked)


class FeedbackChannel(PlainChannel):
    """The sender remembers what its last message of each micro-batch lost."""

    def __init__(self, codec: Feedback) -> None:
        super().__init__(codec)
        self._lost: dict[int, torch.Tensor] = {}

    def encode(self, values: torch.Tensor, microbatch: int, keys: Sequence[int]) -> torch.Tensor:
        if self.frozen:
            return super().encode(values, microbatch, keys)
        lost = self._lost.get(microbatch)
        wanted = values if lost is None or lost.shape != values.shape else values + lost
        buffer = super().encode(wanted, microbatch, keys)
        left = wanted - self.codec.decode(buffer, values.shape, values.dtype, checked=False)
        self._lost[microbatch] = left.nan_to_num_(0.0, 0.0, 0.0)  # one overflow must not stay for ever
        return buffer

    def state(self) -> dict[str, torch.Tensor]:
        return {str(at): value for at, value in sorted(self._lost.items())}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._lost = {int(at): value for at, value in state.items()}


class DeltaChannel(Channel):
    """Both ends remember each sample as the receiver knows it."""

    def __init__(self, codec: Delta) -> None:
        super().__init__(codec)
        self._most_bytes = codec.most_bytes
        self._seen: dict[int, torch.Tensor] = {}
        self._last: dict[int, int] = {}
        self._step = 0
        self._new: dict[int, tuple[Sequence[int], torch.Tensor]] = {}

    def encode(self, values: torch.Tensor, microbatch: int, keys: Sequence[int]) -> torch.Tensor:
        if self.frozen:
            return self.codec.encode(values, checked=self.checked)
        base = self._base(values.shape, values.dtype, values.device, keys)
        buffer = self.codec.encode((values.float() - base).to(values.dtype), checked=self.checked)
        self._note(buffer, values.shape, values.dtype, microbatch, keys, base)
        return buffer

    def decode(
        self, buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, microbatch: int, keys: Sequence[int]
    ) -> torch.Tensor:
        if self.frozen:
            return self.codec.decode(buffer, shape, dtype, checked=self.checked)
        base = self._base(shape, dtype, buffer.device, keys)
        return self._note(buffer, shape, dtype, microbatch, keys, base)

    def finish_step(self) -> None:
        for _, (keys, values) in sorted(self._new.items()):
            for key, value in zip(keys, _samples(values, len(keys)), strict=True):
                self._seen[key] = value.clone()
                self._last[key] = self._step
        self._new.clear()
        self._step += 1
        held = sum(one.numel() * one.element_size() for one in self._seen.values())
        for key in sorted(self._seen, key=lambda one: (self._last[one], one)) if held > self._most_bytes else ():
            if held <= self._most_bytes:
                break
            gone = self._seen.pop(key)
            held -= gone.numel() * gone.element_size()
            del self._last[key]

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"{key}": value for key, value in self._seen.items()}
        counts = [[key, self._last[key]] for key in self._seen]
        return {**found, "last": torch.tensor([[0, self._step], *counts], dtype=torch.int64)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if not state:
            return
        (_, self._step), *counts = state["last"].tolist()
        self._last = {int(key): int(step) for key, step in counts}
        self._seen = {key: state[str(key)] for key in self._last}

    def _base(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, keys: Sequence[int]
    ) -> torch.Tensor:
        """What is known of a message's samples, in float32; zeros where nothing is."""
        base = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
        for key, row in zip(_row_keys(shape, keys), _samples(base, len(_row_keys(shape, keys))), strict=True):
            known = self._seen.get(key)
            if known is not None and known.shape == row.shape:
                row.copy_(known)
        return base

    def _note(
        self,
        buffer: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        microbatch: int,
        keys: Sequence[int],
        base: torch.Tensor,
    ) -> torch.Tensor:
        """What the receiver makes of a message; noted for the end of the step."""
        change = self.codec.decode(buffer, shape, dtype, checked=self.checked)
        values = (base + change.float()).to(dtype)
        if bool(values.isfinite().all()):  # one overflow must not stay for ever
            self._new[microbatch] = (_row_keys(shape, keys), values.clone())
        return values


def _row_keys(shape: Sequence[int], keys: Sequence[int]) -> Sequence[int]:
    """One number for each row; where rows are no samples, one for all."""
    if len(shape) and shape[0] == len(keys):
        return keys
    mixed = 0
    for key in keys:
        mixed = (mixed * 6364136223846793005 + key + 1) % 2**63
    return [mixed]


def _samples(values: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    return [values] if count == 1 and (not values.ndim or values.shape[0] != 1) else list(values)
