"""What each of two workers does to find the honest rate of a transfer: from the sender's tensor to the receiver's.

    worker 0   ready? ─► encode ─► send ──►                  ──► receive 8 bytes     round trip − half of an empty one
    worker 1   ready!              ──► receive ─► decode ─► send 8 bytes

The clock starts when the receiver says that it waits (what was left of the transfer before counts for none), and stops
when it says that it has the tensor, decoded: nothing is counted that still travels. Codecs and sizes take turns in
several rounds, of which the quickest of each counts: what else runs for a moment can only make one longer.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stagewright.files.atomic import save_text
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan

if TYPE_CHECKING:
    from stagewright.engine.worker.context import WorkerContext

__all__ = ["SIZES_BYTES", "measure_transfers", "one_way", "run"]

SIZES_BYTES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
_TURNS = 4  # in a round: most of them can be delayed where others use the cores
_JOB = "stagewright.studies.codecs.transfer_job:run"
_ASKED, _FOUND = "transfer.json", "transfers.json"
_SMALL_BYTES = 64 << 10


def measure_transfers(
    codecs: Sequence[str], shape: Sequence[int], ends: tuple[str, str], *, rounds: int
) -> dict[str, Any]:
    """Seconds of one tensor with each codec, and of plain bytes by size, between two workers."""
    from stagewright.engine.launch.launcher import launch

    with tempfile.TemporaryDirectory(prefix="stagewright-transfer-") as root:
        plan = Plan(model=ModelSpec(name="mlp-mnist"), batch=2, mesh=Mesh(data=2), devices=ends)
        folder = RunFolder.create(root, plan)
        asked = {"codecs": list(codecs), "shape": list(shape), "rounds": rounds}
        save_text(json.dumps(asked) + "\n", folder.path / _ASKED)
        launch(plan, folder, job=_JOB)
        found: dict[str, Any] = json.loads((folder.path / _FOUND).read_text(encoding="utf-8"))
        return found


def run(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """Measure; worker 0 writes what was found."""
    asked = json.loads((run_folder.path / _ASKED).read_text(encoding="utf-8"))
    ends = _Ends(context, asked["shape"])
    times: dict[str, list[float]] = {}
    for turn in range(_TURNS * asked["rounds"] + 1):
        for name in asked["codecs"]:
            times.setdefault(name, []).append(ends.tensor(name))
        for size in SIZES_BYTES:
            times.setdefault(str(size), []).extend(ends.plain(size) for _ in range(_tries(size)))
        times.setdefault("empty", []).extend(ends.plain(8) for _ in range(_tries(8)))
        if turn == 0:  # the first of each sets things up
            times.clear()
    if context.rank == 0:
        there_s = one_way(times)
        found = {
            "raw_bytes": ends.values.numel() * ends.values.element_size(),
            "codecs": {name: {"seconds": there_s[name], "num_bytes": ends.num_bytes(name)} for name in asked["codecs"]},
            "sizes": {str(size): there_s[str(size)] for size in SIZES_BYTES},
            "latency_s": there_s["empty"],
        }
        save_text(json.dumps(found) + "\n", run_folder.path / _FOUND)


def _tries(size: int) -> int:
    """Of a turn: a small message is soon sent, and often delayed."""
    return 4 if size <= _SMALL_BYTES else 1


def one_way(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Seconds there, by name, from those of several round trips each; ``empty`` are those of an empty message.

    The answer takes half of an empty round trip, and no more than half of any: where an empty one was measured to take
    longer than another, it was delayed.
    """
    least = {name: min(seconds) for name, seconds in times.items()}
    return {name: max(seconds - least["empty"] / 2, seconds / 2) for name, seconds in least.items()}


class _Ends:
    """This worker's end of the link."""

    def __init__(self, context: WorkerContext, shape: Sequence[int]) -> None:
        import torch

        self.rank, self.place = context.rank, context.torch_device
        generator = torch.Generator().manual_seed(0)
        self.values = torch.randn(*shape, generator=generator).to(self.place)
        self.answer = torch.zeros(8, dtype=torch.uint8, device=self.place)

    def num_bytes(self, name: str) -> int:
        """What travels for the tensor."""
        from stagewright.codecs.registry import get

        return get(name).num_bytes(self.values.shape, self.values.dtype)

    def tensor(self, name: str) -> float:
        """The tensor through a codec, there; and the answer that it has arrived."""
        import torch
        import torch.distributed as dist

        from stagewright.codecs.registry import get

        codec, values = get(name), self.values
        # Without a codec a tensor travels as it is. Room for what arrives is there before, as in a pipeline.
        is_plain = name == "none"
        room = (
            torch.empty_like(values)
            if is_plain
            else torch.empty(self.num_bytes(name), dtype=torch.uint8, device=self.place)
        )
        self._hear()
        start = time.perf_counter()
        if self.rank == 0:
            dist.send(values if is_plain else codec.encode(values, checked=False), 1)
        else:
            dist.recv(room, 0)
            if not is_plain:
                codec.decode(room, values.shape, values.dtype, checked=False)
        self._hear()
        return time.perf_counter() - start

    def plain(self, size: int) -> float:
        """So many bytes, there; and the answer."""
        import torch
        import torch.distributed as dist

        message = torch.zeros(size, dtype=torch.uint8, device=self.place)
        self._hear()
        start = time.perf_counter()
        if self.rank == 0:
            dist.send(message, 1)
        else:
            dist.recv(message, 0)
        self._hear()
        return time.perf_counter() - start

    def _hear(self) -> None:
        """A word from the receiver, awaited by the sender."""
        import torch
        import torch.distributed as dist

        if self.place.type == "cuda":
            torch.cuda.synchronize(self.place)
        if self.rank == 0:
            dist.recv(self.answer, 1)
        else:
            dist.send(self.answer, 0)
        if self.place.type == "cuda":
            torch.cuda.synchronize(self.place)
