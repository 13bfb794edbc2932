"""How much memory a worker's own tensors occupy, by what they are for, and the most it was at once.

    parameters, buffers      of the worker's modules
    gradients                of the parameters, from the moment autograd makes them
    optimizer                what the optimiser keeps for each parameter
    activations              what autograd keeps from forward to backward, in forwards and in recomputations
    other                    whatever else is followed, such as buffers for messages

Counted by storage, each once: views and tensors saved twice occupy theirs once. Activations count from when autograd
saves them to when it drops them; everything else is walked at ``update``. In an inference, where autograd saves none,
they are all tensors that operations make (``passing``), messages too. Not counted: what lives inside an operation, and
gradients on their way; the process's own peak and, on CUDA, the allocator's have these.
Counting costs a few µs a saved tensor: it happens in a designated step (``tracking``) and costs nothing in others.
``_top_saved_tensors_default_hooks`` is private to torch and read in this file only.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from stagewright.errors import RunError
from stagewright.machine.out_of_memory import wanted_of
from stagewright.profiler.allocations import AllocationCounter
from stagewright.quantity import format_bytes
from stagewright.runs.result import MemoryUse

__all__ = [
    "Category",
    "MemoryReport",
    "MemoryTracker",
    "held_bytes",
    "process_peak_bytes",
    "reset_process_peak",
]

Category: TypeAlias = Literal["parameters", "gradients", "optimizer", "activations", "buffers", "other"]
_CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a worker knows about its memory."""

    worker: int
    """The worker's rank."""
    current: MemoryUse
    """Own tensors when they were last looked at."""
    peak: MemoryUse
    """Own tensors when they were most."""
    process_peak_bytes: int | None
    """The most that the whole process had in memory; None where the system does not say."""
    allocator_peak_bytes: int | None
    """The most that torch's allocator gave out; None on a CPU."""

    @property
    def peak_memory_bytes(self) -> int:
        """The figure to compare with a device's memory: the allocator's on CUDA, the tensors' own on a CPU."""
        return self.peak.total_bytes if self.allocator_peak_bytes is None else self.allocator_peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """For a run's files."""
        return {**asdict(self), "peak_memory_bytes": self.peak_memory_bytes}


class MemoryTracker:
    """Follows the memory of one worker's tensors and holds it to a limit."""

    def __init__(self, *, worker: int, device: torch.device | None = None, limit_bytes: int | None = None) -> None:
        self.worker = worker
        self.limit_bytes = limit_bytes
        self.active = False
        """Whether this step is tracked."""
        self._device = device or torch.device("cpu")
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []  # of the modules, looked up when tracking begins
        self._buffers: list[torch.Tensor] = []
        self._sources: list[tuple[Category, Callable[[], Iterable[torch.Tensor]]]] = [
            ("parameters", lambda: self._parameters),
            ("gradients", lambda: [one.grad for one in self._parameters if one.grad is not None]),
            ("buffers", lambda: self._buffers),
        ]
        self._owned: set[int] = set()  # storages that were found by walking, or are new gradients
        self._walked: dict[Category, int] = dict.fromkeys(_CATEGORIES, 0)
        self._walked_bytes = 0
        self._new_gradients = 0  # bytes made since the last walk
        self._kept: dict[int, _Storage] = {}
        self._kept_bytes = 0
        self._peak: tuple[dict[Category, int], int, int] = (self._walked, 0, 0)
        self._peak_bytes = 0
        self.rows: list[dict[str, Any]] = []
        """The tracked step over time: a row where something begins, and one for the most that was held during it."""
        self._doing: str | None = None  # None: no rows are wanted
        self._most_bytes = 0
        self._most: tuple[float, dict[Category, int], int, int] | None = None  # since the last row

    def follow(self, category: Category, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Count, at every ``update``, the tensors that a callable gives; a storage belongs to the first that has it."""
        self._sources.append((category, tensors))
        self._sources.sort(key=lambda source: _CATEGORIES.index(source[0]))  # stable: parameters go first

    def follow_module(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Count a module's parameters, buffers and gradients, and an optimiser's states."""
        self._modules.append(module)
        if optimizer is not None:
            self.follow_optimizer(optimizer)

    def follow_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimiser's states."""
        self.follow("optimizer", lambda: _states(optimizer))

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track this step. What it leaves behind (a schedule that spans steps) is given back rightly later."""
        self.active = True
        try:
            with ExitStack() as stack:
                self._parameters = list({id(p): p for module in self._modules for p in module.parameters()}.values())
                self._buffers = [buffer for module in self._modules for buffer in module.buffers()]
                for parameter in self._parameters:
                    if parameter.requires_grad:
                        hook: Any = parameter.register_post_accumulate_grad_hook
                        stack.callback(hook(self._gradient_made).remove)
                self.update()
                yield
                self.note("between steps")
        finally:
            self.active = False
            self._doing = None

    def forward(self) -> AbstractContextManager[Any]:
        """Around a forward (or a recomputation) whose kept tensors count; nothing in a step that is not tracked."""
        if not self.active:
            return nullcontext()
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is None:
            return _Listening(self, self._pack, _unpack)
        # Someone else packs, as checkpointing does while it recomputes: let a tensor tell when it dies.
        pack, unpack = outer
        return _Listening(self, lambda tensor: pack(self._marked(tensor)), unpack)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around a pass without a backward: what its operations make counts while anybody holds it.

        Nothing is to be done on CUDA, whose allocator counts it.
        """

        def watch(num_bytes: int) -> None:
            self._kept_bytes = num_bytes
            self._grown()

        before = self._kept_bytes
        try:
            with nullcontext() if self._device.type == "cuda" else AllocationCounter(watch):
                yield
        finally:
            self._kept_bytes = before

    def update(self) -> None:
        """Look at everything but activations again; call it when gradients or states have come or gone."""
        if not self.active:
            return
        walked: dict[Category, int] = dict.fromkeys(_CATEGORIES, 0)
        self._owned = set()
        for category, tensors in self._sources:
            for tensor in tensors():
                key, num_bytes, _ = _storage_of(tensor)
                if key not in self._owned and key not in self._kept:
                    self._owned.add(key)
                    walked[category] += num_bytes
        self._walked, self._walked_bytes, self._new_gradients = walked, sum(walked.values()), 0
        self._grown()
        if self._device.type == "cuda" and self.limit_bytes is not None:
            self._check(torch.cuda.max_memory_allocated(self._device))

    def begin_rows(self, doing: str = "between steps") -> None:
        """Write down, from now on, what is held while this is done and at every ``note``."""
        self.rows.clear()
        self._doing = doing
        self.note(doing)

    def note(self, doing: str) -> None:
        """Something else begins: look at everything again, and keep a row of it if rows are wanted."""
        most = self._most
        self.update()
        if not self.active or self._doing is None:
            return
        if most is not None:
            self._row(self._doing, *most)
        self._doing = doing
        self._row(doing, time.perf_counter(), self._walked, self._new_gradients, self._kept_bytes)
        self._most = None

    def _row(self, doing: str, time_s: float, walked: dict[Category, int], new_gradients: int, saved_bytes: int) -> None:
        self.rows.append({"time_s": time_s, **asdict(_use(walked, new_gradients, saved_bytes)), "doing": doing})

    def report(self) -> MemoryReport:
        """Current and peak use."""
        on_cuda = self._device.type == "cuda"
        return MemoryReport(
            worker=self.worker,
            current=_use(self._walked, self._new_gradients, self._kept_bytes),
            peak=_use(*self._peak),
            process_peak_bytes=process_peak_bytes(),
            allocator_peak_bytes=torch.cuda.max_memory_allocated(self._device) if on_cuda else None,
        )

    def reset_peak(self) -> None:
        """Forget the peaks: own, process's and allocator's."""
        self._peak_bytes = 0
        self._grown()
        reset_process_peak()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _out_of_memory(self, needed: str) -> RunError:
        """The error of a worker that needs more than it may have, or more than there is."""
        use = _use(self._walked, self._new_gradients, self._kept_bytes)
        return RunError(
            f"worker {self.worker} is out of memory: {needed}; {f'{use}; ' if use.total_bytes else ''}"
            "use more micro-batches, recomputation or more stages"
        )

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Says of an allocation that the device refuses what it says of a limit: who, and what filled the memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.update()
            raise self._out_of_memory(wanted_of(error, self.limit_bytes)) from error

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        # Detached: an operation that saves its own result would keep itself alive.
        return _Kept(self, tensor, tensor.detach())

    def _marked(self, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.detach()
        own.__dict__["stagewright_kept"] = _Kept(self, tensor, None)
        return own

    def _gradient_made(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return  # backward came by without one (``engine.reach``)
        key, num_bytes, _ = _storage_of(parameter.grad)
        if key in self._owned or key in self._kept:
            return
        if num_bytes > parameter.grad.numel() * parameter.grad.element_size():
            self.update()  # a bucket, to which others have moved: what they were in is gone
            return
        self._owned.add(key)
        self._new_gradients += num_bytes
        self._grown()

    def _grown(self) -> None:
        """Take note of a new peak; raise if there is no room for it."""
        total = self._walked_bytes + self._new_gradients + self._kept_bytes
        if self._doing is not None and (self._most is None or total > self._most_bytes):
            self._most_bytes = total
            self._most = (time.perf_counter(), self._walked, self._new_gradients, self._kept_bytes)
        if total > self._peak_bytes:
            self._peak_bytes = total
            self._peak = (self._walked, self._new_gradients, self._kept_bytes)
            if self._device.type != "cuda":
                self._check(total)

    def _check(self, needed_bytes: int) -> None:
        if self.limit_bytes is not None and needed_bytes > self.limit_bytes:
            needed, allowed = format_bytes(needed_bytes), format_bytes(self.limit_bytes)
            if needed == allowed:  # as good as: only the bytes tell them apart
                needed, allowed = f"{needed_bytes:,} bytes", f"{self.limit_bytes:,}"
            raise self._out_of_memory(f"{needed} needed, {allowed} allowed")


class _Storage:
    """A storage that autograd keeps alive."""

    __slots__ = ("holders", "num_bytes", "storage")

    def __init__(self, num_bytes: int, storage: object) -> None:
        self.holders = 0
        self.num_bytes = num_bytes
        self.storage = storage  # held, so that its address is not used again


class _Kept:
    """Lives as long as autograd keeps one tensor."""

    __slots__ = ("key", "tensor", "tracker", "version")

    def __init__(self, tracker: MemoryTracker, saved: torch.Tensor, tensor: torch.Tensor | None) -> None:
        self.tracker, self.tensor, self.version = tracker, tensor, saved._version
        key, num_bytes, storage = _storage_of(saved)
        self.key = 0 if key in tracker._owned else key
        if self.key:
            entry = tracker._kept.get(key)
            if entry is None:
                entry = tracker._kept[key] = _Storage(num_bytes, storage)
                tracker._kept_bytes += num_bytes
            entry.holders += 1
            tracker._grown()

    def __del__(self) -> None:
        if self.key:
            entry = self.tracker._kept[self.key]
            entry.holders -= 1
            if not entry.holders:
                self.tracker._kept_bytes -= entry.num_bytes
                del self.tracker._kept[self.key]


def _unpack(kept: _Kept) -> torch.Tensor:
    assert kept.tensor is not None
    if kept.tensor._version != kept.version:  # autograd checks only what no hook has packed
        raise RuntimeError(
            f"a tensor of shape {list(kept.tensor.shape)} that backward needs was changed in place after it was saved"
        )
    return kept.tensor


class _Listening(torch.autograd.graph.saved_tensors_hooks):
    """Hooks on what autograd saves. What was emptied meanwhile, as a gathered parameter is, no longer counts after."""

    def __init__(self, tracker: MemoryTracker, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        super().__init__(pack, unpack)
        self._tracker = tracker

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for entry in self._tracker._kept.values():
            if isinstance(entry.storage, torch.UntypedStorage) and not entry.storage.nbytes():
                self._tracker._kept_bytes -= entry.num_bytes
                entry.num_bytes = 0


def _storage_of(tensor: torch.Tensor) -> tuple[int, int, object]:
    """A storage's address, its bytes and the storage; a tensor without one stands for itself."""
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()  # a DTensor's own part
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes(), storage
    except (NotImplementedError, RuntimeError):  # sparse and opaque tensors
        return id(tensor), tensor.numel() * tensor.element_size(), tensor


def _use(walked: dict[Category, int], new_gradients: int, saved_bytes: int) -> MemoryUse:
    counted = dict(walked)
    counted["gradients"] += new_gradients
    counted["activations"] += saved_bytes
    return MemoryUse(**counted)


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = optimizer.state.values()
    return [one for state in states for one in state.values() if isinstance(one, torch.Tensor)]


def process_peak_bytes() -> int | None:
    """The most memory that this process has had since it began or since the last reset."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit or None


def held_bytes(device: torch.device) -> int | None:
    """What this worker holds now: of torch's allocator on CUDA, of the process on a CPU; None: not to be known."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return None


def reset_process_peak() -> bool:
    """Begin to measure the process's peak again; False where the system can't."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
