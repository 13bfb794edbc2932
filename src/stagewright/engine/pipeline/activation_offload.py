"""Activation offload: what autograd saves in chosen units goes to host memory, and comes back in backward.

    compute stream   unit 1 | unit 2 | unit 3 | …      … | unit 3 | unit 2 | unit 1      backward
    copy stream             | 1 ──────► host | 2 …     … | ◄────────── 1    |

Copies run on a stream of their own, to pinned memory, beside the compute of later units. Before a certain later unit,
compute waits for the copies of a unit and frees its activations; in backward, they are fetched when that unit is
reached again (``spec.activation_checkpointing.offload_windows``).

Each storage is moved once, however many views of it autograd saves. Parameters and buffers are never moved, nor are
tensors of other devices or a small part of a larger storage. A unit whose activations are still on the device when
backward needs them is not fetched. On a CPU, whose memory is the host's, copies take the same way and save nothing.

A stage with an offloaded unit runs its whole backward in the first half of a split one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from stagewright import structure
from stagewright.engine.pipeline.unit_checkpointing import OFFLOAD_MARK, replace_call
from stagewright.graph.stage import Stage
from stagewright.spec.activation_checkpointing import offload_windows

MIN_BYTES = 1024
"""Smaller storages stay on the device."""
MAX_STORAGE_RATIO = 4
"""A tensor whose storage is more times as large, like a sample of a batch, stays on the device."""


def offload_units(stage: Stage, names: Collection[str], offload: ActivationOffload) -> None:
    """Offload what the unit calls of these names save; does nothing without any."""
    positions = [position for position, call in enumerate(stage.calls) if call.name in names]
    if positions:
        stage.__dict__[OFFLOAD_MARK] = units = OffloadedUnits(stage, positions, offload)
        units.apply(stage)


class OffloadedUnits:
    """The offloaded unit calls of one stage, and those before which their copies are freed."""

    def __init__(self, stage: Stage, positions: list[int], offload: ActivationOffload) -> None:
        self._stage, self._positions, self._offload = stage, positions, offload
        self._windows = dict(zip(positions, offload_windows(positions, len(stage.calls)), strict=True))
        self._units: dict[int, _Unit] = {}  # of the current forward, by position

    def apply(self, stage: Stage) -> None:
        """Change the code of the stage, or of a variant of it."""
        nodes = [node for node in stage.graph.nodes if node.op == "call_module"]
        for position, node in enumerate(nodes):
            if any(position == window[0] for window in self._windows.values()):
                with stage.graph.inserting_before(node):
                    stage.graph.call_function(self._named("release", self._release), (position,))
            if any(position == window[1] for window in self._windows.values()):
                with stage.graph.inserting_after(node):
                    stage.graph.call_function(self._named("fetch", self._fetch_in_backward), (position, node))
            if position in self._windows:
                wrap = partial(_OffloadedCall, self, position)
                replace_call(self._stage, stage, node, f"stagewright_offloaded_{stage.calls[position].index}", wrap)

    @staticmethod
    def _named(name: str, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function for generated code, which takes no methods."""

        def call(*args: Any) -> None:
            function(*args)

        call.__name__ = f"stagewright_{name}"
        return call

    def run(self, position: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run an offloaded unit."""
        if not torch.is_grad_enabled():
            return module(*args, **kwargs)
        if position == self._positions[0]:
            self._units.clear()
        # A model that was not captured is one function of the stage.
        holder = module if isinstance(module, nn.Module) else self._stage
        stays = self._windows[position][0] >= len(self._stage.calls)
        with self._offload.forward(holder, stays=stays) as unit:
            self._units[position] = unit
            return module(*args, **kwargs)

    def _release(self, position: int) -> None:
        """Free the activations of units whose copies are due."""
        if torch.is_grad_enabled():
            for unit in self._due(position, 0):
                self._offload.free(unit)

    def _fetch_in_backward(self, position: int, output: Any) -> None:
        """Fetch activations when backward reaches the output of a unit."""
        due = self._due(position, 1)
        tensors = [leaf for leaf in structure.tensors(output) if leaf.requires_grad and leaf.grad_fn is not None]
        if not due or not tensors or not torch.is_grad_enabled():
            return

        def fetch(_: torch.Tensor) -> None:
            for unit in reversed(due):
                self._offload.fetch(unit)

        tensors[0].register_hook(fetch)  # type: ignore[no-untyped-call]

    def _due(self, position: int, which: int) -> list[_Unit]:
        return [unit for start, unit in self._units.items() if self._windows[start][which] == position]


class _OffloadedCall:
    """A unit call whose saved tensors are offloaded."""

    def __init__(self, owner: OffloadedUnits, position: int, module: Callable[[], nn.Module]) -> None:
        self._owner, self._position, self._module = owner, position, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.run(self._position, self._module(), args, kwargs)


class ActivationOffload:
    """Moves saved tensors of one worker's units between its device and the host."""

    def __init__(self, device: torch.device, hold: Callable[[torch.Tensor], object] = lambda tensor: None) -> None:
        """``hold(tensor)`` returns an object that counts a tensor's memory for as long as it lives."""
        self.moved_bytes = 0
        """Bytes copied to the host so far."""
        self._device, self._hold = device, hold
        self._stream: torch.cuda.Stream | None = None
        self._staying: list[_Unit] = []  # on the device since the last pass
        self._known: dict[int, tuple[Any, int, weakref.ref[_Entry]]] = {}  # by address: storage, version, entry

    @contextmanager
    def forward(self, module: nn.Module, *, stays: bool) -> Iterator[_Unit]:
        """Offload what the forward of a unit saves; ``stays``: nothing frees it before the next pass."""
        if self._stream is None and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        while self._staying and not stays:
            self.free(self._staying.pop())
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        unit = _Unit(module=module)
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, unit), self._unpack):
            yield unit
        unit.kept.clear()
        if stays:
            self._staying.append(unit)

    def _pack(self, unit: _Unit, tensor: torch.Tensor) -> _Kept | _Moved:
        if not self._is_moved(unit, tensor):
            return _Kept(tensor.detach(), tensor._version)  # detached: it may be the result of what saves it
        storage, version = tensor.untyped_storage(), tensor._version
        known = self._known.get(storage.data_ptr())
        entry = known[2]() if known is not None and not known[0].expired() and known[1] == version else None
        if entry is None:
            entry = self._copy_to_host(storage)
            weak_storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._known[storage.data_ptr()] = weak_storage, version, weakref.ref(entry)
        unit.entries.append(weakref.ref(entry))
        return _Moved(entry, unit, tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride()))

    def _is_moved(self, unit: _Unit, tensor: torch.Tensor) -> bool:
        """Whether a saved tensor is a plain one of this device, and no parameter or buffer."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return False
        if tensor.device != self._device or isinstance(tensor, nn.Parameter):
            return False
        storage, own_bytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
        if not MIN_BYTES <= storage.nbytes() <= MAX_STORAGE_RATIO * own_bytes:
            return False
        return storage.data_ptr() not in unit.kept_storages()

    def _copy_to_host(self, storage: torch.UntypedStorage) -> _Entry:
        """Begin to copy a storage; it stays on the device until ``free``."""
        source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        self.moved_bytes += source.numel()
        if self._stream is None:
            return _Entry(host=source.clone(), on_device=source, held=self._hold(source))
        host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(source, non_blocking=True)
        return _Entry(host=host, on_device=source, ready=self._stream.record_event(), held=self._hold(source))

    def free(self, unit: _Unit) -> None:
        """Free the activations of a unit on the device, once they are copied."""
        for entry in unit.live_entries():
            if not entry.is_fetched:
                entry.wait(self._device)
                entry.on_device = entry.held = entry.ready = None

    def fetch(self, unit: _Unit) -> None:
        """Begin to copy the activations of a unit back."""
        if unit.is_fetched:
            return
        unit.is_fetched = True
        for entry in unit.live_entries():
            if entry.on_device is None:
                self._copy_to_device(entry)

    def _copy_to_device(self, entry: _Entry) -> None:
        entry.is_fetched = True
        target = torch.empty(entry.host.numel(), dtype=torch.uint8, device=self._device)
        entry.on_device, entry.held = target, self._hold(target)
        if self._stream is None:
            target.copy_(entry.host)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # it may still use this memory
        with torch.cuda.stream(self._stream):
            target.copy_(entry.host, non_blocking=True)
        entry.ready = self._stream.record_event()

    def _unpack(self, packed: _Kept | _Moved) -> torch.Tensor:
        if isinstance(packed, _Kept):
            return packed.get()
        self.fetch(packed.unit)
        entry = packed.entry
        if entry.on_device is None:  # freed for a later micro-batch after its unit was fetched
            self._copy_to_device(entry)
        assert entry.on_device is not None
        if entry.is_fetched:
            entry.wait(self._device)
        tensor = torch.empty(0, dtype=packed.dtype, device=self._device)
        return tensor.set_(entry.on_device.untyped_storage(), *packed.view)


@dataclass(slots=True, eq=False)
class _Unit:
    """What one forward of a unit saves."""

    module: nn.Module
    entries: list[weakref.ref[_Entry]] = field(default_factory=list)
    is_fetched: bool = False
    kept: set[int] = field(default_factory=set)
    """Addresses of parameters and buffers, while the forward runs."""

    def kept_storages(self) -> set[int]:
        """Return the addresses of parameters and buffers, found when the forward runs: FSDP gathers them for it."""
        if not self.kept:
            for value in (*self.module.parameters(), *self.module.buffers()):
                local = value.to_local() if isinstance(value, DTensor) else value
                self.kept.add(local.untyped_storage().data_ptr())
        return self.kept

    def live_entries(self) -> list[_Entry]:
        """Return what autograd still holds."""
        return [entry for reference in self.entries if (entry := reference()) is not None]


@dataclass(slots=True, eq=False, weakref_slot=True, kw_only=True)
class _Entry:
    """A storage that was copied to the host; it lives as long as autograd holds a view of it."""

    host: torch.Tensor
    on_device: torch.Tensor | None
    """The storage itself until it is copied, and its copy from when it is fetched."""
    held: object
    ready: Any = None
    """When the last copy is done."""
    is_fetched: bool = False

    def wait(self, device: torch.device) -> None:
        """Let compute wait for the last copy."""
        if self.ready is not None:
            torch.cuda.current_stream(device).wait_event(self.ready)

    def __del__(self) -> None:
        if self.is_fetched and self.on_device is not None:
            self.wait(self.on_device.device)  # its memory is used again


@dataclass(frozen=True, slots=True)
class _Moved:
    """A saved tensor on the host."""

    entry: _Entry
    unit: _Unit
    dtype: torch.dtype
    view: tuple[Any, torch.Size, tuple[int, ...]]
    """Offset, size and strides in the storage."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A saved tensor that stays on the device."""

    tensor: torch.Tensor
    version: int

    def get(self) -> torch.Tensor:
        """Return the tensor; autograd checks for changes in place only without hooks."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that backward needs was changed in place after it was "
                "saved"
            )
        return self.tensor
