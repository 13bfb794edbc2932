"""CPU offload: run a model once on a device that it does not fit on.

A model that is larger than a device still has to be captured, profiled and checked for parity before each worker keeps
its part. Its parameters then stay in host memory; an operation on the device gets a temporary copy of each parameter
that it needs. Gradients return to the host, and tensors that autograd saves are moved there too.

    move_or_offload(module, device)            move a module; offload its parameters where they do not fit
    with offloaded(module, device):    run it there; each operation gets copies of its parameters
    with resident(module, device):    hold a part of it (a unit, a stage) on the device, e.g. to time it

It is slow, because weights cross the bus at each use: for work that is done once, never for a timed step.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from stagewright import structure
from stagewright.machine.hollow import is_hollow, is_hollow_model, skip_products

ROOM = 4
"""A model is moved to a device with this many times its bytes: weights, gradients twice (capture compares those of the
graph with the model's), and an example batch."""

# Queries that the host tensor can answer, and calls that must reach the parameter itself.
_QUERIES = """
    __get__ __set__ __delete__ __hash__ __len__ __repr__ _is_view data_ptr dim element_size has_names is_complex
    is_contiguous is_floating_point is_pinned is_same_size ndimension nelement numel register_hook
    register_post_accumulate_grad_hook requires_grad_ retain_grad size storage storage_offset stride untyped_storage
"""
_ON_HOST_TENSOR = frozenset(_QUERIES.split())
# Attributes for the device, and views: those of the temporary copy, not of the host parameter.
_DEVICE_ATTRIBUTES = tuple(getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu"))
_VIEWS = tuple(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
_AUTOGRAD_CALLS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def room_of(device: torch.device, limit_bytes: int | None = None) -> int:
    """Return the bytes of a device, or the limit."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else sys.maxsize
    return int(total if limit_bytes is None else min(total, limit_bytes))


def move_or_offload(module: nn.Module, device: torch.device, room_bytes: int | None = None) -> nn.Module:
    """Move a module to a device, or offload its parameters where the device (or ``room_bytes``) is too small."""
    if device.type == "cpu":
        return module
    if ROOM * sum(parameter.nbytes for parameter in module.parameters()) <= room_of(device, room_bytes):
        return module.to(device)
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = buffer.to(device)
    _offloaded.add(module)
    return module


_offloaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def was_offloaded(module: nn.Module) -> bool:
    """Whether ``move_or_offload`` offloaded a module; parameters of other modules on the host are a mistake."""
    return module in _offloaded


def is_offloaded(module: nn.Module, device: torch.device) -> bool:
    """Whether a module has parameters on the host though it runs on another device."""
    return device.type != "cpu" and any(parameter.device.type == "cpu" for parameter in module.parameters())


@contextlib.contextmanager
def offloaded(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a module on a device; operations get temporary copies of offloaded parameters, and skip hollow ones."""
    if is_hollow_model(module):
        with skip_products():
            yield
        return
    if not is_offloaded(module, device):
        yield
        return
    with _copying(device):
        yield


@contextlib.contextmanager
def resident(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Hold all of a module's parameters on a device meanwhile, hollow ones as zeros; they must not change there."""
    moved = [
        (parameter, parameter.data)
        for parameter in module.parameters()
        if (device.type != "cpu" and parameter.device != device) or is_hollow(parameter)
    ]
    try:
        for parameter, on_host in moved:
            parameter.data = on_host.to(device).contiguous()
        yield
    finally:
        for parameter, on_host in moved:
            parameter.data = on_host


def is_temporary(tensor: torch.Tensor) -> bool:
    """Whether a tensor that autograd saves is the temporary copy of a parameter, which can be copied again."""
    return any(mode.origin_of(tensor) is not None for mode in _active)


_active: list[_TemporaryCopies] = []


@contextlib.contextmanager
def _copying(device: torch.device) -> Iterator[None]:
    mode = _TemporaryCopies(device)
    _active.append(mode)
    try:
        with mode, torch.autograd.graph.saved_tensors_hooks(mode.pack, mode.unpack):
            yield
    finally:
        _active.remove(mode)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor that autograd saves."""

    tensor: torch.Tensor
    """A tensor on the host, or a parameter."""
    device: torch.device | None = None
    """The device to restore it to; None: unchanged."""
    view: tuple[Any, ...] | None = None
    """For the copy of a parameter: shape, strides and offset of the saved view."""


class _TemporaryCopies(TorchFunctionMode):
    """Passes copies of host parameters to every operation on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._place = device
        # By the address of each live copy: its storage and its parameter. Its views may outlive an operation.
        self._origins: dict[int, tuple[Any, torch.Tensor]] = {}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Operators are named with their overloads: add_.Tensor.
        name = getattr(function, "__name__", "").partition(".")[0]
        first = next(iter((*args, *kwargs.values())), None)
        if function in _DEVICE_ATTRIBUTES and _is_offloaded_parameter(first):
            return function(torch.empty(0, device=self._place))
        if function in _AUTOGRAD_CALLS:
            return self._differentiate(function, *args, **kwargs)
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if (name in _ON_HOST_TENSOR and function not in _VIEWS) or (writes and _is_offloaded_parameter(first)):
            return function(*args, **kwargs)
        copies: dict[int, torch.Tensor] = {}
        args, kwargs = structure.map_tensors(lambda tensor: self._copy(tensor, copies), (args, kwargs))
        return function(*args, **kwargs)

    def _differentiate(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run autograd with copies in its threads too: activation checkpointing recomputes there.

        Graph edges replace tensors, for which torch would call this mode again, endlessly.
        """
        if function == torch.Tensor.backward:
            function, kwargs["grad_tensors"] = torch.autograd.backward, kwargs.pop("gradient", None)
        if kwargs.get("materialize_grads"):  # torch materializes zeros for tensors only
            return function(*args, **kwargs)
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = _edges(kwargs["inputs"])
        edges = [_edges(argument) for argument in args]
        with self:
            return function(*edges, **kwargs)

    def _copy(self, tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
        if not _is_offloaded_parameter(tensor):
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = copy = tensor.to(self._place, copy=not isinstance(tensor, FakeTensor))
            if not isinstance(copy, FakeTensor):
                storage = copy.untyped_storage()
                self._origins = {key: entry for key, entry in self._origins.items() if not entry[0].expired()}
                self._origins[storage.data_ptr()] = (StorageWeakRef(storage), tensor)  # type: ignore[no-untyped-call]
        return copies[id(tensor)]

    def origin_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the parameter whose unmodified copy, or a view of it, a tensor is."""
        if not self._origins or isinstance(tensor, FakeTensor):
            return None
        storage, origin = self._origins.get(tensor.untyped_storage().data_ptr(), (None, None))
        return None if storage is None or storage.expired() or tensor._version else origin

    def pack(self, tensor: torch.Tensor) -> _Packed:
        """Save the copy of a parameter as the parameter, and anything else on the host."""
        if isinstance(tensor, FakeTensor):
            return _Packed(tensor)
        origin = self.origin_of(tensor)
        if origin is not None and origin.dtype == tensor.dtype:
            return _Packed(origin, self._place, (tensor.shape, tensor.stride(), tensor.storage_offset()))
        # Attention saves its dropout state on the host and expects it there.
        return _Packed(tensor) if tensor.device.type == "cpu" else _Packed(tensor.cpu(), tensor.device)

    def unpack(self, saved: _Packed) -> torch.Tensor:
        """Restore a saved tensor on its device."""
        back = saved.tensor if saved.device is None else saved.tensor.detach().to(saved.device)
        return back if saved.view is None else back.as_strided(*saved.view)


def _edges(tensors: Any) -> Any:
    return structure.map_tensors(torch.autograd.graph.get_gradient_edge, tensors)


def _is_offloaded_parameter(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.device.type == "cpu"
