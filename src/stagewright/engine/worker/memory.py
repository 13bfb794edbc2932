"""Memory of a worker's tensors by category, and its peak.

    parameters, buffers      of the worker's modules
    gradients                of the parameters, from when autograd creates them
    optimizer                optimizer states of each parameter
    activations              saved by autograd for backward, in forward passes and in recomputation
    other                    other tracked tensors, such as P2P buffers

Each storage is counted once: views and tensors that are saved twice share theirs. Activations count from when autograd
saves them to when it drops them; all else is counted at ``update``. In inference, where autograd saves nothing, they
are all tensors that operations create (``count_allocations``). Not counted: temporaries inside an operation and
gradients in flight; the process's peak and, on CUDA, the allocator's include these.
Counting costs a few µs per saved tensor: it is done in one designated step (``tracking``) and costs nothing in others.
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
from stagewright.machine.out_of_memory import describe_request
from stagewright.machine.saved_tensor_hooks import innermost_hooks
from stagewright.profiler.allocations import AllocationCounter
from stagewright.quantity import format_bytes
from stagewright.runs.result import MemoryUse

Category: TypeAlias = Literal["parameters", "gradients", "optimizer", "activations", "buffers", "other"]
_CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Current and peak memory of a worker's tensors, and the peaks of its process and allocator."""

    worker: int
    current: MemoryUse
    peak: MemoryUse
    process_peak_bytes: int | None
    """Peak resident memory of the process; None where the system does not report it."""
    allocator_peak_bytes: int | None
    """Peak of torch's CUDA allocator; None on a CPU."""

    @property
    def peak_memory_bytes(self) -> int:
        """The allocator's peak on CUDA, the tensors' on a CPU."""
        return self.peak.total_bytes if self.allocator_peak_bytes is None else self.allocator_peak_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "peak_memory_bytes": self.peak_memory_bytes}


class MemoryTracker:
    """Tracks the memory of one worker's tensors and enforces a limit."""

    def __init__(self, *, worker: int, device: torch.device | None = None, limit_bytes: int | None = None) -> None:
        self.worker = worker
        self.limit_bytes = limit_bytes
        self.active = False
        self._device = device or torch.device("cpu")
        self._modules: list[nn.Module] = []
        self._gathered: list[Callable[[], Iterable[nn.Parameter]]] = []
        self._parameters: list[nn.Parameter] = []  # of the modules, looked up when tracking begins
        self._buffers: list[torch.Tensor] = []
        self._sources: list[tuple[Category, Callable[[], Iterable[torch.Tensor]]]] = [
            ("parameters", lambda: self._parameters),
            ("gradients", lambda: [parameter.grad for parameter in self._parameters if parameter.grad is not None]),
            ("buffers", lambda: self._buffers),
        ]
        self._owned: set[int] = set()  # storages counted at the last update, or new gradients
        self._updated: dict[Category, int] = dict.fromkeys(_CATEGORIES, 0)
        self._updated_bytes = 0
        self._new_gradients = 0  # bytes created since the last update
        self._saved: dict[int, _Storage] = {}
        self._saved_bytes = 0
        self._peak: tuple[dict[Category, int], int, int] = (self._updated, 0, 0)
        self._peak_bytes = 0
        self.rows: list[dict[str, Any]] = []
        """The tracked step over time: a row where an action begins, and one for the peak during it."""
        self._doing: str | None = None  # None: no rows are recorded
        self._most_bytes = 0
        self._most: tuple[float, dict[Category, int], int, int] | None = None  # since the last row

    def follow(self, category: Category, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Count, at every ``update``, the tensors that a callable returns; a storage counts for the first category."""
        self._sources.append((category, tensors))
        self._sources.sort(key=lambda source: _CATEGORIES.index(source[0]))  # stable: parameters go first

    def follow_module(self, module: nn.Module) -> None:
        """Count a module's parameters, buffers and gradients."""
        self._modules.append(module)

    def follow_parameters(self, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        """Count parameters, and their gradients, that are not in a module all the time: gathered ones of FSDP."""
        self._gathered.append(parameters)

    def follow_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer's states."""

        def states() -> list[torch.Tensor]:
            values = [value for state in optimizer.state.values() for value in state.values()]
            return [value for value in values if isinstance(value, torch.Tensor)]

        self.follow("optimizer", states)

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track this step; tensors that outlive it (a schedule that spans steps) are still released correctly."""
        self.active = True
        try:
            with ExitStack() as stack:
                held = [parameter for module in self._modules for parameter in module.parameters()]
                held += [parameter for gathered in self._gathered for parameter in gathered()]
                self._parameters = list({id(parameter): parameter for parameter in held}.values())
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
        """Count the tensors that a forward (or recomputation) saves; does nothing in steps that are not tracked."""
        if not self.active:
            return nullcontext()
        if (outer := innermost_hooks()) is None:
            return _SavedTensorHooks(self, self._pack, _unpack)
        pack, unpack = outer  # as checkpointing does during recomputation: count until the tensor is freed
        return _SavedTensorHooks(self, lambda tensor: pack(self._marked(tensor)), unpack)

    @contextmanager
    def count_allocations(self) -> Iterator[None]:
        """Count what the operations of a pass without backward allocate, while it is referenced.

        Does nothing on CUDA, where the allocator counts it.
        """

        def watch(num_bytes: int) -> None:
            self._saved_bytes = num_bytes
            self._check_peak()

        before = self._saved_bytes
        try:
            with nullcontext() if self._device.type == "cuda" else AllocationCounter(watch):
                yield
        finally:
            self._saved_bytes = before

    @contextmanager
    def count_gradient(self, parameter: nn.Parameter) -> Iterator[None]:
        """Count a gradient that is freed at the end of the block."""
        num_bytes = _storage_of(parameter.grad)[1] if self.active and parameter.grad is not None else 0
        self._new_gradients += num_bytes
        self._check_peak()
        yield
        self._new_gradients -= num_bytes

    def hold(self, tensor: torch.Tensor) -> object:
        """Return an object that counts a tensor as an activation while it lives; None in steps that are not tracked."""
        return _SavedTensor(self, tensor, None) if self.active else None

    def update(self) -> None:
        """Count everything but activations again; call it when gradients or states were created or freed."""
        if not self.active:
            return
        updated: dict[Category, int] = dict.fromkeys(_CATEGORIES, 0)
        self._owned = set()
        for category, tensors in self._sources:
            for tensor in tensors():
                key, num_bytes, _ = _storage_of(tensor)
                if key not in self._owned and key not in self._saved:
                    self._owned.add(key)
                    updated[category] += num_bytes
        self._updated, self._updated_bytes, self._new_gradients = updated, sum(updated.values()), 0
        self._check_peak()
        if self._device.type == "cuda" and self.limit_bytes is not None:
            self._check(torch.cuda.max_memory_allocated(self._device))

    def begin_rows(self, doing: str = "between steps") -> None:
        """Record rows from now on: at every ``note``, and the peak in between."""
        self.rows.clear()
        self._doing = doing
        self.note(doing)

    def note(self, doing: str) -> None:
        """Begin another action: update, and add a row if rows are recorded."""
        most = self._most
        self.update()
        if not self.active or self._doing is None:
            return
        if most is not None:
            self._row(self._doing, *most)
        self._doing = doing
        self._row(doing, time.perf_counter(), self._updated, self._new_gradients, self._saved_bytes)
        self._most = None

    def _row(
        self, doing: str, time_s: float, updated: dict[Category, int], new_gradients: int, saved_bytes: int
    ) -> None:
        self.rows.append({"time_s": time_s, **asdict(_use(updated, new_gradients, saved_bytes)), "doing": doing})

    def report(self) -> MemoryReport:
        """Return current and peak memory."""
        on_cuda = self._device.type == "cuda"
        return MemoryReport(
            worker=self.worker,
            current=_use(self._updated, self._new_gradients, self._saved_bytes),
            peak=_use(*self._peak),
            process_peak_bytes=process_peak_bytes(),
            allocator_peak_bytes=torch.cuda.max_memory_allocated(self._device) if on_cuda else None,
        )

    def reset_peak(self) -> None:
        """Reset the peaks of tensors, process and allocator."""
        self._peak_bytes = 0
        self._check_peak()
        reset_process_peak()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _out_of_memory(self, needed: str) -> RunError:
        """Return the error of a worker that exceeds its limit or the device's memory."""
        use = _use(self._updated, self._new_gradients, self._saved_bytes)
        return RunError(
            f"worker {self.worker} is out of memory: {needed}; {f'{use}; ' if use.total_bytes else ''}"
            "use more micro-batches, activation checkpointing (--recompute always) or more stages"
        )

    @contextmanager
    def explain_oom(self) -> Iterator[None]:
        """Turn a CUDA out-of-memory error into one that names the worker and its memory by category."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.update()
            raise self._out_of_memory(describe_request(error, self.limit_bytes)) from error

    def _pack(self, tensor: torch.Tensor) -> _SavedTensor:
        # Detached: an operation that saves its own result would never be freed.
        return _SavedTensor(self, tensor, tensor.detach())

    def _marked(self, tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.detach()
        alias.__dict__["stagewright_saved"] = self.hold(tensor)
        return alias

    def _gradient_made(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return  # backward without a gradient (``keep_differentiable.py``)
        key, num_bytes, _ = _storage_of(parameter.grad)
        if key in self._owned or key in self._saved:
            return
        if num_bytes > parameter.grad.numel() * parameter.grad.element_size():
            self.update()  # a DDP bucket that other gradients moved into
            return
        self._owned.add(key)
        self._new_gradients += num_bytes
        self._check_peak()

    def _check_peak(self) -> None:
        """Record a new peak; raise where it exceeds the limit."""
        total = self._updated_bytes + self._new_gradients + self._saved_bytes
        if self._doing is not None and (self._most is None or total > self._most_bytes):
            self._most_bytes = total
            self._most = (time.perf_counter(), self._updated, self._new_gradients, self._saved_bytes)
        if total > self._peak_bytes:
            self._peak_bytes = total
            self._peak = (self._updated, self._new_gradients, self._saved_bytes)
            if self._device.type != "cuda":
                self._check(total)

    def _check(self, needed_bytes: int) -> None:
        if self.limit_bytes is not None and needed_bytes > self.limit_bytes:
            needed, allowed = format_bytes(needed_bytes), format_bytes(self.limit_bytes)
            if needed == allowed:  # when rounded
                needed, allowed = f"{needed_bytes:,} bytes", f"{self.limit_bytes:,}"
            raise self._out_of_memory(f"{needed} needed, {allowed} allowed")


@dataclass(slots=True, eq=False)
class _Storage:
    """A storage that autograd holds."""

    num_bytes: int
    storage: object  # referenced, so that its address is not reused
    holders: int = 0


class _SavedTensor:
    """Lives as long as autograd holds one saved tensor."""

    __slots__ = ("key", "tensor", "tracker", "version")

    def __init__(self, tracker: MemoryTracker, saved: torch.Tensor, tensor: torch.Tensor | None) -> None:
        self.tracker, self.tensor, self.version = tracker, tensor, saved._version
        key, num_bytes, storage = _storage_of(saved)
        self.key = 0 if key in tracker._owned else key
        if self.key:
            entry = tracker._saved.get(key)
            if entry is None:
                entry = tracker._saved[key] = _Storage(num_bytes, storage)
                tracker._saved_bytes += num_bytes
            entry.holders += 1
            tracker._check_peak()

    def __del__(self) -> None:
        if self.key:
            entry = self.tracker._saved[self.key]
            entry.holders -= 1
            if not entry.holders:
                self.tracker._saved_bytes -= entry.num_bytes
                del self.tracker._saved[self.key]


def _unpack(saved: _SavedTensor) -> torch.Tensor:
    assert saved.tensor is not None
    if saved.tensor._version != saved.version:  # autograd checks only tensors without hooks
        raise RuntimeError(
            f"a tensor of shape {list(saved.tensor.shape)} that backward needs was changed in place after it was saved"
        )
    return saved.tensor


class _SavedTensorHooks(torch.autograd.graph.saved_tensors_hooks):
    """Hooks on saved tensors; storages that were freed meanwhile, such as gathered parameters, stop counting."""

    def __init__(self, tracker: MemoryTracker, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        super().__init__(pack, unpack)
        self._tracker = tracker

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for entry in self._tracker._saved.values():
            if isinstance(entry.storage, torch.UntypedStorage) and not entry.storage.nbytes():
                self._tracker._saved_bytes -= entry.num_bytes
                entry.num_bytes = 0


def _storage_of(tensor: torch.Tensor) -> tuple[int, int, object]:
    """Return a storage's address, its bytes and the storage; the tensor itself where it has none."""
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()  # the local shard of a DTensor
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes(), storage
    except (NotImplementedError, RuntimeError):  # sparse and opaque tensors
        return id(tensor), tensor.numel() * tensor.element_size(), tensor


def _use(updated: dict[Category, int], new_gradients: int, saved_bytes: int) -> MemoryUse:
    counted = dict(updated)
    counted["gradients"] += new_gradients
    counted["activations"] += saved_bytes
    return MemoryUse(**counted)


def process_peak_bytes() -> int | None:
    """Return the peak resident memory of this process since its start or the last reset."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit or None


def held_bytes(device: torch.device) -> int | None:
    """Return the memory in use: torch's allocator on CUDA, the process on a CPU; None where it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return None


def reset_process_peak() -> bool:
    """Reset the process's peak; False where the system can't."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return True
    except OSError:
        return False
