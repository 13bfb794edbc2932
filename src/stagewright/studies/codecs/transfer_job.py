"""The job of two workers that measure a transfer end to end: from the sender's tensor to the receiver's.

    worker 0   ready? ─► encode ─► send ──►                  ──► receive 8 bytes     round trip − half of an empty one
    worker 1   ready!              ──► receive ─► decode ─► send 8 bytes

The clock starts when the receiver reports that it is ready, so that nothing of the previous transfer counts, and stops
when it reports that it has decoded the tensor, so that nothing is still in flight. Codecs and sizes alternate over
several rounds, and the fastest of each counts: other programs can only make a transfer slower.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stagewright.files.atomic import save_text
from stagewright.files.json_values import read_object
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan

if TYPE_CHECKING:
    from stagewright.engine.worker.context import WorkerContext

SIZES_BYTES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
_REPEATS = 4  # in a round: on a busy machine most of them may be delayed
_JOB = "stagewright.studies.codecs.transfer_job:run"
_REQUEST, _RESULT = "transfer.json", "transfers.json"
_SMALL_BYTES = 64 << 10


def measure_transfers(
    codecs: Sequence[str], shape: Sequence[int], ends: tuple[str, str], *, rounds: int
) -> dict[str, Any]:
    """Time one tensor with each codec, and uncompressed messages by size, between two workers."""
    from stagewright.engine.launch.launcher import launch

    with tempfile.TemporaryDirectory(prefix="stagewright-transfer-") as root:
        plan = Plan(model=ModelSpec(name="mlp-mnist"), batch=2, mesh=Mesh(data=2), devices=ends)
        folder = RunFolder.create(root, plan)
        request = {"codecs": list(codecs), "shape": list(shape), "rounds": rounds}
        save_text(json.dumps(request) + "\n", folder.path / _REQUEST)
        launch(plan, folder, job=_JOB)
        return read_object(folder.path / _RESULT)


def run(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """Measure; worker 0 writes the result."""
    request = read_object(run_folder.path / _REQUEST)
    link = _LinkEnd(context, request["shape"])
    times: dict[str, list[float]] = {}
    for repeat in range(_REPEATS * request["rounds"] + 1):
        for name in request["codecs"]:
            times.setdefault(name, []).append(link.tensor(name))
        for size in SIZES_BYTES:
            times.setdefault(str(size), []).extend(link.plain(size) for _ in range(_num_tries(size)))
        times.setdefault("empty", []).extend(link.plain(8) for _ in range(_num_tries(8)))
        if repeat == 0:  # warm-up
            times.clear()
    if context.rank == 0:
        seconds = one_way(times)
        result = {
            "raw_bytes": link.values.numel() * link.values.element_size(),
            "codecs": {
                name: {"seconds": seconds[name], "num_bytes": link.num_bytes(name)} for name in request["codecs"]
            },
            "sizes": {str(size): seconds[str(size)] for size in SIZES_BYTES},
            "latency_s": seconds["empty"],
        }
        save_text(json.dumps(result) + "\n", run_folder.path / _RESULT)


def _num_tries(size: int) -> int:
    """Transfers per repeat: small messages are fast, and easily delayed."""
    return 4 if size <= _SMALL_BYTES else 1


def one_way(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return one-way seconds by name, from several round trips each; ``empty`` is an empty message.

    The reply takes half of an empty round trip, but never more than half of the round trip itself: an empty round trip
    that took longer than another was delayed.
    """
    fastest = {name: min(seconds) for name, seconds in times.items()}
    return {name: max(seconds - fastest["empty"] / 2, seconds / 2) for name, seconds in fastest.items()}


class _LinkEnd:
    """This worker's end of the link."""

    def __init__(self, context: WorkerContext, shape: Sequence[int]) -> None:
        import torch

        self.rank, self.device = context.rank, context.torch_device
        generator = torch.Generator().manual_seed(0)
        self.values = torch.randn(*shape, generator=generator).to(self.device)
        self.reply = torch.zeros(8, dtype=torch.uint8, device=self.device)

    def num_bytes(self, name: str) -> int:
        """Bytes sent for the tensor."""
        from stagewright.codecs.registry import get

        return get(name).num_bytes(self.values.shape, self.values.dtype)

    def tensor(self, name: str) -> float:
        """Time the tensor through a codec, until the reply that it has arrived."""
        import torch
        import torch.distributed as dist

        from stagewright.codecs.registry import get

        codec, values = get(name), self.values
        # Without a codec a tensor is sent as it is. As in a pipeline, the receive buffer is allocated beforehand.
        is_plain = name == "none"
        buffer = (
            torch.empty_like(values)
            if is_plain
            else torch.empty(self.num_bytes(name), dtype=torch.uint8, device=self.device)
        )

        def transfer() -> None:
            if self.rank == 0:
                dist.send(values if is_plain else codec.encode(values, checked=False), 1)
            else:
                dist.recv(buffer, 0)
                if not is_plain:
                    codec.decode(buffer, values.shape, values.dtype, checked=False)

        return self._time(transfer)

    def plain(self, size: int) -> float:
        """Time a message of `size` bytes, until the reply."""
        import torch
        import torch.distributed as dist

        message = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._time(lambda: dist.send(message, 1) if self.rank == 0 else dist.recv(message, 0))

    def _time(self, transfer: Callable[[], object]) -> float:
        self._await_receiver()
        start = time.perf_counter()
        transfer()
        self._await_receiver()
        return time.perf_counter() - start

    def _await_receiver(self) -> None:
        """Send a short reply from the receiver, for which the sender waits."""
        import torch
        import torch.distributed as dist

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.rank == 0:
            dist.recv(self.reply, 1)
        else:
            dist.send(self.reply, 0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
