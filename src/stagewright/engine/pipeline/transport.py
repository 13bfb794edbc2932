"""P2P sends and receives between pipeline stages: tensors of known shape, received ahead, never waited for early.

    sender                              receiver
    isend(tensor, tag) ────────────►    irecv(buffer, tag)   posted one or two transfers ahead
    holds the tensor until it is sent   waits when the stage needs it; the buffer becomes the stage's input

With tensor degrees that differ between two stages, a sender's tensors go to several workers of the next stage, or to
none: ``spec.mesh`` draws who sends to whom. A tensor is encoded and held once, however many workers it goes to.

Each direction between two workers has its own process group. Both sides derive the order of transfers from the
schedule, so receives are posted in the order in which the peer sends (NCCL has no tags). With Gloo, data moves only
once the receive is posted: posting ahead overlaps communication with compute. If a link has a codec, the sender encodes
and the receiver decodes; byte counts are those of the encoded tensors.

A receiver can't know whether the sender has a gradient for each tensor (a loss may use an output in some micro-batches
only). A missing gradient is sent as a tensor filled with ``MISSING_BYTES`` and dropped by the receiver. No codec header
has these bytes, and no arithmetic produces them: they are a NaN with a payload that neither processors nor torch's
conversions make (0xFFFF is what torch's vectorized conversion to bfloat16 makes of every NaN). Between GPUs presence
flags are sent from host to host instead, one byte per gradient, not counted, so that no one synchronizes a GPU to
read them.

The first step of each kind between GPUs goes through host memory with Gloo (``through_host``). CUDA loads a kernel at
its first use and synchronizes the whole device for it, including an open NCCL receive, which may depend on this worker.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import c_uint32
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from stagewright.engine.pipeline.link_codec import LinkCodecs
from stagewright.engine.pipeline.links import TensorShape
from stagewright.engine.pipeline.transfers import Transfer
from stagewright.engine.worker.recorder import recorder

AHEAD = 2  # receives posted before they are needed, per peer and direction
AHEAD_IN_SCHEDULES = 1  # the same in a training step on CPUs: the next arrives while this one is computed
MAX_TENSORS = 64  # tensors in one transfer with its flags, for tags
MAX_MICROBATCHES = 4096  # for tags; the numbering of a long stream wraps around
MISSING_BYTES = (0xFE, 0xFF)  # fill a missing gradient on CPUs, in turn
_MISSING_WORD = 0xFFFEFFFE  # the first four bytes as an integer
IN_FLIGHT_BYTES = 8 * 2**20  # a stream may send this much ahead, so that a short stall of one stage stops no other

_Pending = list[tuple[Any, torch.Tensor]]
"""Work handles with the tensors they send or receive."""


def _tag(transfer: Transfer, position: int) -> int:
    """Return a tag that is unique among all transfers in flight between two workers."""
    number = transfer.microbatch % MAX_MICROBATCHES
    return ((transfer.cut * 2 + transfer.backward) * MAX_MICROBATCHES + number) * MAX_TENSORS + position


def _note(transfer: Transfer) -> str:
    """Return the kind of tensors in a transfer, for recorded events."""
    return "gradient" if transfer.backward else "activation"


@dataclass(slots=True)
class Sender:
    """Sends tensors and holds them until the send is complete."""

    group_to: Callable[[int], Any]
    """Returns the process group for sends to a world rank."""
    device: torch.device
    codecs: LinkCodecs | None = None
    through_host: bool = False
    sent_bytes: Counter[int] = field(default_factory=Counter)
    """Bytes sent since ``take_sent_bytes``, by cut."""
    _pending: dict[Transfer, _Pending] = field(default_factory=dict)
    _flags: _Pending = field(default_factory=list)

    def send(
        self,
        transfer: Transfer,
        tensors: Sequence[torch.Tensor | None],
        ranks: Sequence[int],
        shapes: Callable[[Transfer], Sequence[TensorShape]],
    ) -> None:
        """Send tensors to world ranks without waiting; ``None`` is a missing gradient.

        Several ranks are the tensor workers of one stage; none: another worker of this stage sends to them.
        """
        self._drop_completed()
        if not ranks:
            return
        if transfer.backward and _has_flags(self.device):
            flags = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8)
            for rank in ranks:
                self._flags.append((self._isend(flags, rank, transfer, len(tensors)), flags))
        pending = self._pending[transfer] = []
        for position, tensor in enumerate(tensors):
            if tensor is None:
                tensor = _fill_missing(
                    _make_buffer(transfer, position, shapes(transfer)[position], self.codecs, self.device)
                )
            elif self.codecs is not None:
                tensor = self.codecs.encode(transfer, position, tensor.detach())
            else:
                tensor = tensor.detach().to(self.device)  # lengths of packed sequences are on the host
            tensor = tensor.cpu().contiguous() if self.through_host else tensor.contiguous()
            for rank in ranks:
                start = recorder.now()
                work = self._isend(tensor, rank, transfer, position)
                recorder.add("send", start, stream="send", num_bytes=tensor.nbytes, peer=rank, note=_note(transfer))
                pending.append((work, tensor))
                self.sent_bytes[transfer.cut] += tensor.nbytes

    def _isend(self, tensor: torch.Tensor, rank: int, transfer: Transfer, position: int) -> Any:
        return dist.isend(tensor, dst=rank, group=self.group_to(rank), tag=_tag(transfer, position))

    def release(self, transfers: Iterable[Transfer]) -> None:
        """Wait until transfers are sent, which is immediate if the peer is known to have them, and free them."""
        for transfer in transfers:
            for work, _ in self._pending.pop(transfer, ()):
                work.wait()

    def flush(self) -> None:
        """Wait until everything is sent."""
        if self._pending or self._flags:
            start = recorder.now()
            self.release(list(self._pending))
            for work, _ in self._flags:
                work.wait()
            self._flags.clear()
            recorder.add("send", start, stream="send", note="flush")

    def limit_in_flight(self, max_bytes: int = IN_FLIGHT_BYTES, min_transfers: int = 2) -> None:
        """Wait for the oldest transfers while more than ``max_bytes`` and ``min_transfers`` are in flight."""
        self._drop_completed()
        in_flight = sum(_count_bytes(pending) for pending in self._pending.values())
        while in_flight > max_bytes and len(self._pending) > min_transfers:
            oldest = next(iter(self._pending))
            in_flight -= _count_bytes(self._pending[oldest])
            start = recorder.now()
            self.release([oldest])
            recorder.add("send", start, stream="send", note="limit")

    def _drop_completed(self) -> None:
        """Free completed sends; NCCL reports completion, Gloo only to a caller that waits."""
        while self._pending:
            oldest = next(iter(self._pending))
            if not all(work.is_completed() for work, _ in self._pending[oldest]):
                return
            del self._pending[oldest]

    def take_sent_bytes(self) -> Counter[int]:
        """Return the bytes sent by cut since the last call."""
        sent_bytes, self.sent_bytes = self.sent_bytes, Counter()
        return sent_bytes


class Receiver:
    """Receives from one peer in one direction, in the order in which the peer sends."""

    def __init__(
        self,
        group: Any,
        source: int,
        order: Iterator[Transfer],
        shapes: Callable[[Transfer], Sequence[TensorShape]],
        device: torch.device,
        codecs: LinkCodecs | None = None,
        through_host: bool = False,
        after: Mapping[Transfer, int] | None = None,
        ahead: int = AHEAD,
    ) -> None:
        self._group, self._source, self._order, self._shapes = group, source, order, shapes
        self._device, self._codecs = device, codecs
        self._buffer_device = torch.device("cpu") if through_host else device
        self._posted: dict[Transfer, _Pending] = {}
        self._flags: dict[Transfer, tuple[Any, torch.Tensor]] = {}
        self._after, self._num_done, self._ahead = after or {}, 0, ahead
        self._next: Transfer | None = None
        self.waited_s = 0.0
        self._post_ahead()

    def advance(self, num_done: int) -> None:
        """Post the receives that are possible after this worker has finished ``num_done`` actions."""
        self._num_done = num_done
        self._post_ahead()

    def receive(self, transfer: Transfer) -> list[torch.Tensor | None]:
        """Wait for a transfer and return its tensors; ``None`` is a missing gradient."""
        while transfer not in self._posted:
            following = self._peek()
            assert following is not None, f"{transfer} is not in the order of this link"
            self._post(following)
        start, start_mark = time.perf_counter(), recorder.now()
        received = self._posted.pop(transfer)
        for work, _ in received:
            work.wait()
        is_present = self._read_flags(transfer, [tensor for _, tensor in received])
        num_bytes = _count_bytes(received)
        recorder.add(
            "receive", start_mark, stream="receive", num_bytes=num_bytes, peer=self._source, note=_note(transfer)
        )
        self.waited_s += time.perf_counter() - start
        self._post_ahead()
        tensors = [
            tensor.to(self._device) if present else None
            for (_, tensor), present in zip(received, is_present, strict=True)
        ]
        if self._codecs is None:
            return tensors
        expected = self._shapes(transfer)
        return [
            None if tensor is None else self._codecs.decode(transfer, position, expected[position], tensor)
            for position, tensor in enumerate(tensors)
        ]

    def _read_flags(self, transfer: Transfer, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Return for each tensor of a transfer whether the sender had it."""
        if not transfer.backward:
            return [True] * len(tensors)
        if transfer not in self._flags:
            return [not _is_missing(tensor) for tensor in tensors]
        work, flags = self._flags.pop(transfer)
        work.wait()
        return list(map(bool, flags.tolist()))

    def _peek(self) -> Transfer | None:
        """Return the next transfer to post; reads no further, because a stream may be endless."""
        if self._next is None:
            self._next = next(self._order, None)
        return self._next

    def _post_ahead(self) -> None:
        """Post receives until enough are open, or the next can't be sent yet."""
        while len(self._posted) < self._ahead:
            following = self._peek()
            if following is None or self._after.get(following, 0) > self._num_done:
                return
            self._post(following)

    def _post(self, transfer: Transfer) -> None:
        buffers = []
        for position, expected in enumerate(self._shapes(transfer)):
            buffer = _make_buffer(transfer, position, expected, self._codecs, self._buffer_device)
            buffers.append((self._irecv(transfer, position, buffer), buffer))
        if transfer.backward and _has_flags(self._device):
            flags = torch.empty(len(buffers), dtype=torch.uint8)
            self._flags[transfer] = self._irecv(transfer, len(buffers), flags), flags
        self._posted[transfer] = buffers
        self._next = None

    def _irecv(self, transfer: Transfer, position: int, buffer: torch.Tensor) -> Any:
        return dist.irecv(buffer, src=self._source, group=self._group, tag=_tag(transfer, position))


def _make_buffer(
    transfer: Transfer, position: int, expected: TensorShape, codecs: LinkCodecs | None, device: torch.device
) -> torch.Tensor:
    """Allocate a buffer for a tensor as it is sent."""
    num_bytes = None if codecs is None else codecs.num_bytes(transfer, position, expected)
    if num_bytes is None:
        return torch.empty(expected.shape, dtype=expected.dtype, device=device)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _has_flags(device: torch.device) -> bool:
    """Return whether presence flags are sent with gradients: if reading a tensor's bytes synchronizes the device."""
    return device.type != "cpu"


def _fill_missing(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with the bytes that represent a missing gradient."""
    content = tensor.view(-1).view(torch.uint8)
    for offset, byte in enumerate(MISSING_BYTES):
        content[offset::2] = byte
    return tensor


def _is_missing(tensor: torch.Tensor) -> bool:
    """Return whether a tensor represents a missing gradient; the first bytes decide nearly always."""
    if tensor.nbytes >= 4 and c_uint32.from_address(tensor.data_ptr()).value != _MISSING_WORD:
        return False
    content = tensor.view(-1).view(torch.uint8)
    return tensor.numel() > 0 and all(
        bool((content[offset::2] == byte).all()) for offset, byte in enumerate(MISSING_BYTES)
    )


def _count_bytes(pending: _Pending) -> int:
    """Count the bytes held, once for a tensor that goes to several workers."""
    return sum({id(tensor): tensor.nbytes for _, tensor in pending}.values())
