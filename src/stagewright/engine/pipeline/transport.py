"""What travels between the stages of a pipeline: tensors of known shape, posted ahead, never waited for before needed.

    sender                              receiver
    isend(value, tag) ─────────────►    irecv(buffer, tag)   posted a message or two early
    keeps the value until it is gone    waits when the stage needs it; the buffer becomes the stage's input

Each direction between two workers has a process group of its own. Both sides know the order of the messages on it from
the schedule, so receives are posted in the order in which the peer sends (NCCL has no tags). With Gloo, data moves only
once the receive is posted: posting ahead is what hides the link behind compute. Where a link has a codec, the sender
encodes before it sends and the receiver decodes what it takes; bytes are then counted as they travel.

A receiver can't know before whether the sender has a gradient for each value (a loss may use a result in some
micro-batches only). Where there is none, a tensor of ``NOTHING`` is sent in its place and thrown away: bytes that
neither arithmetic (their number would be a NaN that no processor makes) nor a codec's header can have. Between GPUs
marks travel with gradients instead, a byte each, not counted, from host to host: nobody waits for a GPU to read them.

The first step of a kind between GPUs goes through the hosts' memory (``through_host``), with Gloo. CUDA loads a kernel
when it is first used, and waits for the whole device meanwhile: for an open receive of NCCL, too, which may wait for
this very worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import c_uint32
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stagewright.engine.pipeline.messages import Message
from stagewright.engine.worker.recorder import recorder

if TYPE_CHECKING:
    from stagewright.engine.pipeline.link_codec import LinkCodecs

__all__ = ["AHEAD", "AHEAD_IN_SCHEDULES", "Mailbox", "Outbox", "TensorShape"]

AHEAD = 2  # receives posted before they are needed, from each peer in each direction
AHEAD_IN_SCHEDULES = 1  # the same for a step of a schedule on CPUs: the next arrives while this one is computed
MOST_TENSORS = 64  # tensors in one message and its marks, for tags
MOST_NUMBERS = 4096  # micro-batches, for tags: those of a long stream begin again at 0
NOTHING = 0xFF  # each byte of what stands for a gradient that no one made, on CPUs
_FOUR = NOTHING * 0x01010101  # four of them, as a number
IN_FLIGHT_BYTES = 8 * 2**20  # that a stream may have sent ahead: a stage that is late for a moment stops no other


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """A tensor as the receiver expects it."""

    shape: tuple[int, ...]
    """Sizes, the batch's put in."""
    dtype: torch.dtype
    """Element type."""


def _tag(message: Message, position: int) -> int:
    """Unique on one pair of workers among all that can be under way."""
    number = message.microbatch % MOST_NUMBERS
    return ((message.edge * 2 + message.backward) * MOST_NUMBERS + number) * MOST_TENSORS + position


def _note(message: Message) -> str:
    """What a message holds, for the record of events."""
    return "gradient" if message.backward else "activation"


@dataclass(slots=True)
class Outbox:
    """Sends, and holds what was sent until it has left."""

    group_to: Callable[[int], Any]
    """The process group of messages to a world rank."""
    device: torch.device
    """Where this worker's tensors live."""
    codecs: LinkCodecs | None = None
    """How tensors are written, if not as they are."""
    through_host: bool = False
    """Whether GPUs' tensors travel through the hosts' memory."""
    num_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes sent since ``take_bytes``, by edge."""
    _pending: dict[Message, list[tuple[Any, torch.Tensor]]] = field(default_factory=dict)
    _marks: list[tuple[Any, torch.Tensor]] = field(default_factory=list)

    def send(
        self,
        message: Message,
        tensors: Sequence[torch.Tensor | None],
        to: int,
        shapes: Callable[[Message], Sequence[TensorShape]],
    ) -> None:
        """Send tensors to a world rank without waiting; ``None`` for a gradient that no one made."""
        self._drop_completed()
        group = self.group_to(to)
        if message.backward and _has_marks(self.device):
            marks = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8)
            self._marks.append((dist.isend(marks, dst=to, group=group, tag=_tag(message, len(tensors))), marks))
        pending = self._pending[message] = []
        for position, tensor in enumerate(tensors):
            if tensor is None:
                tensor = _nothing(_buffer(message, position, shapes(message)[position], self.codecs, self.device))
            elif self.codecs is not None:
                tensor = self.codecs.encode(message, position, tensor.detach())
            else:
                tensor = tensor.detach()
            tensor = tensor.cpu().contiguous() if self.through_host else tensor.contiguous()
            size = tensor.numel() * tensor.element_size()
            start = recorder.now()
            work = dist.isend(tensor, dst=to, group=group, tag=_tag(message, position))
            recorder.add("send", start, stream="send", num_bytes=size, peer=to, note=_note(message))
            pending.append((work, tensor))
            self.num_bytes[message.edge] = self.num_bytes.get(message.edge, 0) + size

    def let_go(self, messages: Iterable[Message]) -> None:
        """Wait until messages have left, which is at once where the peer is known to have them, and forget them."""
        for message in messages:
            for work, _ in self._pending.pop(message, ()):
                work.wait()

    def flush(self) -> None:
        """Wait until all messages have left."""
        if self._pending or self._marks:
            start = recorder.now()
            self.let_go(list(self._pending))
            for work, _ in self._marks:
                work.wait()
            self._marks.clear()
            recorder.add("send", start, stream="send", note="flush")

    def limit(self, most_bytes: int = IN_FLIGHT_BYTES, at_least: int = 2) -> None:
        """Wait for the oldest while more bytes than that are on their way, but let ``at_least`` messages be."""
        self._drop_completed()
        held = sum(_num_bytes(pending) for pending in self._pending.values())
        while held > most_bytes and len(self._pending) > at_least:
            oldest = next(iter(self._pending))
            held -= _num_bytes(self._pending[oldest])
            start = recorder.now()
            self.let_go([oldest])
            recorder.add("send", start, stream="send", note="limit")

    def _drop_completed(self) -> None:
        """Forget what has left; NCCL tells, Gloo only those who wait."""
        while self._pending:
            oldest = next(iter(self._pending))
            if not all(work.is_completed() for work, _ in self._pending[oldest]):
                return
            del self._pending[oldest]

    def take_bytes(self) -> dict[int, int]:
        """Bytes by edge since the last call."""
        taken, self.num_bytes = self.num_bytes, {}
        return taken


class Mailbox:
    """Receives from one peer in one direction, in the order in which the peer sends."""

    def __init__(
        self,
        group: Any,
        source: int,
        order: Iterator[Message],
        shapes: Callable[[Message], Sequence[TensorShape]],
        device: torch.device,
        codecs: LinkCodecs | None = None,
        through_host: bool = False,
        after: Mapping[Message, int] | None = None,
        ahead: int = AHEAD,
    ) -> None:
        self._group, self._source, self._order, self._shapes = group, source, order, shapes
        self._device, self._codecs = device, codecs
        self._through = torch.device("cpu") if through_host else device
        self._posted: dict[Message, list[tuple[Any, torch.Tensor]]] = {}
        self._marks: dict[Message, tuple[Any, torch.Tensor]] = {}
        self._after, self._done, self._ahead = after or {}, 0, ahead
        self._next: Message | None = None
        self.waited_s = 0.0
        """Seconds spent waiting for messages."""
        self._post()

    def advance(self, done: int) -> None:
        """This worker has done so many actions: post what can be sent now."""
        self._done = done
        self._post()

    def take(self, message: Message) -> list[torch.Tensor | None]:
        """Wait for a message; its tensors are the caller's. ``None`` for a gradient that no one made."""
        while message not in self._posted:
            following = self._following()
            assert following is not None, f"{message} is not in the order of this edge"
            self._open(following)
        start, begun = time.perf_counter(), recorder.now()
        received = self._posted.pop(message)
        num_bytes = 0
        for work, tensor in received:
            work.wait()
            num_bytes += tensor.numel() * tensor.element_size()
        made = self._made(message, [tensor for _, tensor in received])
        recorder.add("receive", begun, stream="receive", num_bytes=num_bytes, peer=self._source, note=_note(message))
        self.waited_s += time.perf_counter() - start
        self._post()
        tensors = [
            tensor.to(self._device) if there else None for (_, tensor), there in zip(received, made, strict=True)
        ]
        if self._codecs is None:
            return tensors
        expected = self._shapes(message)
        return [
            None if tensor is None else self._codecs.decode(message, at, expected[at], tensor)
            for at, tensor in enumerate(tensors)
        ]

    def _made(self, message: Message, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """For each tensor of a message, whether the sender had it."""
        if not message.backward:
            return [True] * len(tensors)
        if message not in self._marks:
            return [not _is_nothing(tensor) for tensor in tensors]
        work, marks = self._marks.pop(message)
        work.wait()
        return list(map(bool, marks.tolist()))

    def _following(self) -> Message | None:
        """The message to be posted next; no more is read ahead, since a stream may have no end."""
        if self._next is None:
            self._next = next(self._order, None)
        return self._next

    def _post(self) -> None:
        """Post receives until enough are open, or the next can't be sent yet."""
        while len(self._posted) < self._ahead:
            following = self._following()
            if following is None or self._after.get(following, 0) > self._done:
                return
            self._open(following)

    def _open(self, message: Message) -> None:
        buffers = []
        for position, expected in enumerate(self._shapes(message)):
            buffer = _buffer(message, position, expected, self._codecs, self._through)
            buffers.append((self._receive(message, position, buffer), buffer))
        if message.backward and _has_marks(self._device):
            marks = torch.empty(len(buffers), dtype=torch.uint8)
            self._marks[message] = self._receive(message, len(buffers), marks), marks
        self._posted[message] = buffers
        self._next = None

    def _receive(self, message: Message, position: int, buffer: torch.Tensor) -> Any:
        return dist.irecv(buffer, src=self._source, group=self._group, tag=_tag(message, position))


def _buffer(
    message: Message, position: int, expected: TensorShape, codecs: LinkCodecs | None, device: torch.device
) -> torch.Tensor:
    """Room for a tensor as it travels."""
    size = None if codecs is None else codecs.num_bytes(message, position, expected)
    if size is None:
        return torch.empty(expected.shape, dtype=expected.dtype, device=device)
    return torch.empty(size, dtype=torch.uint8, device=device)


def _has_marks(device: torch.device) -> bool:
    """Whether marks travel with gradients: where a tensor's bytes can't be read without waiting."""
    return device.type != "cpu"


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    """Filled with what stands for no gradient; on a GPU, with anything."""
    tensor.view(-1).view(torch.uint8).fill_(NOTHING)
    return tensor


def _is_nothing(tensor: torch.Tensor) -> bool:
    """Whether it stands for no gradient; nearly all others tell by their first bytes."""
    if tensor.nbytes >= 4 and c_uint32.from_address(tensor.data_ptr()).value != _FOUR:
        return False
    return tensor.numel() > 0 and bool((tensor.view(-1).view(torch.uint8) == NOTHING).all())


def _num_bytes(pending: Sequence[tuple[Any, torch.Tensor]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in pending)
